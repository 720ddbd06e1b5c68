"""Files that a crash, a full disk or another person's folder cannot spoil.

Invariants: `write_file` leaves the old file or the whole new one, whenever the machine stops; it follows no symbolic
link and writes under no name that others can guess, so it is safe in a folder that came from a stranger.
"""

import errno
import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def disk_fault(error: BaseException | None) -> str | None:
    """What is wrong with the disk where that caused an error, in the system's words; otherwise None.

    Some libraries raise errors of their own that only quote the system's number.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FAULTS:
            return os.strerror(error.errno)
        for number in DISK_FAULTS:
            if f"(os error {number})" in str(error):  # Rust's words, as in safetensors
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None


def write_file(path: Path, data: bytes) -> None:
    """Replace a file: write a new one under a random name, sync it, rename it, sync the folder."""
    try:
        _write_and_rename(path, data)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the random name, and a failed write has none
        raise
    sync(path.parent)


def _write_and_rename(path: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_umask())  # mkstemp gives the owner alone access
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
