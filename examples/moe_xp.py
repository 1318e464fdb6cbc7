"""Train the model with CuPy, or NumPy without a GPU: experts through `cupy_gmm.expert_ffn`, backward pass by hand.

One file for both: `xp` is the module of the arrays. `python -m examples.moe_xp --help` lists the options.
"""

from typing import Any

import ml_dtypes
import numpy as np

import cupy_gmm

from . import model
from .model import Config
from .training import Parts, run

BF16 = np.dtype(ml_dtypes.bfloat16)


def module() -> Any:
    """CuPy where there is a GPU for it, else NumPy."""
    try:
        import cupy

        return cupy if cupy.cuda.runtime.getDeviceCount() else np
    except Exception:  # not installed, or no driver: CuPy has an exception of its own for that
        return np


xp = module()


def softmax(x: Any) -> Any:
    e = xp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_backward(dy: Any, y: Any) -> Any:
    return y * (dy - (dy * y).sum(axis=-1, keepdims=True))


def rms_norm(x: Any, gain: Any) -> tuple[Any, Any]:
    scale = 1 / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + model.EPSILON)
    return x * scale * gain, (x * scale, scale, gain)


def rms_norm_backward(dy: Any, saved: Any) -> tuple[Any, Any]:
    """Gradients of the rows and of the gain."""
    unit, scale, gain = saved
    d_unit = dy * gain
    dx = scale * (d_unit - unit * (d_unit * unit).mean(axis=-1, keepdims=True))
    return dx, (dy * unit).reshape(-1, gain.size).sum(axis=0)


