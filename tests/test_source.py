"""Where the CUDA sources are found, and what changes their digest."""

from pathlib import Path

import pytest

from cupy_gmm import _source
from cupy_gmm.errors import CompileError
from tests.kernels_for_tests import write_sources


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    folder = write_sources(tmp_path)
    monkeypatch.setattr(_source, "PLACES", (folder,))
    return folder


def test_sources_in_neither_place(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()  # somebody else's
    monkeypatch.setattr(_source, "PLACES", (tmp_path / "kernels", tmp_path / "other"))
    with pytest.raises(CompileError, match=r"neither `.*kernels` nor `.*other` holds `ptx/types.cuh`"):
        _source.kernels_dir()


def test_sources_are_looked_for_in_the_package_first(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(_source, "PLACES", (tmp_path / "absent", sources))
    assert _source.kernels_dir() == sources
    assert [place.name for place in _source.PLACES] == ["absent", sources.name]


def test_unknown_unit_names_those_there(sources):
    with pytest.raises(CompileError, match=r"`absent.cu` is no CUDA unit of `.*`: expected one of whole.cu"):
        _source.unit("absent.cu")


def test_digest_sees_every_name_and_text(sources):
    """Each change is in one respect only; documentation does not count."""
    seen = [_source.digest()]
    config, renamed = sources / "config.cuh", sources / "configs.cuh"
    config.write_text(config.read_text() + "// more\n")
    seen.append(_source.digest())
    config.rename(renamed)  # at the same place in the order
    seen.append(_source.digest())
    (sources / "ptx" / "new.cuh").touch()
    seen.append(_source.digest())
    renamed.write_text("a")
    (sources / "configs2.cuh").write_text("b")
    seen.append(_source.digest())
    (sources / "configs2.cuh").unlink()
    renamed.write_text("aconfigs2.cuh\0b")
    seen.append(_source.digest())
    assert len(set(seen)) == 6
    (sources / "README.md").write_text("words")
    assert _source.digest() == seen[-1]


def test_digest_does_not_depend_on_the_order_of_the_disk(sources, monkeypatch):
    before, listed = _source.digest(), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda folder, pattern: reversed(list(listed(folder, pattern))))
    assert _source.digest() == before


def test_head_of_a_text(sources):
    expected = f'// kernels {_source.digest()}\n#include "a.cuh"\n#include "b.cuh"\n'
    assert _source.header_text("a.cuh", "b.cuh") == expected
    assert _source.unit("whole.cu") == f'// kernels {_source.digest()}\n#include "whole.cu"\n'
