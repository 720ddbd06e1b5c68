"""Files are replaced whole, in folders that nobody vouches for."""

import os
import stat
from pathlib import Path

import pytest

from raggedright import files
from raggedright.files import write_file


def test_a_file_is_the_old_one_or_the_new_one_however_the_write_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "config.toml"
    write_file(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [name.name for name in tmp_path.iterdir()] == ["config.toml"]
    write_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_the_data_is_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def replaced(source: str, target: Path) -> None:
        order.append("rename")
        replace(source, target)

    monkeypatch.setattr(files.os, "fsync", synced)
    monkeypatch.setattr(files.os, "replace", replaced)
    write_file(tmp_path / "report.html", b"page")
    assert order == ["file", "rename", "folder"]


def test_a_symbolic_link_is_replaced_and_not_followed(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    link = tmp_path / "report.html"
    link.symlink_to(precious)
    write_file(link, b"page")
    assert precious.read_bytes() == b"mine"
    assert not link.is_symlink()
    assert link.read_bytes() == b"page"


def test_a_new_file_has_the_permissions_that_the_umask_gives(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
