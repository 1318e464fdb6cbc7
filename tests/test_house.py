"""The rules of the house (CONTRIBUTING.md) that a program can hold: layers, sources, sizes, wheel."""

import ast
import os
import re
import site
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pathspec
import pytest

from tests import apart

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cupy_gmm"
KERNELS = ROOT / "kernels"

FRAMEWORKS = {"cupy", "cupyx", "jax", "jaxlib", "torch", "cuda", "matplotlib", "typer", "rich"}
CLI_LIBRARIES = {"matplotlib", "typer", "rich"}
# What a module may import when it is imported itself: nothing below the faces and the command line does.
OWN_LIBRARIES = {"_cli": CLI_LIBRARIES, "torch": {"torch"}, "jax": {"jax"}}

# A file over the guide and the reason why. Empty is the aim.
LONGER_FILES: dict[str, str] = {}
LONGER_FUNCTIONS: dict[str, str] = {}

QUALIFIERS = set(
    """__global__ __device__ __host__ __shared__ __constant__ __forceinline__ __noinline__ __launch_bounds__
    __grid_constant__ __cluster_dims__ __restrict__ __VA_ARGS__""".split()
)


def tracked(folder: str = ".", suffixes: tuple[str, ...] = ()) -> list[Path]:
    """Files that are, or are about to be, under version control: all but those that `.gitignore` names."""
    ignored = pathspec.GitIgnoreSpec.from_lines((ROOT / ".gitignore").read_text().splitlines())
    found = []
    for here, folders, files in os.walk(ROOT / folder):
        names = relative(Path(here)).removeprefix(".")
        prefix = f"{names}/" if names else ""
        folders[:] = [name for name in folders if name != ".git" and not ignored.match_file(f"{prefix}{name}/")]
        found += [Path(here) / name for name in files if name != ".git" and not ignored.match_file(prefix + name)]
    return sorted(path for path in found if path.name.endswith(suffixes or "") and not path.is_symlink())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_files() -> list[Path]:
    folders = [PACKAGE, ROOT / "tests", ROOT / "bench", ROOT / "examples", ROOT / "tools"]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def cuda_files() -> list[Path]:
    return sorted(path for path in KERNELS.rglob("*") if path.suffix in {".cu", ".cuh"})


def cuda_code(path: Path) -> str:
    """Text without comments and string contents; line numbers stay."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), path.read_text(), flags=re.DOTALL)
    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*', lambda m: '""' if m.group()[0] == '"' else "", text)


def layout(title: str) -> list[str]:
    """File names of a layout in CONTRIBUTING.md, in its order."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split(f"## Layout of `{title}`")[1].split("\n## ")[0]
    return re.findall(r"^    ([\w./]+)  +\S", text, re.MULTILINE)


# ---- Python layers

# Top to bottom; a package counts as one module.
LAYERS = [name.removesuffix(".py").rstrip("/") for name in layout("cupy_gmm/")]


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, list[str], bool]]:
    """Of each import in a file of the package: line, dotted name in parts, whether it runs at import."""
    tree = ast.parse(path.read_text())
    late = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.unparse(outer.test))
        for inner in ast.walk(outer)
        if inner is not outer
    }
    package = ["cupy_gmm", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        early = id(node) not in late
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split("."), early
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, [*base, alias.name], early


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_module_has_a_layer():
    """The layout in CONTRIBUTING.md is the tree, and its order is the order of imports."""
    assert sorted({module_of(path) for path in package_files()}) == sorted(LAYERS)


def test_modules_import_only_below():
    wrong = []
    for path in package_files():
        own = module_of(path)
        for line, name, _ in imports(path):
            if name[0] != "cupy_gmm":
                continue
            # `from cupy_gmm import grouped_mm` names no module: it goes through __init__.
            other = name[1] if len(name) > 1 and name[1] in LAYERS else "__init__"
            if other != own and own in LAYERS and LAYERS.index(other) < LAYERS.index(own):
                wrong.append(f"{relative(path)}:{line} imports {other}, which is above {own}")
    assert not wrong, "\n".join(wrong)


def test_frameworks_are_imported_on_first_use():
    wrong = []
    for path in package_files():
        allowed = OWN_LIBRARIES.get(module_of(path), set())
        for line, name, early in imports(path):
            if early and name[0] in FRAMEWORKS - allowed:
                wrong.append(f"{relative(path)}:{line} imports {name[0]} when it is imported itself")
    assert not wrong, "\n".join(wrong)


def test_import_touches_nothing(tmp_path):
    """No framework, no device, no file, no environment variable; even with nowhere to write."""
    program = """
import os, sys
before, at_start = dict(os.environ), set(sys.modules)
import cupy_gmm
loaded = {name.partition(".")[0] for name in set(sys.modules) - at_start} & set(sys.argv[1].split())
assert not loaded, f"import cupy_gmm loaded {loaded}"
assert dict(os.environ) == before, "import cupy_gmm changed the environment"
with open("/proc/self/maps") as maps:
    assert "libcuda" not in maps.read(), "import cupy_gmm loaded the driver"
"""
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ}
    environment |= {"HOME": str(tmp_path / "absent"), "PYTHONUSERBASE": site.getuserbase()}
    apart.python(program, " ".join(sorted(FRAMEWORKS)), environment=environment, PATH="")
    assert not (tmp_path / "absent").exists()


