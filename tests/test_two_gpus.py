"""Two GPUs of one host in one process: JAX's `shard_map` over both, and arrays of both given to the CuPy face in turns.

What JAX does is written for any two devices, and runs on two of XLA's CPU platform, too.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_gmm
from cupy_gmm import _call, _plan
from cupy_gmm.errors import ArgumentError
from tests import backends, oracle
from tests.backends import Backend
from tests.jax_on_cpu import on_two_devices

pytest_plugins = ("tests.lateness",)  # the fixture `jax`

ROWS, K, N = 509, 72, 136  # rows of one device
SIZES = [131, 0, 1, 257, 64, 0, 45, 4], [17, 0, 0, 400, 3, 0, 29, 0]  # of each device; the second leaves a tail
GROUPS = len(SIZES[0])


def operands(seed: int, rows: int) -> tuple[np.ndarray, ...]:
    """x, w and dy of integers."""
    rng = np.random.default_rng(seed)
    return tuple(oracle.integers(rng, shape, "bfloat16") for shape in ((rows, K), (GROUPS, K, N), (rows, N)))


def spans_of(sizes: list[int], rows: int) -> list[tuple[int, int]]:
    return oracle.bounds_of(np.cumsum(sizes), rows)


# ---- JAX


def mapped(function: Callable[..., Any], devices: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    import jax

    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def run(function: Callable[..., Any], arguments: tuple[Any, ...], devices: Any, gathers: bool) -> Any:
    """The results, from a program that gathers no array and gives each device its part."""
    compiled = function.lower(*arguments).compile()
    text = compiled.as_text()
    assert "all-gather" not in text
    assert ("all-reduce" in text) == gathers
    found = compiled(*arguments)
    for leaf in found:
        assert {shard.device for shard in leaf.addressable_shards} == set(devices)
    return found


def rows_shared_out(devices: Any) -> None:
    """Data parallel: each device has its own rows and sizes, the weights are the same; their gradients are added."""
    from jax.sharding import PartitionSpec as P

    import cupy_gmm.jax as face

    x, w, dy = operands(1, 2 * ROWS)
    sizes = np.array(SIZES, np.int32)

    def local(x: Any, w: Any, dy: Any, sizes: Any) -> Any:
        import jax

        assert x.shape == (ROWS, K)
        y, pull = jax.vjp(lambda x, w: face.ragged_dot(x, w, sizes[0]), x, w)
        return y, *pull(dy)

    function = mapped(local, devices, (P("d"), P(), P("d"), P("d")), (P("d"), P("d"), P()))
    y, dx, dw = run(function, (x, w, dy, sizes), devices, gathers=True)
    added = np.zeros(dw.shape, np.float32)
    for device in range(2):
        part = slice(device * ROWS, (device + 1) * ROWS)
        spans = spans_of(SIZES[device], ROWS)
        oracle.assert_same_bits(np.asarray(y)[part], oracle.expected_mm(x[part], w, spans, "bfloat16"))
        wanted = oracle.expected_mm(dy[part], w.swapaxes(1, 2), spans, "bfloat16")
        oracle.assert_same_bits(np.asarray(dx)[part], wanted)
        added += oracle.expected_wgrad(x[part], dy[part], spans, "bfloat16", GROUPS).astype(np.float32)
    oracle.assert_same_bits(np.asarray(dw), oracle.rounded(added, "bfloat16"))


def experts_shared_out(devices: Any) -> None:
    """Expert parallel: all rows on both devices, half of the weights on each; results and input gradients are added."""
    from jax.sharding import PartitionSpec as P

    import cupy_gmm.jax as face
    from cupy_gmm.jax import _axes

    x, w, dy = operands(2, ROWS)
    half = GROUPS // 2

    def local(x: Any, w: Any, dy: Any, sizes: Any) -> Any:
        import jax

        assert w.shape == (half, K, N)
        first = (jax.lax.axis_index("d") * half).astype("int32")
        y, pull = jax.vjp(lambda x, w: face.ragged_dot(x, w, sizes, group_offset=first), x, w)
        return jax.lax.psum(y, "d"), *pull(_axes.varying(dy, frozenset({"d"})))

    function = mapped(local, devices, (P(), P("d"), P(), P()), (P(), P(), P("d")))
    for sizes in SIZES:  # one program
        spans = spans_of(sizes, ROWS)
        y, dx, dw = run(function, (x, w, dy, np.array(sizes, np.int32)), devices, gathers=True)
        oracle.assert_same_bits(np.asarray(y), oracle.expected_mm(x, w, spans, "bfloat16"))
        oracle.assert_same_bits(np.asarray(dx), oracle.expected_mm(dy, w.swapaxes(1, 2), spans, "bfloat16"))
        oracle.assert_same_bits(np.asarray(dw), oracle.expected_wgrad(x, dy, spans, "bfloat16", GROUPS))


def apart_from_each_other(devices: Any) -> None:
    """The same function, jitted once, on arrays of either device in turns: where they are, the result is."""
    import jax

    import cupy_gmm.jax as face

    function = jax.jit(face.ragged_dot)
    placed, wanted = [], []
    for device, sizes in zip(devices, SIZES, strict=True):
        x, w, _ = operands(len(placed), ROWS)
        placed.append([jax.device_put(each, device) for each in (x, w, np.array(sizes, np.int32))])
        wanted.append(oracle.expected_mm(x, w, spans_of(sizes, ROWS), "bfloat16"))
    found = [function(*placed[turn % 2]) for turn in range(20)]
    for turn, y in enumerate(found):
        assert y.devices() == {devices[turn % 2]}
        oracle.assert_same_bits(np.asarray(y), wanted[turn % 2])


BODIES = rows_shared_out, experts_shared_out, apart_from_each_other


@pytest.mark.gpu
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_jax(jax: Any, body: Callable[[Any], None]) -> None:
    """And the handlers were made ready on both devices, for the rows of one."""
    backends.two_gpus()
    devices = jax.devices("gpu")[:2]
    assert len(devices) == 2, "CUDA sees two GPUs and JAX does not"
    import cupy_gmm.jax  # noqa: F401
    from cupy_gmm.jax import _handler

    before = set(_handler._ready)
    body(devices)
    lines = set(_handler._ready) - before or set(_handler._ready)
    assert {device for _, device in lines} >= {device.local_hardware_id for device in devices}
    assert all(f" rows={ROWS} ".encode() in line for line, _ in set(_handler._ready) - before)


def test_jax_on_two_devices_of_the_cpu() -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    on_two_devices("import jax\nfrom tests.test_two_gpus import BODIES\nfor body in BODIES: body(jax.devices())")


# ---- CuPy


class Side:
    """Operands and expected bits on one device, and calls there."""

    def __init__(self, gpu: Backend, device: int) -> None:
        self.gpu, self.device = gpu, gpu.cupy.cuda.Device(device)
        x, w, dy = operands(10 + device, ROWS)
        spans = spans_of(SIZES[device], ROWS)
        self.y = oracle.expected_mm(x, w, spans, "bfloat16")
        self.dw = oracle.expected_wgrad(x, dy, spans, "bfloat16", GROUPS)
        with self.device:
            self.x, self.w, self.dx = (gpu.place(each).array for each in (x, w, dy))
            self.offs = gpu.ints(np.cumsum(SIZES[device]))
            self.schedule = cupy_gmm.make_schedule(self.offs, ROWS)
            gpu.synchronize()

    def calls(self) -> list[Callable[[], Any]]:
        return [
            functools.partial(cupy_gmm.grouped_mm, self.x, self.w, self.offs),
            functools.partial(cupy_gmm.grouped_mm, self.x, self.w, self.schedule),
            functools.partial(cupy_gmm.grouped_mm_wgrad, self.x, self.dx, self.schedule),
        ]

    def check(self, found: list[Any]) -> None:
        with self.device:
            for result, want in zip(found, (self.y, self.y, self.dw), strict=True):
                assert result.device == self.device
                oracle.assert_same_bits(self.gpu.get(result), want, self.device)


@pytest.fixture
def sides(gpu: Backend) -> tuple[Side, Side]:
    backends.two_gpus()
    return Side(gpu, 0), Side(gpu, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("current", ["that of the arrays", "the other", "the first"])
def test_cupy_in_turns(sides: tuple[Side, Side], current: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has plans of its own, made once; the caller's current device stays what it was."""
    cupy = sides[0].gpu.cupy
    for turn in range(3):
        found: dict[int, list[Any]] = {0: [], 1: []}
        for several in zip(*(side.calls() for side in sides), strict=True):
            for number, call in enumerate(several):
                here = {"that of the arrays": number, "the other": 1 - number, "the first": 0}[current]
                with cupy.cuda.Device(here):
                    found[number].append(call())
                    assert cupy.cuda.Device().id == here
        for number, side in enumerate(sides):
            side.check(found[number])
        if turn == 0:
            plans = dict(_call.plans)

            def build(*arguments: Any) -> Any:
                raise AssertionError(f"a plan was made again: {arguments}")

            monkeypatch.setattr(_plan, "build", build)
        assert dict(_call.plans) == plans


