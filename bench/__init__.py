"""Benchmarks: problems, roofs, contenders."""

import os

VISIBLE = "CUDA_VISIBLE_DEVICES"


def one_gpu() -> None:
    """Lets this process and those it starts see one GPU, the first of those visible; to be called before CUDA starts.

    JAX takes all that it sees and leaves another one current, on whose stream the events of a clock would then be.
    """
    os.environ[VISIBLE] = os.environ.get(VISIBLE, "0").split(",")[0]