def test_modules_are_imported_when_they_are_named():
    program = """
import sys
import cupy_gmm
assert "cupy_gmm.counts" not in sys.modules
assert cupy_gmm.counts.SETS and "cupy_gmm.counts" in sys.modules
sys.modules["jax"] = None  # as if it were not installed
assert not hasattr(cupy_gmm, "jax")
try:
    cupy_gmm.jax
except AttributeError as error:
    assert "`cupy_gmm.jax` cannot be imported" in str(error), error
assert not hasattr(cupy_gmm, "count")
"""
    apart.python(program)


def test_environment_is_read_in_one_module():
    wrong = []
    for path in package_files():
        if module_of(path) == "_env":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and node.attr in {
                "environ",
                "environb",
                "getenv",
                "expanduser",
            }
            home = isinstance(node, ast.Attribute) and ast.unparse(node) == "Path.home"
            taken = isinstance(node, ast.ImportFrom) and any(a.name in {"environ", "getenv"} for a in node.names)
            if named or home or taken:
                wrong.append(f"{relative(path)}:{node.lineno}")
    assert not wrong, f"read the environment in _env.py, not in {wrong}"


# ---- kernels


def test_assembly_lives_in_ptx():
    wrong = []
    for path in cuda_files():
        if path.parent == KERNELS / "ptx":
            continue
        for number, line in enumerate(cuda_code(path).splitlines(), 1):
            for word in re.findall(r"\b(?:__\w+|atomic[A-Z]\w*|_?_?asm(?:__)?)\b", line):
                if word not in QUALIFIERS:
                    wrong.append(f"{relative(path)}:{number} uses {word}")
    assert not wrong, "make it a function in kernels/ptx/:\n" + "\n".join(wrong)


def test_architecture_is_a_folder():
    wrong = []
    for path in cuda_files():
        for number, line in enumerate(cuda_code(path).splitlines(), 1):
            if re.search(r"^\s*#\s*(if|ifdef|ifndef|elif|else)\b|__CUDA_ARCH", line):
                wrong.append(f"{relative(path)}:{number} {line.strip()}")
    assert not wrong, "no conditional compilation in kernels:\n" + "\n".join(wrong)


def test_each_instruction_cites_the_isa():
    for path in (KERNELS / "ptx").glob("*.cuh"):
        if "asm" in cuda_code(path):
            assert "PTX ISA" in path.read_text(), f"{relative(path)} cites no section of the PTX ISA"


def test_every_kernel_file_has_a_place():
    """The layout in CONTRIBUTING.md is the tree."""
    assert sorted(path.relative_to(KERNELS).as_posix() for path in cuda_files()) == sorted(layout("kernels/"))


