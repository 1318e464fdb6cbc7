"""What tests of `cupy_gmm.jax` share where there is no GPU: JAX kept on the CPU, NumPy behind the handlers, the text of
lowered programs, programs on two devices. Imports JAX when it is used.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests import apart


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    import jax

    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def xla_machine() -> Iterator[Any]:
    """XLA's CPU platform calls the handlers, whose launches are NumPy's: see `xla`."""
    from tests import xla

    with pytest.MonkeyPatch.context() as patch:
        yield from xla.machine(patch)


def since_06(why: str) -> None:
    """A skip where JAX is older, as `pyproject.toml` allows: what is asked it does not know in any words.

    CI has a newer one, and its `--complete` makes this skip a failure.
    """
    import jax

    if jax.__version_info__ < (0, 6):
        pytest.skip(f"needs JAX 0.6: {why}")


def lowered(function: Any, *operands: Any, platform: str = "cuda") -> str:
    """The program for a platform that need not be here, as text."""
    since_06("JAX before it writes the branches of all platforms into a program, and leaves the choice to XLA")
    return function.trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def calls(text: str) -> list[tuple[str, str]]:
    """(target, facts) of our calls in a program, in order."""
    return re.findall(r'custom_call @(cupy_gmm\.\w+)\(.*?call = "format=1 ([^"]*)"', text)


SHARED = """
import jax, jax.numpy as jnp, numpy as np
from jax import shard_map
from jax.sharding import Mesh, PartitionSpec as P
import cupy_gmm.jax as face

mesh = Mesh(np.array(jax.devices()), ("d",))
def mapped(f, in_specs, out_specs):
    return jax.jit(shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
"""


def on_two_devices(program: str) -> None:
    """Runs `program` in a process of its own, where JAX has two devices."""
    since_06("its `shard_map` is the first to look into `custom_vmap`")
    apart.python(
        program,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
        OPENBLAS_NUM_THREADS="1",
    )