def attention(x: Any, qkv: Any, out: Any, heads: int) -> tuple[Any, Any]:
    """Causal self-attention; x is (batch, context, hidden)."""
    batch, context, hidden = x.shape
    q, k, v = (x @ qkv).reshape(batch, context, 3, heads, hidden // heads).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) * np.float32((hidden // heads) ** -0.5)
    weights = softmax(xp.where(xp.tri(context, dtype=bool), scores, np.float32(-1e30)))
    mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    return mixed @ out, (x, q, k, v, weights, mixed, qkv, out)


def attention_backward(dy: Any, saved: Any) -> tuple[Any, Any, Any]:
    """Gradients of x, qkv and out."""
    x, q, k, v, weights, mixed, qkv, out = saved
    batch, heads, context, width = q.shape
    d_mixed = (dy @ out.T).reshape(batch, context, heads, width).transpose(0, 2, 1, 3)
    d_scores = softmax_backward(d_mixed @ v.swapaxes(-1, -2), weights) * np.float32(width**-0.5)
    parts = [d_scores @ k, d_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ d_mixed]
    d_qkv = xp.stack(parts).transpose(1, 3, 0, 2, 4).reshape(batch, context, -1)
    return d_qkv @ qkv.T, weight_gradient(x, d_qkv), weight_gradient(mixed, dy)


def weight_gradient(x: Any, dy: Any) -> Any:
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def experts(x: Any, router: Any, gate_up: Any, down: Any, top_k: int) -> tuple[Any, Any, Any]:
    """Each token through its chosen experts; x is (tokens, hidden). Also the balance loss."""
    logits = x @ router
    ids = xp.argsort(-logits, axis=-1, kind="stable")[:, :top_k].astype(np.int32)
    weights = softmax(xp.take_along_axis(logits, ids, axis=-1))
    y, ffn = cupy_gmm.expert_ffn(x.astype(BF16), gate_up.astype(BF16), down.astype(BF16), ids, weights, save=True)

    share = ffn.routing.counts.astype(np.float32) / ids.size
    chances = softmax(logits)
    balance = router.shape[1] * (share * chances.mean(axis=0)).sum()
    return y.astype(np.float32), balance, (x, router, ids, weights, ffn, share, chances)


def experts_backward(dy: Any, d_balance: float, saved: Any) -> tuple[Any, Any, Any, Any]:
    """Gradients of x, router, gate_up and down."""
    x, router, ids, weights, ffn, share, chances = saved
    dx, d_gate_up, d_down, d_weights = cupy_gmm.expert_ffn_backward(dy.astype(BF16), ffn)
    d_logits = softmax_backward(share * np.float32(d_balance * router.shape[1] / len(x)), chances)
    d_logits[xp.arange(len(x))[:, None], ids] += softmax_backward(d_weights, weights)
    dx = dx.astype(np.float32) + d_logits @ router.T
    return dx, x.T @ d_logits, d_gate_up.astype(np.float32), d_down.astype(np.float32)


def forward(params: Any, tokens: Any, config: Config) -> tuple[Any, Any, Any, Any]:
    """Cross entropy, balance loss (a mean over layers, 1 at best), counts (layers, experts), what backward needs."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    x = params["embed"][inputs] + params["position"]
    balances, counts, tape = [], [], []
    for layer in range(config.layers):
        p = {name: params[f"{layer}.{name}"] for name in ("norm1", "qkv", "out", "norm2", "router", "gate_up", "down")}
        normed, norm1 = rms_norm(x, p["norm1"])
        mixed, attended = attention(normed, p["qkv"], p["out"], config.heads)
        x = x + mixed
        normed, norm2 = rms_norm(x, p["norm2"])
        rows = normed.reshape(-1, config.hidden)
        y, balance, routed = experts(rows, p["router"], p["gate_up"], p["down"], config.top_k)
        x = x + y.reshape(x.shape)
        balances.append(balance)
        counts.append(routed[4].routing.counts)
        tape.append((norm1, attended, norm2, routed))
    normed, norm = rms_norm(x, params["norm"])
    chances = softmax(normed @ params["head"]).reshape(-1, model.VOCABULARY)
    entropy = -xp.log(xp.maximum(chances[xp.arange(len(targets)), targets], np.float32(1e-30))).mean()
    saved = (inputs, targets, tape, norm, normed, chances)
    return entropy, sum(balances) / config.layers, xp.stack(counts), saved


def backward(params: Any, saved: Any, config: Config) -> dict[str, Any]:
    """Gradients of cross entropy + config.balance * balance loss, in the order in which they are found."""
    inputs, targets, tape, norm, normed, chances = saved
    vocabulary, grads = xp.arange(model.VOCABULARY), {}
    d_logits = (chances - (targets[:, None] == vocabulary)) / np.float32(len(targets))
    d_logits = d_logits.astype(np.float32).reshape(*inputs.shape, -1)
    grads["head"] = weight_gradient(normed, d_logits)
    dx, grads["norm"] = rms_norm_backward(d_logits @ params["head"].T, norm)
    for layer in reversed(range(config.layers)):
        norm1, attended, norm2, routed = tape[layer]
        found = experts_backward(dx.reshape(-1, config.hidden), config.balance / config.layers, routed)
        d_rows, grads[f"{layer}.router"], grads[f"{layer}.gate_up"], grads[f"{layer}.down"] = found
        d_normed, grads[f"{layer}.norm2"] = rms_norm_backward(d_rows.reshape(dx.shape), norm2)
        dx = dx + d_normed
        d_rows, grads[f"{layer}.qkv"], grads[f"{layer}.out"] = attention_backward(dx, attended)
        d_normed, grads[f"{layer}.norm1"] = rms_norm_backward(d_rows, norm1)
        dx = dx + d_normed
    grads["position"] = dx.sum(axis=0)
    # A product, not a scattered addition: the same bits in every run.
    grads["embed"] = weight_gradient((inputs[:, :, None] == vocabulary).astype(np.float32), dx)
    return grads


def adamw(state: Any, grads: Any, step: int, rate: float, config: Config) -> None:
    """One step of AdamW in place; gradients longer than CLIP in all are cut to it, and only matrices decay."""
    norm = xp.sqrt(sum((grad * grad).sum() for grad in grads.values()))
    shrink = xp.minimum(model.CLIP / (norm + 1e-6), 1.0)
    for name, value in state["params"].items():
        grad, mean, square = grads[name] * shrink, state["mean"][name], state["square"][name]
        mean += (1 - model.BETA1) * (grad - mean)
        square += (1 - model.BETA2) * (grad * grad - square)
        root = xp.sqrt(square / (1 - model.BETA2**step)) + model.ADAM_EPSILON
        if value.ndim > 1:
            value *= 1 - rate * config.weight_decay
        value -= rate / (1 - model.BETA1**step) * mean / root


def train_step(state: Any, tokens: Any, step: int, rate: float, config: Config) -> tuple[Any, Any, Any]:
    entropy, _, counts, saved = forward(state["params"], tokens, config)
    adamw(state, backward(state["params"], saved, config), step, rate, config)
    return state, entropy, counts


PARTS = Parts(
    name=f"moe_xp with {xp.__name__} and cupy_gmm.expert_ffn",
    on_gpu=lambda: xp is not np,
    put=lambda array: xp.array(array),
    get=lambda array: array if isinstance(array, np.ndarray) else array.get(),
    step=train_step,
    loss=lambda params, tokens, config: forward(params, tokens, config)[0],
)

if __name__ == "__main__":
    run(PARTS, __doc__)
