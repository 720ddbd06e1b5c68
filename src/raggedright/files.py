"""Files that a crash, a full disk or an untrusted folder cannot damage.

Invariants: `write_file` leaves either the old file or the complete new one, whenever the machine stops. Neither it nor
`open_to_append` follows a symbolic link, and temporary names are not predictable, so they are safe in a folder from an
untrusted source.
"""

import errno
import hashlib
import os
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from raggedright.errors import ConfigError

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


def open_to_append(path: Path) -> BinaryIO:
    """Open a regular file to append to, and make it if there is none."""
    check_kind(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "ab")


def check_kind(path: Path, *, folder: bool = False) -> None:
    """Refuse what has the name of a file of ours and is not a regular file, or with `folder` a folder."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
        kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
        kind, wanted = kinds.get(stat.S_IFMT(mode), "a special file"), "a folder" if folder else "a file"
        raise ConfigError(f"{path} is {kind}, and a run has {wanted} of that name; move it away, or give another --out")


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
