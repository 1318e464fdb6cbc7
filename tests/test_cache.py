"""The kernel cache on disk: what it trusts, what it leaves behind, and that its troubles stay its own.

C95-C97, C99, C100 and C105, with made-up entries; `test_compile.py` has the same through real compiles.
"""

import errno
import hashlib
import json
import os
import stat
import struct
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from cupy_gmm import _cache
from tests import apart

ROOT = Path(__file__).resolve().parent.parent
KEY = {"library": "1", "text": "source", "options": ["-a", "-b"], "nvrtc": "12.9"}
METADATA = {"log": "fine", "resources": {"k": {"registers": 8}}}
IMAGE = bytes(range(256)) * 3

pytestmark = [
    pytest.mark.skipif(not _cache._SUPPORTED, reason="this system keeps kernels in memory only"),
    pytest.mark.filterwarnings("error"),  # a warning that no test expects fails it
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("CUPY_GMM_CACHE_DIR", str(path))
    monkeypatch.setattr(_cache, "_failure", None)
    return path


@pytest.fixture
def entry(folder) -> Path:
    """The one file of a folder that holds KEY."""
    _cache.write(KEY, METADATA, IMAGE)
    (path,) = folder.iterdir()
    return path


def test_what_is_written_is_read(entry):
    assert _cache.read(KEY) == (METADATA, IMAGE)
    assert entry.name == _cache.key(KEY)
    assert _cache.problem() is None


def test_an_empty_cache_is_a_silent_miss(folder):
    assert _cache.read(KEY) is None


@pytest.mark.parametrize("part", sorted(KEY))
def test_each_part_of_the_key_counts(part, entry):
    changed = {**KEY, part: "another"}
    dropped = {name: value for name, value in KEY.items() if name != part}
    assert _cache.read(changed) is None
    assert _cache.read(dropped) is None
    assert _cache.read(dict(reversed(KEY.items()))) is not None, "the order of the parts does not count"


def test_key_material_is_compared(entry, folder):
    """A file under another entry's name: a collision, or a copy by hand."""
    entry.rename(folder / _cache.key({**KEY, "text": "other"}))
    assert _cache.read({**KEY, "text": "other"}) is None


def test_c96_cut_short_anywhere(entry):
    whole = entry.read_bytes()
    for length in [*range(60), *range(60, len(whole), 7), len(whole) - 1]:
        entry.write_bytes(whole[:length])
        assert _cache.read(KEY) is None, length
    entry.write_bytes(whole + b"\0")
    assert _cache.read(KEY) is None
    entry.write_bytes(whole)
    assert _cache.read(KEY) == (METADATA, IMAGE)


def test_c96_one_bit_flipped_anywhere(entry):
    whole = entry.read_bytes()
    for place in range(len(whole)):
        entry.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        assert _cache.read(KEY) is None, place


def forged(magic=b"cupy_gmm", version=_cache.FORMAT, lengths=None, parts=None) -> bytes:
    """An entry with a right checksum and something else wrong."""
    parts = parts or [json.dumps(KEY, sort_keys=True, separators=(",", ":")).encode(), b"{}", b"image"]
    body = struct.pack("<8sIQQQ", magic, version, *(lengths or map(len, parts))) + b"".join(parts)
    return body + hashlib.sha256(body).digest()


def test_a_right_checksum_is_not_enough(entry):
    entry.write_bytes(forged())
    assert _cache.read(KEY) == ({}, b"image")
    key = forged()[36:-39]
    for bad in [
        forged(magic=b"CUPY_GMM"),
        forged(version=_cache.FORMAT + 1),
        forged(lengths=[2**63, 2, 5]),
        forged(lengths=[2, 2, 5]),
        forged(lengths=[len(key), 2, 4]),
        forged(lengths=[len(key), 2, 6]),
        forged(parts=[key + b" ", b"{}", b"image"]),
        forged(parts=[key, b"[]", b"image"]),
        forged(parts=[key, b"not json", b"image"]),
        forged(parts=[key, b"\xff\xfe", b"image"]),
    ]:
        entry.write_bytes(bad)
        assert _cache.read(KEY) is None, bad


def test_c97_code_of_one_entry_with_metadata_of_another(entry, folder):
    other = {**KEY, "text": "other"}
    _cache.write(other, {"log": "other", "resources": {}}, b"x" * len(IMAGE))
    first, second = entry.read_bytes(), (folder / _cache.key(other)).read_bytes()
    image_at = first.index(IMAGE)
    entry.write_bytes(first[:image_at] + second[-len(first) + image_at :])
    assert _cache.read(KEY) is None
    entry.write_bytes(first[:image_at] + b"x" * len(IMAGE) + first[-32:])
    assert _cache.read(KEY) is None


def test_a_later_write_replaces(entry, folder):
    entry.write_bytes(b"damaged")
    _cache.write(KEY, METADATA, b"new")
    assert _cache.read(KEY) == (METADATA, b"new")
    assert list(folder.iterdir()) == [entry]


# ---- who may write there (C100)


@pytest.fixture
def umask():
    def set_umask(value):
        os.umask(value)

    before = os.umask(0)
    yield set_umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0, 0o077, 0o022])
