"""Files are replaced whole, in folders that nobody vouches for."""

import os
import stat
from pathlib import Path

import pytest

from raggedright import files
from raggedright.errors import ConfigError
from raggedright.files import check_kind, open_to_append, write_file


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


def test_appending_follows_no_symbolic_link_and_waits_for_no_pipe(tmp_path: Path):
    precious, link, pipe = tmp_path / "precious", tmp_path / "rank-1.log", tmp_path / "rank-2.log"
    precious.write_bytes(b"mine")
    link.symlink_to(precious)
    os.mkfifo(pipe)
    for path, kind in ((link, "a symbolic link"), (pipe, "a special file"), (tmp_path, "a folder")):
        with pytest.raises(ConfigError, match=rf"{path} is {kind}, and a run has a file"):
            open_to_append(path)
    assert precious.read_bytes() == b"mine"
    for line in (b"one", b"two"):
        with open_to_append(tmp_path / "rank-0.log") as log:
            log.write(line)
    assert (tmp_path / "rank-0.log").read_bytes() == b"onetwo"


def test_appending_follows_no_link_that_appears_after_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "stop").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(files, "check_kind", lambda path: None)
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(tmp_path / "stop")
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_to_a_folder_is_not_a_folder_of_a_run(tmp_path: Path):
    check_kind(tmp_path / "model", folder=True)  # there is none yet
    check_kind(tmp_path, folder=True)
    (tmp_path / "model").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="model is a symbolic link, and a run has a folder"):
        check_kind(tmp_path / "model", folder=True)
