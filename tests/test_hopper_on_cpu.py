"""Hopper's kernels on the CPU: every case in three orders of threads, and faults that must be noticed.

`tests/shim/README.md` says what this shows and what only a GPU can.
"""

import ctypes
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests import emulated
from tests.emulated import Case
from tests.kernel_faults import MUTANTS, kernel_of

ORDERS = 3  # of threads: rising, falling, shuffled


@pytest.fixture(scope="session")
def machine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hopper") / "build"
    emulated.compile_machine(folder)
    return folder


@pytest.fixture(scope="session")
def forward(machine) -> ctypes.CDLL:
    return emulated.compile_kernel(machine, machine, "forward")


@pytest.fixture(scope="session")
def wgrad(machine) -> ctypes.CDLL:
    return emulated.compile_kernel(machine, machine, "wgrad")


# ---- cases

FORWARD = {
    "long ring": Case((30, 300), 310, 520, 136, k_major=True, grid=1),
    "one token": Case((1,), 1, 8, 8),
    "k and n of one": Case((3, 20), 20, 1, 1, out_dtype="float32", output="odd"),
    "empty groups and a tail": Case((0, 37, 37, 53), 70, 136, 40, pad=8),
    "nothing but a tail": Case((0, 0), 40, 72, 136),
    "edges of k": Case((65, 80), 80, 65, 128, k_major=True, pad=8),
    "n one past the tile": Case((33, 290), 290, 72, 129, output="padded"),
    "fp16, tall group": Case((600,), 600, 136, 136, "float16", "float16", pad=16),
    "fp16, K-major, fp32 result": Case((17, 50), 60, 200, 136, "float16", "float32", k_major=True),
    "odd pitch": Case((40, 100), 100, 72, 63, output="odd"),
    "gaps between columns": Case((40, 100), 100, 72, 65, k_major=True, output="gaps"),
    "transposed": Case((100,), 130, 72, 136, "float16", "bfloat16", output="transposed"),
    "later groups": Case((20, 60, 90, 140), 150, 72, 136, group_offset=2, groups=2, pad=8),
    "earlier groups": Case((20, 60, 90, 140), 150, 72, 136, k_major=True, groups=2),
    "NaN in one group": Case((20, 60, 90), 90, 72, 40, nan_group=1, pad=8),
    "malformed offsets": Case((-5, 70, 30, 500), 90, 72, 40, k_major=True),
    "many CTAs": Case((30, 30, 61), 70, 72, 520, grid=5),
    "long groups run out before the others": Case(tuple(itertools.accumulate((3, 1) * 80)), 320, 8, 8, grid=3),
    "every extent": Case(tuple(itertools.accumulate(range(7, 209, 8))), 2782, 72, 136, grid=3, output="padded"),
}

BACKWARD = {
    "one row": Case((1,), 1, 8, 8),
    "k and n of one": Case((3, 20), 20, 1, 1, out_dtype="float32", output="odd"),
    "empty groups and a tail": Case((0, 65, 65, 129), 150, 72, 136, pad=8),
    "all groups empty": Case((0, 0), 40, 72, 136),
    "rows around the stage": Case((63, 127, 192), 192, 136, 40, output="padded"),
    "fp16, several tiles": Case((130, 131), 131, 200, 264, "float16", "float16"),
    "fp32 result": Case((70, 100), 100, 136, 264, out_dtype="float32"),
    "odd pitch": Case((70, 100), 100, 72, 63, output="odd"),
    "gaps between columns": Case((70, 100), 100, 65, 40, "float16", "float32", output="gaps"),
    "transposed": Case((70,), 90, 72, 136, output="transposed"),
    "accumulate": Case((40, 40, 105), 120, 72, 136, accumulate=True, pad=8),
    "accumulate in fp32": Case((40, 40, 105), 120, 72, 40, out_dtype="float32", accumulate=True),
    "later groups": Case((20, 60, 90, 140), 150, 72, 136, group_offset=2, groups=2),
    "groups past the last": Case((20, 60), 60, 72, 40, group_offset=1, groups=3),
    "NaN in one group": Case((20, 60, 90), 90, 72, 40, nan_group=1),
    "malformed offsets": Case((-5, 70, 30, 500), 90, 72, 40, pad=8),
    "pieces": Case((10, 210, 400), 400, 72, 136, chunk=64),
    "pieces, accumulate, fp16": Case((150, 330), 330, 136, 264, "float16", "float16", accumulate=True, chunk=128),
    "many small groups": Case(tuple(range(3, 150, 3)), 150, 8, 40, grid=3),
    # tiles of 128 x 192: several to a bundle, narrow ones, short and long groups, both ends of the order
    "bundles of three": Case((100, 200), 200, 650, 136, grid=1, output="padded"),
    "a full bundle and a short one": Case((70, 134), 134, 560, 264, grid=3, output="padded"),
    "narrow last tile": Case((90,), 90, 264, 300, output="padded"),
    "two narrow last tiles": Case((17, 90), 90, 136, 640, grid=4, output="padded"),
    "whole blocks of columns": Case((70, 134, 400), 400, 448, 448, grid=3, output="padded"),
    "two narrow tiles, whole blocks": Case(
        (17, 90, 180, 190, 200), 200, 192, 256, "float16", "float16", output="padded"
    ),
    "one narrow tile, whole blocks": Case((65, 130), 140, 64, 64, output="padded", grid=1),
    "one tile of 64 columns": Case((65, 130), 140, 264, 64, out_dtype="float16"),
    "as long as the ring": Case((256, 511, 512), 512, 264, 200, grid=2, output="padded"),
    "longer than the ring": Case((257, 330, 850), 850, 264, 200, grid=2),
    "steps of 16 rows": Case(tuple(itertools.accumulate((16, 17, 32, 33, 48, 49, 63, 79, 80))), 417, 136, 200, grid=3),
    "both ends meet in a group": Case((40,), 40, 1000, 400, grid=5, output="padded"),
    "more CTAs than tiles": Case((40, 40), 40, 72, 40, grid=5),
    "empty between bundles": Case((0, 60, 60, 60, 70, 70, 200), 200, 392, 200, grid=3, output="padded"),
    "pieces from both ends": Case((300, 400, 1000), 1000, 136, 200, chunk=64, grid=5, output="padded"),
    "pieces of two types": Case(
        (30, 400), 400, 136, 264, "float16", "float32", accumulate=True, chunk=128, grid=4, output="padded"
    ),
    "accumulate, bundles": Case((30, 100), 100, 300, 200, accumulate=True, grid=2, output="padded"),
    "accumulate in fp32, bundles": Case(
        (30, 100), 100, 300, 200, out_dtype="float32", accumulate=True, grid=2, output="padded"
    ),
    "groups of other ranks": Case(
        (60, 130, 140, 400), 400, 264, 200, group_offset=1, groups=2, grid=3, output="padded"
    ),
    "more places than a window": Case(
        tuple(range(2, 142, 2)), 140, 136, 40, group_offset=30, groups=45, grid=3, output="padded"
    ),
}