def test_includes_go_upwards_in_the_layout():
    """Nothing includes a `.cu` or a system header; `ptx/` includes only itself."""
    order = layout("kernels/")
    for path in cuda_files():
        text = path.read_text()
        assert not re.search(r"^\s*#\s*include\s*<", text, re.MULTILINE), f"{relative(path)}: NVRTC has no such header"
        names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE)
        own = path.relative_to(KERNELS).as_posix()
        for target in ((path.parent / name).resolve() for name in names):
            assert target.is_file(), f"{relative(path)} includes {target.name}, which does not exist"
            other = target.relative_to(KERNELS).as_posix()
            assert other.endswith(".cuh"), f"{own} includes {other}"
            assert own not in order or order.index(other) < order.index(own), f"{own} includes {other}, below it"
            assert other.startswith("ptx/") or not own.startswith("ptx/"), f"{own} includes {other}"


@pytest.mark.parametrize("path", cuda_files(), ids=relative)
def test_cuda_file_begins_as_the_house_does(path):
    text = path.read_text()
    assert text.startswith("// "), "the head says what the file is, who calls it, what it must not know"
    if path.suffix == ".cuh":
        assert "\n#pragma once\n" in text


def test_no_python_in_kernels():
    assert not list(KERNELS.rglob("*.py"))


# ---- sizes


def test_file_sizes():
    limits = [(path, 400 if path.is_relative_to(ROOT / "tests") else 300) for path in python_files()]
    limits += [(path, 250) for path in cuda_files()]
    long = {}
    for path, limit in limits:
        lines = len(path.read_text().splitlines())
        if lines > limit and relative(path) not in LONGER_FILES:
            long[relative(path)] = f"{lines} lines, guide {limit}"
    assert not long, long
    stale = [name for name in LONGER_FILES if not (ROOT / name).exists()]
    assert not stale, f"no longer there: {stale}"


def test_function_sizes():
    long = {}
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body else 0
            name = f"{relative(path)}:{node.name}"
            if lines > 60 and name not in LONGER_FUNCTIONS:
                long[name] = lines
    assert not long, f"functions over 60 lines: {long}"


# ---- what is shipped and what is committed


@pytest.fixture(scope="module")
def builds(tmp_path_factory) -> dict[str, Path]:
    """A wheel from the tree, an sdist, and a wheel from that sdist; no network, no isolation."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("dist")

    def build(source: Path, target: str, name: str) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder / name)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        (made,) = (folder / name).iterdir()
        return made

    sdist = build(ROOT, "sdist", "sdist")
    subprocess.run([sys.executable, "-m", "tarfile", "-e", str(sdist), str(folder)], check=True, timeout=120)
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    return {"tree": build(ROOT, "wheel", "wheel"), "sdist": build(unpacked, "wheel", "again")}


@pytest.mark.parametrize("source", ["tree", "sdist"])
def test_wheel_holds_the_kernels_and_the_package(builds, source):
    with zipfile.ZipFile(builds[source]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
        licence = [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    expected = {f"cupy_gmm/{relative(path)}" for path in tracked("kernels")}
    expected |= {relative(path) for path in tracked("cupy_gmm")}
    assert names == expected
    assert {f"cupy_gmm/{relative(path)}" for path in cuda_files()} <= names, "a kernel is git-ignored"
    assert {"cupy_gmm/py.typed", "cupy_gmm/_count_sets/moe-example.npz"} <= names
    assert licence
    assert "\nVersion: 0.1.0\n" in metadata


# Letters in brackets, so that the pattern does not find itself.
FOREIGN = re.compile(
    r"(?<![\w.$~}])/(?:wor[k]|roo[t]|hom[e]|Users|mnt|op[t])/"
    r"|\b(?:files[.]python[h]osted|py[p]i[.]org|download[.]py[t]orch|registry[.]npm[j]s)"
    r"|--(?:extra-)?index-url"
)


def test_no_machine_paths_and_no_registry_hosts():
    wrong = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if found := FOREIGN.search(line):
                wrong.append(f"{relative(path)}:{number} has {found.group()}")
    assert not wrong, "\n".join(wrong)


def test_tracked_files_are_small():
    """The repository holds sources and small records; nothing built, nothing large."""
    heavy = {relative(path): path.stat().st_size for path in tracked() if path.stat().st_size > 1_000_000}
    assert not heavy, heavy
