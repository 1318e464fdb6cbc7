"""Builds Hopper's kernels with g++ and launches them on the emulated multiprocessor of `tests/shim/`.

Operands hold small integers, so that every sum is exact and any order of threads must give the bits of the reference.
Whatever a kernel may not read is NaN, whatever it may not write is compared byte by byte.
"""

import ctypes
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupy_gmm import _arrays, _params, _plan, _problem, _table, _tensormap, _variants, reference
from cupy_gmm._config import CONFIGS, GROUPED_MM, TILE_K, WgmmaConfig
from cupy_gmm._variants import K_MAJOR
from cupy_gmm.reference import HEADER_WORDS
from tests import compilers

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "tests" / "shim"
MACHINE = ("fibers", "scheduler", "barriers", "copies", "products")
FLAGS = "-std=c++20 -O1 -ffp-contract=off -fno-strict-aliasing -fPIC -I. -include device.h".split()
KERNELS = {  # what tests/shim/*.cpp instantiates
    "forward": "hopper-256x208",
    "wgrad": "hopper-wgrad-pingpong-128x192",
}
DRAWS = 3  # seeds that share their operands: one for each order of threads
GUARD = 1 << 16  # bytes before and behind an array: room for what a broken kernel writes

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
FAKE_MAP = struct.Struct("<3Q2I5H6x5Q5Q")  # shim::FakeMap
MAP_MAGIC = 0x7A5A1234
DECLARATION = "alignas(1024) extern __shared__ char shared[];"


@dataclass(frozen=True)
class Case:
    """One product. `offs` are raw end offsets; `groups` local groups from `group_offset` on."""

    offs: tuple[int, ...]
    rows: int
    k: int
    n: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    k_major: bool = False  # layout of the weights
    pad: int = 0  # pitch of the operands beyond the least, elements
    output: str = "dense"
    group_offset: int = 0
    groups: int | None = None
    nan_group: int = -1  # local group all of whose rows are NaN
    accumulate: bool = False
    chunk: int = 0  # rows of a piece of a split group; 0: no splits
    grid: int = 2

    @property
    def local_groups(self) -> int:
        return len(self.offs) if self.groups is None else self.groups