@pytest.mark.gpu
def test_cupy_in_two_threads(sides: tuple[Side, Side]) -> None:
    found: dict[int, list[list[Any]]] = {0: [], 1: []}

    def work(number: int) -> None:
        with sides[number].device:
            for _ in range(200):
                found[number].append([call() for call in sides[number].calls()])
                found[number] = found[number][-3:]
            sides[number].gpu.synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, side in enumerate(sides):
        assert len(found[number]) == 3, "the thread raised"
        for results in found[number]:
            side.check(results)


@pytest.mark.gpu
def test_what_is_on_the_other_device_is_refused(sides: tuple[Side, Side]) -> None:
    """A Schedule, weights, a result: named, with both places. Cold, and where the same call was seen before."""
    here, there = sides
    out = here.calls()[0]()
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"`offs` is on cuda:1 and `x` on cuda:0: .*; move `offs` to cuda:0\."):
            cupy_gmm.grouped_mm(here.x, here.w, there.schedule)
        with pytest.raises(ArgumentError, match=r"`offs` is on cuda:1 and `x` on cuda:0"):
            cupy_gmm.grouped_mm_wgrad(here.x, here.dx, there.schedule)
        with pytest.raises(ArgumentError, match=r"`w` is on cuda:1 and `x` on cuda:0"):
            cupy_gmm.grouped_mm(here.x, there.w, here.schedule)
        with pytest.raises(ArgumentError, match=r"`out` is on cuda:0 and `x` on cuda:1"):
            cupy_gmm.grouped_mm(there.x, there.w, there.schedule, out=out)
        for side in sides:
            side.check([call() for call in side.calls()])
