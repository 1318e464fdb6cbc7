"""Malformed and well formed offsets with their effective bounds: one file for the tests of every path."""

import dataclasses
import json
import pathlib

FILE = pathlib.Path(__file__).parent / "fixtures" / "offsets.json"


@dataclasses.dataclass(frozen=True)
class Offsets:
    why: str
    rows: int
    offs: list[int]
    bounds: list[int]  # effective, one more than groups
    status: int  # 1 negative, 2 decreasing, 4 beyond the rows

    def __str__(self) -> str:
        return self.why.replace(" ", "-").replace(",", "").replace(":", "")


ALL = [Offsets(**entry) for entry in json.loads(FILE.read_text())]