def seeded(backward: bool, seed: int) -> Case:
    """A case drawn at random; lengths prefer what lies around multiples of the tile."""
    draw = random.Random(seed)
    edges = (15, 16, 17, 63, 64, 65, 127, 128, 129) if backward else (15, 16, 17, 64, 65, 240, 255, 256, 257)
    choices = [lambda: 0, lambda: draw.randint(1, 17), lambda: draw.choice(edges), lambda: draw.randint(1, 130)]
    lengths = [draw.choice(choices)() for _ in range(draw.randint(1, 6))]
    offs = tuple(sum(lengths[: i + 1]) for i in range(len(lengths)))
    offset = draw.choice((0, 0, draw.randint(0, len(offs))))
    groups = draw.randint(1, len(offs) - offset + int(backward)) if len(offs) > offset else 1
    return Case(
        offs=offs,
        rows=offs[-1] + draw.choice((0, draw.randint(1, 200))) or 1,
        k=draw.choice((1, 8, 63, 65, 72, 128, 136, 200)),
        n=draw.choice((1, 7, 8, 40, 64, 65, 128, 129, 136, 257, 264)),
        dtype=draw.choice(("bfloat16", "float16")),
        out_dtype=draw.choice(tuple(emulated.DTYPES)),
        k_major=draw.random() < 0.5,
        pad=draw.choice((0, 8, 24)),
        output=draw.choice(("dense", "padded", "padded", "odd", "gaps", "transposed")),
        group_offset=offset,
        groups=groups,
        nan_group=draw.randint(-2, groups - 1),
        accumulate=backward and draw.random() < 0.4,
        chunk=draw.choice((0, 64, 128)) if backward else 0,
        grid=draw.randint(1, 5),
    )


FORWARD |= {f"seed {seed}": seeded(False, seed) for seed in range(40)}
BACKWARD |= {f"seed {seed}": seeded(True, seed) for seed in range(40)}


@pytest.mark.parametrize("name", FORWARD)
def test_forward(forward, name):
    for order in range(ORDERS):
        assert emulated.run_forward(forward, FORWARD[name], order) == "", FORWARD[name]


@pytest.mark.parametrize("name", BACKWARD)
def test_weight_gradient(wgrad, name):
    for order in range(ORDERS):
        assert emulated.run_wgrad(wgrad, BACKWARD[name], order) == "", BACKWARD[name]


@pytest.mark.parametrize("kernel", ["forward", "weight gradient"])
def test_a_schedule_that_somebody_wrote_into_does_no_harm(forward, wgrad, kernel):
    """Results are wrong then, but nothing hangs, and nothing outside of the result and the scratch is written."""
    for seed in range(60):
        if kernel == "forward":
            many = FORWARD["long groups run out before the others"]
            case = many if seed % 6 == 0 else seeded(False, seed % 40)
            assert emulated.run_forward(forward, case, seed, scribble=True) == "", case
        else:
            case = dataclasses.replace(seeded(True, seed % 40), chunk=random.Random(seed).choice((0, 64, 128)))
            assert emulated.run_wgrad(wgrad, case, seed, scribble=True) == "", case


# ---- would it notice?


def first_failure(run: Callable[..., str], library: ctypes.CDLL, cases: Iterable[Case]) -> str:
    messages = (run(library, case, order) for case in cases for order in range(ORDERS))
    return next(filter(None, messages), "")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_noticed(machine, tmp_path, name):
    file, text, replacement = MUTANTS[name]
    folder = tmp_path / "mutant"
    emulated.lay_out(folder)
    source = (folder / file).read_text()
    assert source.count(text) == 1, f"{file} no longer has this text once: adapt the table"
    (folder / file).write_text(source.replace(text, replacement))
    kernel = kernel_of(file)
    library = emulated.compile_kernel(folder, machine, kernel)
    if kernel == "forward":
        assert first_failure(emulated.run_forward, library, FORWARD.values())
    else:
        assert first_failure(emulated.run_wgrad, library, BACKWARD.values())
