"""Files that a crash, a full disk or an untrusted folder cannot damage.

Invariants: `write_file` leaves either the old file or the complete new one, whenever the machine stops; it follows no
symbolic link and uses no predictable temporary name, so it is safe in a folder from an untrusted source.
"""

import errno
import hashlib
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_TORCH_WRITE_FAULT = re.compile(r"inline_container\.cc:\d+\].*unexpected pos")  # a write failed or was cut short


def disk_fault(error: BaseException | None) -> str | None:
    """What is wrong with the disk if that caused an error, in the words of the system; otherwise None.

    Some libraries raise other errors, which only quote the number of the system's error. torch's zip writer does not
    quote it, and in an error that comes from another rank the original one is lost; the usual cause is a full disk.
    """
    is_torch_fault = False
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FAULTS:
            return os.strerror(error.errno)
        for number in DISK_FAULTS:
            if f"(os error {number})" in str(error):  # as Rust libraries such as safetensors write it
                return os.strerror(number)
        is_torch_fault |= _TORCH_WRITE_FAULT.search(str(error)) is not None
        error = error.__cause__ or error.__context__
    return os.strerror(errno.ENOSPC) if is_torch_fault else None


def write_file(path: Path, data: bytes) -> None:
    """Replace a file: write a new one under a random name, sync it, rename it, sync the folder."""
    try:
        _write_and_rename(path, data)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the temporary name
        raise
    sync(path.parent)


def _write_and_rename(path: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_umask())  # mkstemp gives access to the owner only
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
