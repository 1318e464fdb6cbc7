"""The version, declared here only: `pyproject.toml`, `cupy_gmm.__version__` and the kernel cache's key read it."""

__version__ = "0.1.0"
