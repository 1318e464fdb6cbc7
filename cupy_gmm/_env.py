"""Every environment variable that this library reads, and nothing else reads one.

Read when asked, never at import, so a test or a program may set them late. Nothing is ever written to the
environment. The README has the same list for users.
"""

import os
from pathlib import Path

_FOLDER = "cupy_gmm"


def cache_dir() -> Path | None:
    """Folder for compiled kernels, or None when the environment names no usable place.

    `CUPY_GMM_CACHE_DIR` as it is (`~` and a relative path are resolved), else `XDG_CACHE_HOME/cupy_gmm`, else
    `HOME/.cache/cupy_gmm`. An empty variable counts as unset; a relative `XDG_CACHE_HOME` or `HOME` is
    ignored, as the XDG rules demand. The folder is neither created nor checked here: `_cache` does that.
    """
    if own := os.environ.get("CUPY_GMM_CACHE_DIR"):
        return Path(os.path.abspath(os.path.expanduser(own)))
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(xdg):
        return Path(xdg) / _FOLDER
    if (home := os.environ.get("HOME")) and os.path.isabs(home):
        return Path(home) / ".cache" / _FOLDER
    return None
