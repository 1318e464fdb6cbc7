"""Compiled kernels on disk: one checked file an entry, in a private folder.

`_compile` calls `read` and `write`; neither ever raises for what the disk holds. Whatever is wrong with a
file (missing, cut short, changed, somebody else's, made for another key) is a miss: the kernel is compiled
again. Whatever is wrong with the folder turns the cache off, with one warning a process. Must not know what
an entry means.

An entry: magic, format version, the three lengths, key material, metadata, image, then SHA-256 over all of
it. Metadata and image share one file and one checksum, so a reader never mixes two compiles.
"""

import hashlib
import json
import os
import secrets
import stat
import struct
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from . import _env

FORMAT = 1
_MAGIC = b"cupy_gmm"
_HEAD = struct.Struct("<8sIQQQ")  # magic, format, bytes of key material, of metadata, of image
_DIGEST_BYTES = hashlib.sha256().digest_size

# Every step goes through a descriptor of the checked folder. A system without that (Windows) keeps kernels
# in memory.
_SUPPORTED = hasattr(os, "O_NOFOLLOW") and os.open in os.supports_dir_fd and os.rename in os.supports_dir_fd

_failure: str | None = None  # the first one, which was warned of
_failure_lock = threading.Lock()


def key(material: Mapping[str, object]) -> str:
    """Name of an entry: SHA-256 over the canonical text of all that decides it, as hex."""
    return hashlib.sha256(_canonical(material)).hexdigest()


def read(material: Mapping[str, object]) -> tuple[dict[str, object], bytes] | None:
    """Metadata and image stored for exactly this key material, or None."""
    try:
        with _folder() as folder:
            return _unpack(_read_file(folder, key(material)), _canonical(material))
    except _FolderError as error:
        _warn(str(error))
    except (OSError, ValueError):
        pass
    return None


def write(material: Mapping[str, object], metadata: Mapping[str, object], image: bytes) -> None:
    """Store an entry for other processes; a reader sees all of it or nothing."""
    try:
        with _folder() as folder:
            _write_file(folder, key(material), _pack(_canonical(material), _canonical(metadata), image))
    except OSError as error:
        _warn(str(error))


def problem() -> str | None:
    """Why compiled kernels are not kept on disk, or None when they are; makes the folder if it is missing."""
    try:
        with _folder():
            return _failure
    except OSError as error:
        return str(error)


def _canonical(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _pack(material: bytes, metadata: bytes, image: bytes) -> bytes:
    head = _HEAD.pack(_MAGIC, FORMAT, len(material), len(metadata), len(image))
    body = b"".join((head, material, metadata, image))
    return body + hashlib.sha256(body).digest()


def _unpack(entry: bytes, material: bytes) -> tuple[dict[str, object], bytes]:
    """ValueError for anything but a whole entry of this key material."""
    body, checksum = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
    if len(body) < _HEAD.size or hashlib.sha256(body).digest() != checksum:
        raise ValueError("checksum")
    magic, version, *lengths = _HEAD.unpack_from(body)
    if magic != _MAGIC or version != FORMAT or _HEAD.size + sum(lengths) != len(body):
        raise ValueError("format")
    metadata_at = _HEAD.size + lengths[0]
    image_at = metadata_at + lengths[1]
    if body[_HEAD.size : metadata_at] != material:
        raise ValueError("key material")
    metadata = json.loads(body[metadata_at:image_at])
    if not isinstance(metadata, dict):
        raise ValueError("metadata")
    return metadata, body[image_at:]


class _FolderError(OSError):
    """The folder as a whole cannot be used."""


@contextmanager
def _folder() -> Iterator[int]:
    """A descriptor of the cache folder, created 0700 and checked.

    Checks and later steps all go through the descriptor, so a folder exchanged meanwhile is never used.
    """
    if not _SUPPORTED:
        raise OSError("this system cannot open a file relative to a folder")
    path = _env.cache_dir()
    if path is None:
        raise _FolderError("no home folder is known")
    try:
        _make_private(str(path))
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _FolderError(f"`{path}` is not a folder that can be used ({error.strerror})") from error
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            raise _FolderError(f"`{path}` belongs to another user")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _FolderError(f"`{path}` can be written by others (mode {stat.S_IMODE(found.st_mode):04o})")
        yield folder
    finally:
        os.close(folder)


def _make_private(path: str) -> None:
    """Create a folder and its missing parents, each 0700; os.makedirs leaves the parents to the umask."""
    if os.path.lexists(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        _make_private(parent)
    with suppress(FileExistsError):  # another process was first
        os.mkdir(path, 0o700)


def _read_file(folder: int, name: str) -> bytes:
    # O_NONBLOCK: a pipe put in the place of an entry must not hang the reader.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(name, flags, dir_fd=folder)
    try:
        found = os.fstat(handle)
        writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or writable:
            raise ValueError("not a regular file of ours")
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def _write_file(folder: int, name: str, entry: bytes) -> None:
    temporary = f".{name}.{os.getpid()}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(entry)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _warn(reason: str) -> None:
    global _failure
    with _failure_lock:
        if _failure is not None or not _SUPPORTED:
            return
        _failure = reason
    warnings.warn(
        f"compiled kernels are kept in memory only, each process compiles them again: {reason}; set "
        "CUPY_GMM_CACHE_DIR to a folder of yours that nobody else can write.",
        RuntimeWarning,
        stacklevel=3,
    )