class Guarded:
    """An array in the middle of NaN bytes, with any strides."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> None:
        kind = np.dtype(DTYPES[dtype])
        extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        self.nbytes = extent * kind.itemsize
        raw = np.full(self.nbytes + 2 * GUARD + 256, 0xFF, np.uint8)
        start = -raw.ctypes.data % 256
        self.bytes = raw[start : start + self.nbytes + 2 * GUARD]
        inner = self.bytes[GUARD : GUARD + self.nbytes].view(kind)
        steps = [stride * kind.itemsize for stride in strides]
        self.array = np.lib.stride_tricks.as_strided(inner, shape, steps)

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data + GUARD


def lay_out(folder: Path) -> None:
    """The kernels with the twins over their `ptx/`, and their tuning points; shared memory is declared by a call."""
    shutil.copytree(ROOT / "kernels", folder)
    shutil.copytree(SHIM, folder, dirs_exist_ok=True)
    for name in ("grouped_mm", "grouped_mm_wgrad_pingpong"):
        file = folder / "sm90" / f"{name}.cuh"
        text = file.read_text()
        assert text.count(DECLARATION) == 1, f"{file} declares its shared memory in another way"
        file.write_text(text.replace(DECLARATION, "char* const shared = shared_memory();"))
    for name, config in KERNELS.items():
        (folder / f"{name}_config.h").write_text(f"static {_variants.constant(CONFIGS[config], 'kConfig')}\n")


def compile_kernel(folder: Path, machine: Path, name: str) -> ctypes.CDLL:
    """The kernel that `name`.cpp of `folder` instantiates, with the object files of the machine."""
    objects = [str(machine / f"{part}.o") for part in MACHINE]
    run_compiler(folder, "-shared", f"{name}.cpp", *objects, "-o", f"{name}.so")
    library = ctypes.CDLL(str(folder / f"{name}.so"))
    library.run.restype = ctypes.c_char_p
    library.params_bytes.restype = ctypes.c_size_t
    library.config = CONFIGS[KERNELS[name]]
    return library


def compile_machine(folder: Path) -> None:
    """Lays out `folder` and compiles all but the kernels."""
    lay_out(folder)
    run_compiler(folder, "-c", *(f"{part}.cpp" for part in MACHINE))


def run_compiler(folder: Path, *arguments: str) -> None:
    command = [compilers.gxx_for_kernels(), *FLAGS, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


# ---- one launch


def up(value: int, step: int) -> int:
    return -(-value // step) * step


def integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """-4 to 4 without 0: no product is -0, whose sign would depend on the order of a sum."""
    return rng.choice(np.array([-4, -3, -2, -1, 1, 2, 3, 4], np.float32), shape)


def rows_operand(case: Case, columns: int, rng: np.random.Generator) -> Guarded:
    """(rows, columns); rows of groups that are not local, and those behind all groups, are NaN."""
    made = Guarded((case.rows, columns), (up(columns, 8) + case.pad, 1), case.dtype)
    bounds = reference.clamp_offsets(case.offs, case.rows)
    for local in range(case.local_groups):
        group = local + case.group_offset
        if 0 <= group < len(case.offs) and local != case.nan_group:
            rows = slice(bounds[group], bounds[group + 1])
            made.array[rows] = integers(rng, made.array[rows].shape)
    return made


def weights(case: Case, rng: np.random.Generator) -> Guarded:
    """(groups, k, n), either of the two last axes contiguous."""
    inner, outer = (case.k, case.n) if case.k_major else (case.n, case.k)
    pitch = up(inner, 8) + case.pad
    row, col = (1, pitch) if case.k_major else (pitch, 1)
    made = Guarded((case.local_groups, case.k, case.n), (outer * pitch + case.pad, row, col), case.dtype)
    made.array[...] = integers(rng, made.array.shape)
    return made


def result(case: Case, shape: tuple[int, ...]) -> Guarded:
    """An output of these strides: whole vectors, padded ones, odd pitch, gaps between columns, transposed."""
    *_, rows, columns = shape
    step = 4 if case.out_dtype == "float32" else 8
    row, col = {
        "dense": (columns, 1),
        "padded": (up(columns, step) + step, 1),
        "odd": (columns | 1, 1),
        "gaps": (2 * columns + 3, 2),
        "transposed": (1, rows + 5),
    }[case.output]
    group = max(row * rows, col * columns) + (step if case.output == "padded" else 1)
    return Guarded(shape, (group, row, col)[-len(shape) :], case.out_dtype)


def table_of(case: Case, problem: _problem.Problem, shape: _table.TableShape) -> np.ndarray:
    """The schedule, with garbage where the device leaves words unspecified."""
    local = problem.groups if case.pad else None  # a Schedule made beforehand does not know the weights
    table = reference.schedule(case.offs, case.rows, case.group_offset, local, *shape.blocks)
    assert len(table) == shape.words
    table[shape.words - 4 * (shape.max_blocks - int(table[0])) :] = 0x7F7F7F7F
    return table


def fake_encode(memory: dict[int, int], shape: _tensormap.MapShape, address: int) -> bytes:
    """A tensor map that the emulated copy engine reads, in place of the driver's."""
    rank = len(shape.extents)
    rest = [0] * (5 - rank)
    assert all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in shape.strides)
    assert shape.box[0] == TILE_K
    assert all(0 < extent <= 1 << 32 for extent in shape.extents)
    strides = (2, *shape.strides, *rest)
    end = address + memory[address]
    packed = FAKE_MAP.pack(address, address, end, MAP_MAGIC, rank, *shape.box, *rest, *shape.extents, *rest, *strides)
    return packed.ljust(_tensormap.MAP_BYTES, b"\0")


def scribbled(table: np.ndarray, seed: int) -> np.ndarray:
    """The table with other words in places, often in its header: plausible ones, and any."""
    rng = np.random.default_rng(seed)
    changed = table.copy()
    for at in (*rng.integers(0, len(table), rng.integers(1, 12)), *rng.integers(0, HEADER_WORDS, rng.integers(3))):
        low, high = ((-3, 700), (-(1 << 31), 1 << 31))[rng.integers(2)]
        changed[at] = rng.integers(low, high)
    return changed


