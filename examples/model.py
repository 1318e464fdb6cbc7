"""What both examples train: sizes, first parameters, learning rate. Knows no framework; arrays are NumPy's."""

import dataclasses
import math
from typing import Any

import numpy as np

VOCABULARY = 256  # a token is a byte
EPSILON = 1e-5  # of the norms
BETA1, BETA2, ADAM_EPSILON, CLIP = 0.9, 0.95, 1e-8, 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model and of a step. `balance` weighs the loss that keeps experts evenly used; 0 leaves it out."""

    layers: int
    hidden: int
    heads: int
    inner: int
    experts: int
    top_k: int
    context: int
    batch: int
    learning_rate: float
    steps: int
    warmup: int
    balance: float = 0.01
    weight_decay: float = 0.1


FULL = Config(
    layers=6, hidden=512, heads=8, inner=512, experts=32, top_k=2, context=256, batch=64, learning_rate=6e-4,
    steps=2000, warmup=100,
)  # fmt: skip
TINY = Config(
    layers=4, hidden=64, heads=4, inner=32, experts=32, top_k=2, context=64, batch=16, learning_rate=4e-3,
    steps=250, warmup=10,
)  # fmt: skip


def parameters(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Fresh float32 parameters. Layer 3 has `3.qkv` and so on; an expert's gate and up are one matrix."""
    rng, d, inner, experts = np.random.default_rng(seed), config.hidden, config.inner, config.experts

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (rng.standard_normal(shape, dtype=np.float32) * scale).astype(np.float32)

    into, back = d**-0.5, 1 / math.sqrt(2 * config.layers)  # what is added to the residual starts small
    made: dict[str, Any] = {
        "embed": normal(VOCABULARY, d, scale=0.5),
        "position": normal(config.context, d, scale=0.1),
        "norm": np.ones(d, np.float32),
        "head": normal(d, VOCABULARY, scale=0.5 * into),
    }
    for layer in range(config.layers):
        made |= {
            f"{layer}.norm1": np.ones(d, np.float32),
            f"{layer}.qkv": normal(d, 3 * d, scale=into),
            f"{layer}.out": normal(d, d, scale=into * back),
            f"{layer}.norm2": np.ones(d, np.float32),
            f"{layer}.router": normal(d, experts, scale=into),
            f"{layer}.gate_up": normal(experts, d, 2 * inner, scale=into),
            f"{layer}.down": normal(experts, inner, d, scale=inner**-0.5 * back),
        }
    return made


def first_state(config: Config, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Parameters and both moments of AdamW."""
    params = parameters(config, seed)
    zeros = [{name: np.zeros_like(value) for name, value in params.items()} for _ in range(2)]
    return {"params": params, "mean": zeros[0], "square": zeros[1]}


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth. Steps count from 1."""
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(done, 1.0)))
