"""XLA's interface as `cupy_gmm.jax._abi` reads it: against the installed header, and by calls of the installed XLA."""

import ctypes
import itertools
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from cupy_gmm.errors import ArgumentError, DtypeError, UnsupportedError

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

from cupy_gmm.jax import _abi, _execute  # noqa: E402
from tests import compilers, ffi_header  # noqa: E402
from tests.ffi_frames import Call, Frame  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")
pytest_plugins = ("tests.jax_on_cpu",)


def test_places_are_those_of_the_header():
    """A program of C++ asserts each offset and number against the header that came with jaxlib."""
    folder = Path(jax.ffi.include_dir())
    assert (folder / ffi_header.HEADER).is_file(), "jaxlib came without its headers: nothing tells the offsets"
    compilers.cxx()
    assert not ffi_header.complaints(folder)
    # And it would notice: one field of each structure, a word further on.
    text = ffi_header.program()
    for number, fields in enumerate(ffi_header.TABLES.values()):
        field, at = next(iter(fields.items()))
        moved = text.replace(
            f"offsetof(Type{number}, {field}) == {at},", f"offsetof(Type{number}, {field}) == {at + 8},"
        )
        assert moved != text
        text = moved
    said = ffi_header.complaints(folder, text)
    assert all(f"offsetof(Type{number}, " in said for number in range(len(ffi_header.TABLES))), said


kept = []


def register(name, execute, instantiate=None):
    """Registers handlers on XLA's CPU platform."""
    bodies = {"instantiate": instantiate, "execute": execute}
    functions = {stage: _abi.handler(body) for stage, body in bodies.items() if body is not None}
    kept.append(functions)
    capsules = {stage: jax.ffi.pycapsule(function) for stage, function in functions.items()}
    jax.ffi.register_ffi_target(name, capsules, platform="cpu")


def call(name, results, *operands, text="some text"):
    return jax.ffi.ffi_call(name, results)(*operands, call=text)


def test_a_call_is_decoded():
    """Stages, addresses, types, extents and the attribute, as the installed XLA passes them."""
    stages, seen = [], []

    def instantiate(frame):
        _abi.check(frame)
        stages.append((_abi.stage(frame), _abi.attribute(frame)))

    def execute(frame):
        stages.append((_abi.stage(frame), _abi.attribute(frame)))
        seen.append(_abi.shapes(frame))
        (a, b, _), (c, d) = _abi.arguments(frame), _abi.results(frame)
        ctypes.memmove(c, a, 6 * 2)
        ctypes.memmove(d, b, 4 * 4)
        assert (a | b | c | d) % 16 == 0

    register("decoded", execute, instantiate)
    results = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    text = "längere Zeile " * 40
    function = jax.jit(lambda *operands: call("decoded", results, *operands, text=text))
    operands = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), jnp.arange(4, dtype=jnp.int32), jnp.float32(1)
    for _ in range(2):
        y, z = function(*operands)
    assert y.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert z.tolist() == [0, 1, 2, 3]
    assert stages == [(stage, text.encode()) for stage in (_abi.INSTANTIATE, _abi.EXECUTE, _abi.EXECUTE)]
    assert seen[0] == [(16, (2, 3)), (4, (4,)), (11, ()), (16, (2, 3)), (4, (4,))]


@pytest.mark.parametrize(
    "error, code",
    [
        (ArgumentError("`x` is 3: expected 4."), "INVALID_ARGUMENT"),
        (DtypeError("`x` hat Größe."), "INVALID_ARGUMENT"),
        (UnsupportedError("not here."), "UNIMPLEMENTED"),
        (ZeroDivisionError("division"), "INTERNAL"),
        (KeyboardInterrupt(), "INTERNAL"),
    ],
)
@pytest.mark.parametrize("stage", ["instantiate", "execute"])
def test_an_exception_becomes_an_error_of_xla(error, code, stage):
    def fail(_):
        raise error

    def fine(_):
        pass

    name = f"fails_{stage}_{type(error).__name__}"
    register(name, *(fail, fine) if stage == "execute" else (fine, fail))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{code}.*cupy_gmm: {error or type(error).__name__}"):
        jax.block_until_ready(jax.jit(lambda x: call(name, jax.ShapeDtypeStruct((), jnp.float32), x))(1.0))