def test_c100_modes_under_any_umask(mask, umask, tmp_path, monkeypatch):
    umask(mask)
    monkeypatch.setattr(_cache, "_failure", None)
    monkeypatch.setenv("CUPY_GMM_CACHE_DIR", str(tmp_path / "a" / "b" / "c"))
    _cache.write(KEY, METADATA, IMAGE)
    for made in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE((tmp_path / made).stat().st_mode) == 0o700
    (file,) = (tmp_path / "a" / "b" / "c").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def use_thrice() -> None:
    for _ in range(3):
        assert _cache.read(KEY) is None
        _cache.write(KEY, METADATA, IMAGE)


def refused(words: str) -> None:
    """Nothing is read or written, and one warning says why, however often it happens."""
    with pytest.warns(RuntimeWarning, match=words) as seen:
        use_thrice()
    assert len(seen) == 1
    assert "set CUPY_GMM_CACHE_DIR to a folder of yours" in str(seen[0].message)
    assert _cache.problem() is not None


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_c100_folder_that_others_can_write(mode, entry, folder):
    before = entry.read_bytes()
    folder.chmod(mode)
    refused(rf"can be written by others \(mode {mode:04o}\)")
    assert [path.read_bytes() for path in folder.iterdir()] == [before]


def test_c100_folder_of_another_user(entry, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused("belongs to another user")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a folder away")
def test_c100_folder_of_another_user_for_real(entry, folder):
    """Skipped where root is only called so, in a user namespace: there is nobody to give the folder to, and the test
    above stands in. In CI, whose root is one, the skip is a failure.
    """
    try:
        os.chown(folder, 12345, -1)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM):  # no such user here; may not
            raise
        pytest.skip(f"this root cannot give a folder away ({error.strerror})")
    refused("belongs to another user")


def test_c100_folder_is_a_link(entry, folder):
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")
    refused("is not a folder that can be used")
    assert (folder / entry.name).exists(), "left alone"


@pytest.mark.parametrize("what", ["file", "dangling link", "below a file"])
def test_folder_that_cannot_be(what, folder, monkeypatch):
    if what == "file":
        folder.touch()
    elif what == "dangling link":
        folder.symlink_to(folder.parent / "absent")
    else:
        folder.touch()
        monkeypatch.setenv("CUPY_GMM_CACHE_DIR", str(folder / "below"))
    refused("is not a folder that can be used")
    assert not (folder.parent / "absent").exists()


