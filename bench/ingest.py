"""Measures how many bytes a clock an SM moves: `python -m bench.ingest`, on Hopper.

A kernel that does nothing else loads or stores pieces of 32 KB, by the copy engine (boxes of a matrix, as the weights
of the forward kernel), by its threads (16 bytes each: cp.async, or stores) or by both at once, on one SM or on many.
The pieces are in the L2, all SMs walking the same 8 MB one piece apart, so that neighbours can share what they read, or
24 MB of which each SM begins with a part of its own, so that they cannot; or they are in 2 GB of memory. Notes argue
from it about what a kernel can hide behind its products.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import struct
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import facts, one_gpu
from cupy_gmm import _compile, _device, _launch, _source, _tensormap

SOURCE = pathlib.Path(__file__).with_suffix(".cu")
SYMBOL = "ingest"
ARCH = "sm_90a"
PARAMS = struct.Struct("<128s128sQQiiiii28x")  # IngestParams
PIECE_BYTES, PLACES, THREADS, COLUMNS = 32 << 10, 6, 160, 2048
WAYS = {"engine": 1, "threads": 2, "both": 3}
STORES = 4
EACH = 496  # pieces of a CTA: 2 GB / 32 KB / 132, so that no CTA reads in memory what another one has read


@dataclasses.dataclass(frozen=True, slots=True)
class Walk:
    """Which pieces the CTAs move.

    Attributes:
        nbytes: Of all pieces.
        own: Whether each CTA begins with a part of its own, and not one piece behind its neighbour.
        fresh: Whether every launch goes on behind the last one, and so finds nothing in the L2.
    """

    nbytes: int
    own: bool
    fresh: bool


WALKS = {
    "L2, shared walk": Walk(8 << 20, own=False, fresh=False),
    "L2, own parts": Walk(24 << 20, own=True, fresh=False),
    "memory": Walk(2 << 30, own=True, fresh=True),
}


def text() -> str:
    """What is compiled: the kernel, behind the sources it includes."""
    return _source.header_text() + SOURCE.read_text()


def maps(address: int, nbytes: int) -> tuple[bytes, bytes]:
    """Tensor maps for loads and stores of a matrix of `COLUMNS` columns that fills `nbytes`."""
    rows, pitch = nbytes // (2 * COLUMNS), 2 * COLUMNS
    blocks = COLUMNS // 64
    loads = _tensormap.MapShape("bfloat16", (64, rows, blocks), (pitch, 128), (64, 64, 4))
    stores = _tensormap.MapShape("bfloat16", (64, rows, blocks, 1), (pitch, 128, nbytes), (64, 64, 1, 1))
    return loads.encode(address), stores.encode(address)


class Mover:
    """The kernel, loaded, and the memory in which it moves pieces."""

    def __init__(self) -> None:
        self.cupy = _device.import_cupy()
        words = max(walk.nbytes for walk in WALKS.values()) // 8
        self.memory = self.cupy.random.randint(0, 2**31, words, dtype=self.cupy.int64)
        module = _compile.load(_compile.compile_source(text(), ARCH, SOURCE.name), self.cupy.cuda.Device().id)
        self.handle = module.function(SYMBOL, PLACES * PIECE_BYTES).handle
        self.launches = itertools.count()

    def measure(self, walk: Walk, ctas: int, ways: int) -> dict[str, float]:
        """Bytes a clock of one SM and bytes a second of all; the last of three launches counts."""
        clocks = self.cupy.zeros(ctas, self.cupy.uint64)
        address, pieces = self.memory.data.ptr, walk.nbytes // PIECE_BYTES
        both_maps = maps(address, walk.nbytes)
        kernel = _launch.Kernel(self.handle, (ctas, 1, 1), THREADS, PLACES * PIECE_BYTES)
        stream = self.cupy.cuda.get_current_stream()
        for _ in range(3):
            start = next(self.launches) * EACH % pieces if walk.fresh else 0
            apart = pieces // ctas if walk.own else 1
            params = PARAMS.pack(*both_maps, address, clocks.data.ptr, pieces, start, apart, EACH, ways)
            begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            begin.record(stream)
            _launch.enqueue(kernel, stream.ptr, params)
            end.record(stream)
            end.synchronize()
        moved = EACH * PIECE_BYTES
        seconds = self.cupy.cuda.get_elapsed_time(begin, end) * 1e-3
        return {"bytes_per_clock": moved / float(clocks.mean()), "bytes_per_s": moved * ctas / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctas", type=int, action="append", help="1, 8, 33, 66 and 132 when left out")
    parser.add_argument("--out", type=pathlib.Path, help="where to write the JSON record")
    parser.add_argument("--commit", help="where there is no git: the commit of the tree")
    args = parser.parse_args()
    records: list[dict[str, Any]] = []
    table = Table(title="bytes a clock of one SM, terabytes a second of all", title_justify="left")
    kinds = [(kind, way) for kind in ("loads", "stores") for way in WAYS]
    for column in ("", "SMs", *(f"{kind}, {way}" for kind, way in kinds)):
        table.add_column(column, justify="right")
    mover = Mover()
    for name, walk in WALKS.items():
        for ctas in args.ctas or (1, 8, 33, 66, 132):
            row = []
            for kind, way in kinds:
                found = mover.measure(walk, ctas, WAYS[way] | (STORES if kind == "stores" else 0))
                records.append({"walk": name, "ctas": ctas, "kind": kind, "way": way, **found})
                row.append(f"{found['bytes_per_clock']:.1f} {found['bytes_per_s'] / 1e12:.2f}")
            table.add_row(name, str(ctas), *row)
    Console(width=150).print(table)
    if args.out:
        args.out.write_text(json.dumps({"run": facts.run(args.commit), "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    one_gpu()
    main()
