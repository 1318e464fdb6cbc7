"""What the documents promise: examples run, docstrings are complete, what is named is there."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import cupy_gmm
from tests import apart, conftest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cupy_gmm"
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()

PUBLIC = set(
    """grouped_mm grouped_mm_wgrad make_schedule Schedule offs_from_sizes async_status
    Routing route permute permute_backward combine combine_backward
    silu_mul silu_mul_backward expert_ffn expert_ffn_backward
    GmmError ArgumentError DtypeError UnsupportedError CompileError __version__""".split()
)
# Results without floating-point arithmetic; and what launches nothing.
WITHOUT = {
    "Numerics": {"make_schedule", "offs_from_sizes", "async_status", "route"},
    "Source": {"async_status"},
}
FUNCTIONS = sorted(name for name in PUBLIC if inspect.isfunction(getattr(cupy_gmm, name, None)))
RECORDS = sorted(name for name in PUBLIC if dataclasses.is_dataclass(getattr(cupy_gmm, name, None)))
SECTIONS = re.compile(r"^(Args|Returns|Raises|Numerics|Cost|Source|Example|Attributes|Note):\s*$", re.MULTILINE)


def sections(thing: object) -> dict[str, str]:
    """Google-style sections of a docstring; the text before the first one under the key ""."""
    parts = SECTIONS.split(inspect.getdoc(thing) or "")
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def test_public_names():
    names = {name for name, value in vars(cupy_gmm).items() if not inspect.ismodule(value)}
    assert {name for name in names if not name.startswith("_")} == PUBLIC - {"__version__"}
    assert cupy_gmm.__version__ == "0.1.0"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_has_the_sections_of_the_house(name):
    check_sections(name, getattr(cupy_gmm, name))


def check_sections(name, function):
    found = sections(function)
    assert re.match(r"[A-Z`][^\n]*[.:]", found[""]), "begins with a sentence"
    for section in ("Args", "Returns", "Raises", "Numerics", "Cost", "Source"):
        if name not in WITHOUT.get(section, ()):
            assert found.get(section, "").strip(), f"{name} lacks {section}"
    for argument in inspect.signature(function).parameters:
        assert re.search(rf"\b{argument}\b[^:\n]*:", found["Args"]), f"{name}: Args lacks {argument}"


INSIDE_JAX = "combine expert_ffn grouped_mm grouped_mm_wgrad permute ragged_dot route silu_mul".split()


@pytest.mark.parametrize("name", INSIDE_JAX)
def test_docstrings_inside_jax(name):
    """Sections and arguments, as above."""
    pytest.importorskip("jax", reason="JAX is not installed")
    import cupy_gmm.jax

    function = getattr(cupy_gmm.jax, name)
    found = sections(function)
    assert re.match(r"[A-Z`][^\n]*[.:]", found[""]), "begins with a sentence"
    assert all(found.get(part, "").strip() for part in ("Args", "Returns", "Raises", "Numerics", "Cost", "Source"))
    for argument in inspect.signature(function).parameters:
        assert re.search(rf"\b{argument}\b[^:\n]*:", found["Args"]), f"{name}: Args lacks {argument}"
    assert cupy_gmm.jax.__all__ == ["SCHEDULE", "TARGETS", *INSIDE_JAX]
    assert f"`{name}`" in README or f"`cupy_gmm.jax.{name}`" in README


FACE = sorted("combine expert_ffn grouped_mm grouped_mm_wgrad permute route silu_mul".split())


def test_public_names_of_the_torch_face():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    face = importlib.import_module("cupy_gmm.torch")
    names = [name for name, value in vars(face).items() if not inspect.ismodule(value) and not name.startswith("_")]
    assert sorted(names) == FACE
    assert all(f"`{name}`" in README for name in FACE)


@pytest.mark.parametrize("name", FACE)
def test_docstring_of_the_torch_face_has_the_sections_of_the_house(name):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    check_sections(name, getattr(importlib.import_module("cupy_gmm.torch"), name))


@pytest.mark.parametrize("name", RECORDS)
def test_record_describes_its_fields(name):
    record = getattr(cupy_gmm, name)
    text = inspect.getdoc(record) or ""
    for field in dataclasses.fields(record):
        if field.repr:
            assert re.search(rf"\b{field.name}\b", text), f"{name} does not describe {field.name}"


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_every_public_name_is_documented(name):
    assert inspect.getdoc(getattr(cupy_gmm, name))


def test_notes_that_the_code_cites_exist():
    """A `perf:` comment or a default stands on a note; it must be there to be read."""
    missing = set()
    for folder in ("cupy_gmm", "kernels", "bench"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".cu", ".cuh"}:
                cited = re.findall(r"bench/notes/[\w.-]+\.md", path.read_text())
                missing |= {note for note in cited if not (ROOT / note).is_file()}
    assert not missing, sorted(missing)


# ---- README


def blocks() -> list[tuple[str, str]]:
    """(framework, code) of each Python example in the README."""
    found = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return [(re.search(r"import (cupy|torch|jax|ml_dtypes)\b", code).group(1), code) for code in found]


@pytest.mark.parametrize(
    "framework, code",
    [
        pytest.param(framework, code, id=framework, marks=[pytest.mark.gpu] * (framework == "cupy"))
        for framework, code in blocks()
    ],
)
def test_readme_example_runs(framework, code):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    place = {"JAX_PLATFORMS": "cpu"} if conftest.no_device() else {}
    apart.python(code, XLA_PYTHON_CLIENT_PREALLOCATE="false", **place)


def test_readme_shows_four_families():
    assert [framework for framework, _ in blocks()] == ["jax", "cupy", "torch", "torch", "jax", "jax", "ml_dtypes"]


def test_readme_lists_the_variables():
    read = {
        node.value
        for node in ast.walk(ast.parse((PACKAGE / "_env.py").read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[A-Z][A-Z_]+", node.value)
    }
    listed = set(re.findall(r"^\| `([A-Z_]+)` \|", README, re.MULTILINE))
    assert "CUPY_GMM_CACHE_DIR" in read
    assert listed == read
    for document in (README, CONTRIBUTING, (ROOT / "SECURITY.md").read_text()):
        assert set(re.findall(r"\bCUPY_GMM_[A-Z_]+", document)) <= read


def test_readme_names_the_hops():
    listing = re.search(r"## From `grouped_mm` to the launch\n(.*?)\n## ", README, re.DOTALL).group(1)
    hops = re.findall(r"^    (\w+) ", listing, re.MULTILINE)
    assert hops == ["ops", "_arrays", "_problem", "_plan", "_schedule", "_launch"]
    assert all((PACKAGE / f"{hop}.py").is_file() or (PACKAGE / hop).is_dir() for hop in hops)


DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("[bk]*/*.md")])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_named_in_documents_exist(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / name).read_text()
    made = set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE))
    assert made <= targets, made - targets
    called = set(re.findall(r"python -m cupy_gmm ([a-z]+)", text))
    assert all((PACKAGE / "_cli" / f"{command}.py").is_file() for command in called), called


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_named_in_documents_exist(name):
    for path in re.findall(r"`((?:kernels|cupy_gmm|tests|bench|tools)/[\w./-]*)`", (ROOT / name).read_text()):
        installed = path == "cupy_gmm/kernels"  # only in an installed package
        assert installed or (ROOT / path).exists(), path


def test_the_kernels_reading_order_is_complete_and_goes_down():
    """Each file in the table of kernels/README.md once, after all files that it includes."""
    kernels = ROOT / "kernels"
    table = (kernels / "README.md").read_text().split("## Reading order")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    order = [name for row in rows for name in re.findall(r"`([\w./*]+\.cuh?)`", row)]
    assert order.pop(0) == "ptx/*.cuh"
    files = [path for path in kernels.rglob("*.cu*") if path.parent.name != "ptx"]
    assert sorted(order) == sorted(path.relative_to(kernels).as_posix() for path in files)
    for path in files:
        own = path.relative_to(kernels).as_posix()
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            other = (path.parent / name).resolve().relative_to(kernels).as_posix()
            if not other.startswith("ptx/"):
                assert order.index(other) < order.index(own), f"{own} is listed before {other}, which it includes"