def launch(
    library: ctypes.CDLL,
    case: Case,
    problem: _problem.Problem,
    arrays: list[Guarded],
    seed: int,
    scribble: bool = False,
) -> str:
    """Packs the arguments as `_plan.build` and `_call.run` do; what went wrong, or an empty text."""
    forward = problem.op == GROUPED_MM
    config = library.config
    assert isinstance(config, WgmmaConfig)
    assert _tensormap.why_impossible(problem) is None
    shape = _plan._own_table(problem, len(case.offs), config)
    table = table_of(case, problem, shape)
    tiles = _plan._tiles(problem, config)
    chunk = case.chunk or (0 if forward else case.rows)
    slots = 4 * case.rows // (3 * chunk) if 0 < chunk < case.rows else 0
    if scribble:
        table = scribbled(table, seed)
    scratch = slots * tiles * config.tile_m * config.tile_n
    partials = np.full(scratch + 2 * GUARD, np.nan, np.float32)
    counters = _params.TICKET_WORDS + slots * tiles * config.consumers
    tickets = np.zeros(counters + GUARD, np.int32)
    found = np.zeros(1, np.int32)
    a, b, c = arrays
    memory = {each.address: each.nbytes for each in arrays}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tensormap.MapShape, "encode", lambda map_shape, at: fake_encode(memory, map_shape, at))
        pack = _plan._packer(problem, config, _plan._facts(problem, shape, config, chunk, slots))
        words = (table, tickets, partials[GUARD:], found)
        params = pack(a.address, b.address, c.address, *(word.ctypes.data for word in words))
    params = params.ljust(library.params_bytes(), b"\0")
    half = int(problem.dtype == "float16")
    message = library.run(params, half, int(problem.b_layout == K_MAJOR), case.grid, seed)
    if tickets[counters:].any() or not (
        np.isnan(partials[:GUARD]).all() and np.isnan(partials[GUARD + scratch :]).all()
    ):
        return "the kernel leaves its scratch"
    if not message and not scribble and found[0] != reference.status(case.offs, case.rows):
        return f"status bits {found[0]}"
    if not message and not scribble and tickets.any():
        return f"tickets {tickets} are left behind"
    return message.decode()


def differences(made: Guarded, expected: Guarded) -> str:
    """Elements by value, NaN equal to NaN; then every byte of the memory around and between them."""
    with np.errstate(invalid="ignore"):
        got, want = made.array.astype(np.float32), expected.array.astype(np.float32)
    wrong = np.argwhere(~((got == want) | (np.isnan(got) & np.isnan(want))))
    if len(wrong):
        at = tuple(wrong[0])
        return f"{len(wrong)} wrong elements, first {at}: {got[at]}, expected {want[at]}"
    for each in (made, expected):
        each.array[np.isnan(got)] = 0
    stray = np.flatnonzero(made.bytes != expected.bytes)
    return f"{len(stray)} stray bytes, first {stray[0] - GUARD}" if len(stray) else ""


def run_forward(library: ctypes.CDLL, case: Case, seed: int, scribble: bool = False) -> str:
    """`scribble`: the schedule holds other words in places, and of the result only its surroundings are compared."""
    rng = np.random.default_rng(seed // DRAWS)
    x, w = rows_operand(case, case.k, rng), weights(case, rng)
    made, expected = (result(case, (case.rows, case.n)) for _ in range(2))
    named = (("x", x.array), ("w", w.array), ("out", made.array))
    x_view, w_view, out_view = _arrays.locate(*named)[1]
    problem = _problem.forward(x_view, w_view, out_view, case.out_dtype)
    bounds = reference.clamp_offsets(case.offs, case.rows)
    reference.grouped_mm(x.array, w.array, bounds, expected.array, case.group_offset)
    message = launch(library, case, problem, [x, w, made], seed, scribble)
    if scribble:
        made.array[...] = expected.array[...] = 0
    return message or differences(made, expected)


def run_wgrad(library: ctypes.CDLL, case: Case, seed: int, scribble: bool = False) -> str:
    """`scribble` as of `run_forward`."""
    rng = np.random.default_rng(seed // DRAWS)
    x, dy = rows_operand(case, case.k, rng), rows_operand(case, case.n, rng)
    made, expected = (result(case, (case.local_groups, case.k, case.n)) for _ in range(2))
    bounds = reference.clamp_offsets(case.offs, case.rows)
    if case.accumulate:  # groups without rows keep their NaN
        for local in range(case.local_groups):
            group = local + case.group_offset
            if 0 <= group < len(case.offs) and bounds[group] < bounds[group + 1]:
                made.array[local] = expected.array[local] = integers(rng, made.array[local].shape)
    named = (("x", x.array), ("dy", dy.array), ("out", made.array))
    x_view, dy_view, out_view = _arrays.locate(*named)[1]
    problem = _problem.weight_gradient(x_view, dy_view, out_view, case.out_dtype, case.local_groups, case.accumulate)
    reference.grouped_mm_wgrad(x.array, dy.array, bounds, expected.array, case.accumulate, case.group_offset)
    message = launch(library, case, problem, [x, dy, made], seed, scribble)
    if scribble:
        made.array[...] = expected.array[...] = 0
    return message or differences(made, expected)
