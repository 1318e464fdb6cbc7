"""Variants of the library side by side in one process: source trees, tuning points, settings of a module.

The package imports itself relatively and finds its kernels from where it lies, so that a copy under another name is a
library of its own. `bench.compare` uses it; it must not import torch or CuPy.
"""

import ast
import dataclasses
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent.parent
PACKAGE = "cupy_gmm"


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute a product.

    Attributes:
        tree: Folder with `cupy_gmm/` and `kernels/`; what it lacks of the two comes from this tree.
        config: Tuning point to force, or None to let the library choose.
        settings: ("module.NAME", value as Python text) of module constants to overwrite.
        label: What tables call it.
    """

    tree: str
    config: str | None
    settings: Sequence[tuple[str, str]]
    label: str


def variants(trees: Iterable[str], configs: Iterable[str], settings: Iterable[str]) -> list[Variant]:
    """Every combination of trees, tuning points and values.

    Args:
        trees: `FOLDER` or `NAME=FOLDER`; this tree when there is none.
        configs: Names; "auto" lets the library choose, as does an empty list.
        settings: `module.NAME=value`, such as `_heuristics.PANEL_COLUMNS=1024`; several of one name are alternatives.
    """
    named = []
    for text in trees or ["."]:
        name, _, folder = text.rpartition("=")
        path = Path(folder).resolve()
        if not ((path / PACKAGE).is_dir() or (path / "kernels").is_dir()):
            raise ValueError(f"{folder} holds neither {PACKAGE}/ nor kernels/")
        named.append((name or path.name, path))
    choices: dict[str, list[tuple[str, str]]] = {}
    for text in settings:
        key, _, value = text.partition("=")
        ast.literal_eval(value)
        choices.setdefault(key, []).append((key, value))
    points = [None if config == "auto" else config for config in configs] or [None]
    found = []
    for (name, path), point, chosen in itertools.product(named, points, itertools.product(*choices.values())):
        parts = [name, *([point] if point else []), *(f"{key.rpartition('.')[2]}={value}" for key, value in chosen)]
        found.append(Variant(str(path), point, chosen, " ".join(parts)))
    labels = [each.label for each in found]
    if repeated := {label for label in labels if labels.count(label) > 1}:
        raise ValueError(f"two variants are called {', '.join(sorted(repeated))}: name the trees, as in NAME=FOLDER")
    return found


def load(variant: Variant, name: str) -> ModuleType:
    """A copy of the library as module `name`, with the kernels and settings of the variant."""
    own = Path(variant.tree) / PACKAGE
    package = own if own.is_dir() else HERE / PACKAGE
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if (kernels := Path(variant.tree) / "kernels").is_dir():
        importlib.import_module(f"{name}._source").PLACES = (kernels,)
    for key, value in variant.settings:
        where, _, constant = key.rpartition(".")
        holder = importlib.import_module(f"{name}.{where}")
        if not hasattr(holder, constant):
            raise ValueError(f"{key}: there is no such name")
        setattr(holder, constant, ast.literal_eval(value))
    return module
