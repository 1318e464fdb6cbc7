"""Routing and the expert layer of `cupy_gmm.jax`, lowered for CUDA on a machine without one, and on several devices."""

import re
from importlib.util import find_spec

import pytest

from tests.jax_layers import EXPERTS, INNER, SLOTS, TOKENS, H, gradients, layer, same
from tests.jax_on_cpu import SHARED, calls, lowered, on_two_devices

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cupy_gmm.jax as face  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")
pytest_plugins = ("tests.jax_on_cpu",)


def test_lowering_for_cuda(rng):
    """Our calls with their facts, in both directions, and no sort, scatter or gather of XLA's."""
    *inputs, dy = layer(rng)
    text = lowered(jax.jit(lambda *inputs: gradients(face.expert_ffn, *inputs)), *inputs, dy)
    for name in ("sort", "scatter", "gather", "ragged", "dot_general", "transpose", "while", "logistic"):
        assert f"stablehlo.{name}" not in text, name
    assert "ragged" not in text
    moves = f"tokens={TOKENS} slots={SLOTS} experts={EXPERTS} width={H} dtype=bfloat16 weights="
    acts = f"tokens={TOKENS * SLOTS} slots=1 experts=0 width={INNER} dtype=bfloat16 weights=-"
    found = calls(text)
    assert [facts for name, facts in found if "grouped" not in name] == [
        f"op=route tokens={TOKENS} slots={SLOTS} experts={EXPERTS} width=0 dtype=int32 weights=-",
        f"op=permute {moves}-",
        f"rows={TOKENS * SLOTS} groups={EXPERTS} sizes=0 wide=0 group_offset=0",
        f"op=silu_mul {acts}",
        f"op=combine {moves}float32",
        f"op=combine_backward {moves}float32",
        f"op=silu_mul_backward {acts}",
        f"op=permute_backward {moves}-",
    ]
    assert [name for name, _ in found].count("cupy_gmm.grouped_mm") == 4
    assert [name for name, _ in found].count("cupy_gmm.grouped_mm_wgrad") == 2
    assert {name for name, _ in found} == set(face.TARGETS)


def test_scratch_of_a_long_route_is_a_result():
    ids = jax.ShapeDtypeStruct((4096, 2), jnp.int32)
    text = lowered(jax.jit(face.route, static_argnums=1), ids, 64)
    (results,) = re.findall(r"custom_call @cupy_gmm\.route.*?-> \((.*?)\)\n", text)
    assert results.split(", ") == [f"tensor<{n}xi32>" for n in (8192, 8192, 64, 64, 8 * 65)]


def test_lowering_elsewhere(rng):
    *inputs, dy = layer(rng)
    for platform in ("cpu", "tpu", "rocm"):
        text = lowered(jax.jit(lambda *inputs: gradients(face.expert_ffn, *inputs)), *inputs, dy, platform=platform)
        assert "custom_call @cupy_gmm" not in text


def test_export(rng):
    export = pytest.importorskip("jax.export")
    *inputs, _ = layer(rng)
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in face.TARGETS]
    made = export.export(jax.jit(face.expert_ffn), platforms=["cpu", "cuda"], disabled_checks=checks)(*inputs)
    again = made if find_spec("flatbuffers") is None else export.deserialize(made.serialize())
    assert "cupy_gmm.combine" in {name for name, _ in calls(again.mlir_module())}
    same(again.call(*inputs), jax.jit(face.expert_ffn)(*inputs))


def test_shard_map_and_checkpoint_in_scan():
    """Two devices with their own tokens; and experts shared out, put together of the parts."""
    on_two_devices(SHARED + PROGRAM)


PROGRAM = """
rng = np.random.default_rng(5)
whole = lambda *shape: jnp.asarray(rng.integers(-2, 3, shape), jnp.bfloat16)
x, up, down = whole(16, 8), whole(4, 8, 12) / 8, whole(4, 6, 8)
ids, weights = rng.integers(-1, 5, (16, 2)).astype(np.int32), rng.random((16, 2), np.float32)
def loss(f):
    def value(x, up, down, weights):
        return (f(x, up, down, ids, weights).astype(jnp.float32) ** 2).sum()
    return jax.jit(jax.value_and_grad(value, (0, 1, 2, 3)))
def near(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape and np.abs(a - b).max() <= 2.0**-6 * np.abs(b).max()

wanted = loss(face.expert_ffn)(x, up, down, weights)
tokens = mapped(face.expert_ffn, (P("d"), P(), P(), P("d"), P("d")), P("d"))
near(loss(tokens)(x, up, down, weights), wanted)

def experts(x, up, down, ids, weights):
    first = (2 * jax.lax.axis_index("d")).astype(jnp.int32)
    routing = face.route(ids, 4)
    rows = face.permute(x, routing)
    hidden = face.silu_mul(face.grouped_mm(rows, up, routing.offs, group_offset=first))
    y = face.grouped_mm(hidden, down, routing.offs, group_offset=first)
    return jax.lax.psum(face.combine(y, routing, weights).astype(jnp.float32), "d")
shared = mapped(experts, (P(), P("d"), P("d"), P(), P()), P())
near(loss(shared)(x, up, down, weights), wanted)

def stacked(x, up, down, ids, weights):
    step = lambda x, _: (jnp.sign(jax.checkpoint(face.expert_ffn)(x, up, down, ids, weights)), None)
    return jax.lax.scan(step, x, None, length=2)[0]
both = mapped(stacked, (P("d"), P(), P(), P("d"), P("d")), P("d"))
near(both(x, up, down, ids, weights), jax.jit(stacked)(x, up, down, ids, weights))

for f in (tokens, shared, both):
    text = f.trace(x, up, down, ids, weights).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @cupy_gmm.route" in text and "custom_call @cupy_gmm.combine" in text
"""