def test_there_is_no_stream_on_the_cpu():
    function = _abi.Handler(_execute.execute({}, pytest.fail, lambda: pytest.fail))
    kept.append(function)
    jax.ffi.register_ffi_target("streamless", jax.ffi.pycapsule(function), platform="cpu")
    with pytest.raises(jax.errors.JaxRuntimeError, match="XLA gave no stream to launch on"):
        jax.block_until_ready(jax.jit(lambda x: call("streamless", jax.ShapeDtypeStruct((), jnp.float32), x))(1.0))


# ---- frames made here


def test_known_interfaces_pass():
    for version in ((0, 1), (0, 3), (0, 99)):
        _abi.check(Frame(168, 88, version).address)


@pytest.mark.parametrize(
    "facts", [{"frame_bytes": 160}, {"api_bytes": 80}, {"version": (1, 0)}], ids=["frame", "functions", "version"]
)
def test_an_unknown_interface_is_refused(facts):
    with pytest.raises(
        UnsupportedError,
        match=r"this jaxlib calls with version \d\.\d of XLA's foreign function interface, frames of \d+ bytes and "
        r"\d+ bytes of functions: expected version 0, at least 168 and 88; install a jaxlib from 0\.5\.3 on that this "
        r"release knows, or call `jax\.lax\.ragged_dot`\.",
    ):
        _abi.check(Frame(**facts).address)


@pytest.mark.parametrize("facts", [{"attributes": 2}, {"attributes": 0}, {"kind": 3}])
def test_foreign_attributes_are_refused(facts):
    with pytest.raises(UnsupportedError, match="other attributes than one string: it was lowered by another release"):
        _abi.check(Frame(**facts).address)


def test_metadata_are_told_and_nothing_runs():
    """Behind another extension, too."""
    metadata = np.zeros(8, np.uint64)
    asked = np.array([32, _abi.METADATA, 0, metadata.ctypes.data], np.uint64)
    other = np.array([24, 77, asked.ctypes.data], np.uint64)
    for first in (asked, other):
        metadata[:] = 0xFFFFFFFFFFFFFFFF
        frame, ran = Frame(), []
        frame.put("extension_start", first.ctypes.data)
        assert not _abi.handler(ran.append)(frame.address)
        assert not ran
        numbers = metadata.view(np.int32)
        version = (_abi.METADATA_FIELDS["api_version"] + _abi.VERSION["major_version"]) // 4
        assert tuple(numbers[version : version + 2]) == _abi.API_VERSION
        assert numbers[_abi.METADATA_FIELDS["traits"] // 4] == _abi.COMMAND_BUFFER_COMPATIBLE
    frame, ran = Frame(), []
    alone = np.array([24, 77, 0], np.uint64)
    frame.put("extension_start", alone.ctypes.data)
    assert not _abi.handler(ran.append)(frame.address)
    assert ran == [frame.address]


THREADS = """
#include <pthread.h>
struct Job { void* (*handler)(void*); void* frame; int calls; };
static void* work(void* address) {
    Job* job = static_cast<Job*>(address);
    for (int i = 0; i < job->calls; ++i) job->handler(job->frame);
    return nullptr;
}
extern "C" void call_in_a_thread(void* (*handler)(void*), void* frame, int calls) {
    Job job{handler, frame, calls};
    pthread_t thread;
    pthread_create(&thread, nullptr, work, &job);
    pthread_join(thread, nullptr);
}
"""


@pytest.mark.parametrize("stage", ["instantiate", "execute"])
def test_a_thread_of_xla_keeps_its_state(tmp_path, monkeypatch, stage):
    """Python's own would last one call. It is kept for so many threads and no more, and each has its own."""
    compiler = compilers.cxx()
    (tmp_path / "threads.cpp").write_text(THREADS)
    library = tmp_path / "threads.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", library, tmp_path / "threads.cpp"], check=True)
    drive = ctypes.CDLL(str(library)).call_in_a_thread
    drive.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
    monkeypatch.setattr(_abi, "MAX_STAYS", 2)
    monkeypatch.setattr(_abi, "_stays", itertools.count())
    local, seen, frame = threading.local(), [], Call(b"", [], [])

    def body(_):
        local.calls = getattr(local, "calls", 0) + 1
        seen.append(local.calls)

    function = _abi.handler(body)
    if stage == "execute":
        launches = _execute.Launches()
        launches.known[(0x5001,)] = (lambda: body(None),)
        function = _abi.Handler(_execute.execute({(b"", 0): launches}, pytest.fail, lambda: int))
    for _ in range(3):
        drive(ctypes.cast(function, ctypes.c_void_p), frame.address, 3)
    assert seen == [1, 2, 3, 1, 2, 3, 1, 1, 1]
