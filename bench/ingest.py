"""Measures how many bytes a clock an SM moves: `python -m bench.ingest`, on Hopper.

A kernel that does nothing else loads or stores pieces of 32 KB, by the copy engine (boxes of a matrix, as the weights
of the forward kernel), by its threads (16 bytes each: cp.async, or stores) or by both at once, on one SM or on many, in
8 MB that stay in the L2 or in 1 GB. Notes argue from it about what a kernel can hide behind its products.
"""

import argparse
import json
import pathlib
import struct
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import facts
from cupy_gmm import _compile, _device, _launch, _source, _tensormap

SOURCE = pathlib.Path(__file__).with_suffix(".cu")
SYMBOL = "ingest"
ARCH = "sm_90a"
PARAMS = struct.Struct("<128s128sQQiiii")  # IngestParams
PIECE_BYTES, PLACES, THREADS, COLUMNS = 32 << 10, 6, 160, 2048
WAYS = {"engine": 1, "threads": 2, "both": 3}
STORES = 4
EACH = 256  # pieces of a CTA
MEMORIES = {"L2": 8 << 20, "memory": 1 << 30}


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


def measure(nbytes: int, ctas: int, ways: int) -> dict[str, float]:
    """Bytes a clock of one SM and bytes a second of all; the last of three launches counts."""
    cupy = _device.import_cupy()
    memory = cupy.random.randint(0, 2**31, nbytes // 8, dtype=cupy.int64)
    clocks = cupy.zeros(ctas, cupy.uint64)
    pieces = nbytes // PIECE_BYTES
    apart = 1 if nbytes == MEMORIES["L2"] else pieces // ctas
    params = PARAMS.pack(
        *maps(memory.data.ptr, nbytes), memory.data.ptr, clocks.data.ptr, pieces, apart, EACH, ways
    )  # fmt: skip
    module = _compile.load(_compile.compile_source(text(), ARCH, SOURCE.name), cupy.cuda.Device().id)
    handle = module.function(SYMBOL, PLACES * PIECE_BYTES).handle
    kernel = _launch.Kernel(handle, (ctas, 1, 1), THREADS, PLACES * PIECE_BYTES)
    stream = cupy.cuda.get_current_stream()
    for _ in range(3):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        _launch.enqueue(kernel, stream.ptr, params)
        end.record(stream)
        end.synchronize()
    moved = EACH * PIECE_BYTES * (2 if ways & 3 == 3 else 1)
    seconds = cupy.cuda.get_elapsed_time(begin, end) * 1e-3
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
    for memory, nbytes in MEMORIES.items():
        for ctas in args.ctas or (1, 8, 33, 66, 132):
            row = []
            for kind, way in kinds:
                found = measure(nbytes, ctas, WAYS[way] | (STORES if kind == "stores" else 0))
                records.append({"memory": memory, "ctas": ctas, "kind": kind, "way": way, **found})
                row.append(f"{found['bytes_per_clock']:.1f} {found['bytes_per_s'] / 1e12:.2f}")
            table.add_row(memory, str(ctas), *row)
    Console(width=150).print(table)
    if args.out:
        args.out.write_text(json.dumps({"run": facts.run(args.commit), "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
