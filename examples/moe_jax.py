"""Train the model with JAX: both products of the experts through `cupy_gmm.jax.ragged_dot`, one jitted step.

The same file runs on a GPU and on the CPU. `python -m examples.moe_jax --help` lists the options.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cupy_gmm.jax import ragged_dot

from . import model
from .model import Config
from .training import Parts, run


def rms_norm(x: Any, gain: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + model.EPSILON) * gain


def attention(x: Any, qkv: Any, out: Any, heads: int) -> Any:
    """Causal self-attention; x is (batch, context, hidden)."""
    batch, context, hidden = x.shape
    q, k, v = (x @ qkv).reshape(batch, context, 3, heads, hidden // heads).transpose(2, 0, 3, 1, 4)
    scores = q @ k.mT * (hidden // heads) ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((context, context), bool)), scores, -1e30))
    return (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ out


def experts(x: Any, router: Any, gate_up: Any, down: Any, top_k: int) -> tuple[Any, Any, Any]:
    """Each token through its chosen experts; x is (tokens, hidden). Also the balance loss and the experts' counts."""
    tokens, num_experts = x.shape[0], router.shape[1]
    logits = x @ router
    chosen, ids = jax.lax.top_k(logits, top_k)
    weights = jax.nn.softmax(chosen)

    # `cupy_gmm.jax.expert_ffn` takes these steps in one call. Here they are JAX's own, as models have them: all that
    # this library changes there is where `ragged_dot` comes from.
    # Assignments sorted by expert: what grouped products want. Every position is taken once, forth and back.
    order = jnp.argsort(ids.reshape(-1), stable=True)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    counts = jnp.bincount(ids.reshape(-1), length=num_experts).astype(jnp.int32)
    rows = jnp.repeat(x.astype(jnp.bfloat16), top_k, axis=0).at[order].get(unique_indices=True)

    gate, up = jnp.split(ragged_dot(rows, gate_up.astype(jnp.bfloat16), counts).astype(jnp.float32), 2, axis=1)
    hidden = (jax.nn.silu(gate) * up).astype(jnp.bfloat16)
    results = ragged_dot(hidden, down.astype(jnp.bfloat16), counts).at[inverse].get(unique_indices=True)
    y = jnp.sum(results.reshape(tokens, top_k, -1) * weights[:, :, None], axis=1)

    share = counts / ids.size
    balance = num_experts * jnp.sum(share * jnp.mean(jax.nn.softmax(logits), axis=0))
    return y, balance, counts


def forward(params: Any, tokens: Any, config: Config) -> tuple[Any, Any, Any]:
    """Cross entropy, balance loss (a mean over layers, 1 at best) and counts (layers, experts)."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embed"][inputs] + params["position"]
    balances, counts = [], []
    for layer in range(config.layers):
        p = {name: params[f"{layer}.{name}"] for name in ("norm1", "qkv", "out", "norm2", "router", "gate_up", "down")}
        x = x + attention(rms_norm(x, p["norm1"]), p["qkv"], p["out"], config.heads)
        rows = rms_norm(x, p["norm2"]).reshape(-1, config.hidden)
        y, balance, count = experts(rows, p["router"], p["gate_up"], p["down"], config.top_k)
        x = x + y.reshape(x.shape)
        balances.append(balance)
        counts.append(count)
    logits = jax.nn.log_softmax(rms_norm(x, params["norm"]) @ params["head"])
    entropy = -jnp.mean(jnp.take_along_axis(logits, targets[:, :, None], axis=-1))
    return entropy, jnp.mean(jnp.stack(balances)), jnp.stack(counts)


def objective(params: Any, tokens: Any, config: Config) -> tuple[Any, tuple[Any, Any]]:
    """What is minimised; and cross entropy and counts, for the records."""
    entropy, balance, counts = forward(params, tokens, config)
    return entropy + config.balance * balance, (entropy, counts)


def adamw(state: Any, grads: Any, step: Any, rate: Any, config: Config) -> Any:
    """One step of AdamW; gradients longer than CLIP in all are cut to it, and only matrices decay."""
    norm = jnp.sqrt(sum(jnp.sum(grad * grad) for grad in grads.values()))
    shrink = jnp.minimum(1.0, model.CLIP / (norm + 1e-6))
    new: dict[str, dict[str, Any]] = {"params": {}, "mean": {}, "square": {}}
    for name, value in state["params"].items():
        grad = grads[name] * shrink
        mean = model.BETA1 * state["mean"][name] + (1 - model.BETA1) * grad
        square = model.BETA2 * state["square"][name] + (1 - model.BETA2) * grad * grad
        root = jnp.sqrt(square / (1 - model.BETA2**step)) + model.ADAM_EPSILON
        decay = config.weight_decay * value if value.ndim > 1 else 0.0
        new["params"][name] = value - rate * (mean / (1 - model.BETA1**step) / root + decay)
        new["mean"][name], new["square"][name] = mean, square
    return new


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def train_step(state: Any, tokens: Any, step: Any, rate: Any, config: Config) -> tuple[Any, Any, Any]:
    grads, (entropy, counts) = jax.grad(objective, has_aux=True)(state["params"], tokens, config)
    return adamw(state, grads, step, rate, config), entropy, counts


@functools.partial(jax.jit, static_argnames="config")
def evaluate(params: Any, tokens: Any, config: Config) -> Any:
    return forward(params, tokens, config)[0]


PARTS = Parts(
    name="moe_jax with cupy_gmm.jax.ragged_dot",
    on_gpu=lambda: jax.default_backend() == "gpu",
    put=jnp.array,  # a copy: a step donates its state
    get=np.asarray,
    step=train_step,
    loss=evaluate,
)

if __name__ == "__main__":
    run(PARTS, __doc__)
