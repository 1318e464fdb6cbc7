"""The problems of interest, declared once: tests, benchmarks and tuning import them from here.

Counts are literal, so that no table depends on a random generator. dsv3, qwen3 and mixtral are drawn from
Zipf laws (exponents 0.6, 0.8 and 0.3; 0.5 for decode) and shuffled; `hot` gives one expert 80 % of the rows. Recorded
counts are in `choice.py`.
"""

import dataclasses

from cupy_gmm.counts import scale


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One grouped product: x (rows, k) times w (groups, k, n), with the rows of each group."""

    name: str
    groups: int
    k: int
    n: int
    rows: int
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.counts) == self.groups, self.name
        assert sum(self.counts) == self.rows, self.name

    def scaled(self, rows: int) -> "Problem":
        """The same imbalance with another number of rows."""
        return dataclasses.replace(self, rows=rows, counts=scale(self.counts, rows))


# fmt: off
_SKEWED = (
    64, 400, 64, 64, 400, 64, 400, 64, 400, 400, 64, 64, 400, 400, 64, 400, 64, 400, 400, 64, 64, 784,
    64, 64, 64, 64, 64, 400, 64, 400, 64, 400, 64, 64, 64, 64, 400, 400, 784, 400, 64, 400, 64, 400,
    400, 400, 400, 64, 64, 64, 400, 400, 784, 64, 400, 64, 400, 64, 400, 784, 400, 400, 64, 64,
)
_DSV3 = (
    141, 130, 308, 628, 467, 122, 246, 194, 161, 159, 169, 118, 167, 163, 201, 526, 153, 205, 229, 405,
    368, 235, 962, 263, 207, 177, 142, 221, 133, 318, 157, 117,
)
_QWEN3 = (
    93, 100, 120, 164, 95, 96, 289, 178, 90, 427, 691, 135, 1021, 89, 154, 93, 303, 142, 141, 151, 554,
    76, 84, 879, 72, 112, 77, 162, 65, 270, 109, 184, 147, 118, 90, 346, 168, 173, 79, 103, 153, 275,
    118, 502, 430, 91, 122, 98, 792, 132, 245, 72, 416, 95, 338, 295, 112, 607, 192, 241, 143, 128, 641,
    92, 1228, 75, 207, 149, 452, 240, 218, 177, 317, 114, 73, 126, 73, 176, 96, 151, 86, 78, 175, 145,
    3768, 110, 117, 181, 76, 137, 135, 141, 124, 121, 141, 105, 188, 179, 415, 88, 263, 78, 107, 100,
    95, 89, 334, 2121, 1615, 140, 172, 133, 95, 85, 82, 89, 352, 105, 75, 211, 91, 248, 255, 263, 99,
    84, 112, 123,
)
_MIXTRAL = (
    1243, 1049, 1511, 786, 986, 830, 966, 821,
)
_DECODE = (
    8, 4, 2, 3, 2, 3, 0, 3, 2, 1, 8, 4, 3, 3, 7, 2, 3, 3, 2, 3, 4, 4, 3, 6, 0, 5, 6, 2, 7, 4, 9, 3, 3,
    3, 7, 3, 1, 3, 8, 2, 5, 3, 2, 2, 12, 3, 12, 5, 5, 5, 3, 4, 2, 4, 3, 5, 0, 2, 4, 13, 1, 5, 3, 6, 6,
    8, 7, 2, 1, 1, 3, 5, 4, 1, 25, 2, 3, 4, 1, 13, 2, 3, 2, 1, 0, 3, 3, 4, 3, 0, 7, 4, 4, 7, 16, 0, 0,
    0, 1, 1, 4, 2, 1, 3, 3, 5, 1, 9, 6, 3, 6, 3, 7, 1, 4, 0, 4, 7, 7, 0, 3, 2, 1, 3, 5, 5, 6, 6,
)
# fmt: on

PROBLEMS = (
    Problem("balanced", 64, 4096, 2048, 16384, (256,) * 64),
    Problem("skewed", 64, 4096, 2048, 16384, _SKEWED),
    Problem("hot", 64, 4096, 2048, 16384, (52,) * 17 + (13108,) + (52,) * 46),
    Problem("dsv3-up", 32, 7168, 4096, 8192, _DSV3),
    Problem("qwen3-30b-up", 128, 2048, 1536, 32768, _QWEN3),
    Problem("qwen3-30b-down", 128, 768, 2048, 32768, _QWEN3),
    Problem("mixtral-up", 8, 4096, 28672, 8192, _MIXTRAL),
    Problem("mixtral-down", 8, 14336, 4096, 8192, _MIXTRAL),
    Problem("decode-qwen3-up", 128, 2048, 1536, 512, _DECODE),
)


def problem(name: str) -> Problem:
    """The problem of this name."""
    return next(each for each in PROBLEMS if each.name == name)