def test_c99_no_home(folder, monkeypatch):
    for name in ("CUPY_GMM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    refused("no home folder is known")


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "group-writable", "world-writable", "foreign"])
def test_c100_entry_that_is_no_private_file(what, entry, folder, monkeypatch):
    """Ignored without a word, and a pipe does not hang the reader; writing puts a sound file in its place."""
    kept = folder.parent / "kept"
    if what in ("link", "pipe", "folder"):
        entry.rename(kept)
    if what == "link":
        entry.symlink_to(kept)
    elif what == "pipe":
        os.mkfifo(entry)
    elif what == "folder":
        entry.mkdir()
    elif what == "foreign":
        real = os.fstat
        owner = lambda found: found.st_uid + stat.S_ISREG(found.st_mode)  # noqa: E731
        fake = lambda fd: os.stat_result((*real(fd)[:4], owner(real(fd)), *real(fd)[5:]))  # noqa: E731
        monkeypatch.setattr(os, "fstat", fake)
    else:
        entry.chmod(0o620 if what == "group-writable" else 0o602)
    assert _cache.read(KEY) is None
    monkeypatch.undo()
    monkeypatch.setenv("CUPY_GMM_CACHE_DIR", str(folder))
    if what != "folder":
        _cache.write(KEY, METADATA, b"new")
        assert _cache.read(KEY) == (METADATA, b"new")
        assert stat.S_ISREG(entry.lstat().st_mode)


# ---- troubles of the disk (C105)


@pytest.mark.parametrize("call", ["open", "fstat", "rename", "fsync", "mkdir", "close"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE])
def test_c105_any_os_error_is_a_miss(call, number, folder, monkeypatch):
    real = getattr(os, call)

    def fail(*arguments, **options):
        if call == "close":
            real(*arguments)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.warns(RuntimeWarning, match="kept in memory only") as seen:
            use_thrice()
    assert len(seen) == 1
    assert not folder.exists() or call == "close" or not list(folder.iterdir()), "a temporary file was left"
    _cache.write(KEY, METADATA, IMAGE)
    assert _cache.read(KEY) == (METADATA, IMAGE), "the cache serves again once the trouble is over"


def test_c105_a_file_that_vanishes_or_is_locked(entry, monkeypatch):
    real = os.open

    def locked(path, flags, *rest, **options):
        if options.get("dir_fd") is not None:
            raise PermissionError(errno.EACCES, "locked by another process")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", locked)
    assert _cache.read(KEY) is None


def test_a_system_without_descriptors_of_folders(folder, monkeypatch):
    monkeypatch.setattr(_cache, "_SUPPORTED", False)
    _cache.write(KEY, METADATA, IMAGE)
    assert _cache.read(KEY) is None
    assert not folder.exists()
    assert "this system" in _cache.problem()


# ---- many at once


def test_c95_readers_see_a_whole_entry_or_none(folder):
    """Two writers replace one entry over and over; every read is one of the two, complete."""
    images = (b"a" * 300_000, b"b" * 200_000)
    stop, seen = threading.Event(), []

    def write(image):
        while not stop.is_set():
            _cache.write(KEY, {"first": image[0]}, image)

    writers = [threading.Thread(target=write, args=(image,), daemon=True) for image in images]
    for thread in writers:
        thread.start()
    while len(seen) < 200:
        found = _cache.read(KEY)
        if found is not None:
            seen.append(found)
    stop.set()
    for thread in writers:
        thread.join(30)
    assert all(metadata == {"first": image[0]} and image in images for metadata, image in seen)
    assert [path.name for path in folder.iterdir()] == [_cache.key(KEY)]


def test_c95_eight_processes_write_one_entry(folder):
    program = (
        "from cupy_gmm import _cache\n"
        f"_cache.write({KEY!r}, {METADATA!r}, {IMAGE!r})\n"
        f"assert _cache.read({KEY!r}) == ({METADATA!r}, {IMAGE!r})\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(8)]
    assert [process.wait(60) for process in processes] == [0] * 8
    assert [path.name for path in folder.iterdir()] == [_cache.key(KEY)]


def test_one_warning_among_many_threads(folder):
    folder.touch()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        apart.at_once(lambda: _cache.read(KEY))
    assert len(seen) == 1
