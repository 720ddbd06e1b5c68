"""A disk that is full and a file system that is read-only: real mounts, since root ignores permission bits."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raggedright.store.protocol import StoreError
from raggedright.store.sqlite import SqliteStore
from store.values import bare, key, row, same, tokens


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)


def fill(store: SqliteStore, size: int) -> int:
    """Put sessions until one is refused; how many were put."""
    for i in range(10_000):
        try:
            store.put(key("p", i), [bare(x=torch.full((size,), i, dtype=torch.uint8))])
        except StoreError as error:
            if "disk is full" in str(error) and f"session p/{i}" in str(error):
                return i
            raise
    raise AssertionError("the disk never was full")


@pytest.mark.parametrize("size", [3_000, 400_000, 3_000_000])
def test_a_full_disk_is_a_sentence_and_loses_nothing(mount: Callable[[int], Path], size: int) -> None:
    path = mount(12) / "rows.db"
    with SqliteStore(path) as store:
        count = fill(store, size)
        assert len(store.list()) == count
    with SqliteStore(path) as store:
        assert [entry.key for entry in store.list()] == [key("p", i) for i in range(count)]
        answer = store.get([row(key("p", i)) for i in range(count)], ["x"])
        assert same([f["x"] for f in answer], [torch.full((size,), i, dtype=torch.uint8) for i in range(count)])


def test_a_full_disk_takes_rows_again_once_rounds_are_deleted(mount: Callable[[int], Path]) -> None:
    disk = mount(26)
    (disk / "ballast").write_bytes(b"\0" * 16_000_000)
    with SqliteStore(disk / "rows.db") as store:
        count = fill(store, 400_000)
        (disk / "ballast").unlink()
        store.delete(0)
        for i in range(count // 2):
            store.put(key("q", i, round=1), [bare(x=torch.zeros(400_000, dtype=torch.uint8))])
        assert len(store.list()) == count // 2


def test_no_room_for_a_new_store_is_a_sentence_and_leaves_no_file(mount: Callable[[int], Path]) -> None:
    disk = mount(1)
    (disk / "ballast").write_bytes(b"\0" * (2**20 - 12_288))
    with pytest.raises(StoreError, match=r"rows.db: open failed"):
        SqliteStore(disk / "rows.db")
    assert [found.name for found in disk.iterdir()] == ["ballast"]


def test_a_read_only_file_system_is_a_sentence(mount: Callable[[int], Path]) -> None:
    disk = mount(8)
    with SqliteStore(disk / "rows.db") as store:
        store.put(key(), [tokens(3)])
    before = (disk / "rows.db").read_bytes()
    remount(disk, "ro")
    with pytest.raises(StoreError, match="read-only"):
        SqliteStore(disk / "rows.db")
    with pytest.raises(StoreError, match=r"[Rr]ead-only|unable to open"):
        SqliteStore(disk / "new.db")
    assert [found.name for found in disk.iterdir()] == ["rows.db"]
    remount(disk, "rw")
    assert (disk / "rows.db").read_bytes() == before
    with SqliteStore(disk / "rows.db") as store:
        assert len(store.list()) == 1


def test_a_read_only_file_system_can_be_read(mount: Callable[[int], Path]) -> None:
    disk = mount(8)
    with SqliteStore(disk / "rows.db") as store:
        store.put(key(), [tokens(3)])
    remount(disk, "ro")
    with SqliteStore(disk / "rows.db", read_only=True) as store:
        assert [entry.key for entry in store.list()] == [key()]
        assert same(list(store.get([row(key())], ["input_ids"])), [{"input_ids": torch.arange(4)}])
        with pytest.raises(StoreError, match="reading only"):
            store.put(key("q"), [tokens(1)])
        remount(disk, "rw")
        with SqliteStore(disk / "rows.db") as writer:
            writer.put(key("q"), [tokens(1)])
        with pytest.raises(StoreError, match=r"rows\.db: somebody writes it"):
            store.list()
    remount(disk, "ro")
    with SqliteStore(disk / "rows.db", read_only=True) as store:
        assert len(store.list()) == 2
    remount(disk, "rw")


def test_a_log_on_a_read_only_file_system_is_read_or_said(mount: Callable[[int], Path], tmp_path: Path) -> None:
    disk = mount(8)
    store = SqliteStore(tmp_path / "rows.db")
    store.put(key(), [tokens(3)])  # stands in the log, as after a crash
    for name in ("rows.db", "rows.db-wal", "rows.db-shm"):
        (disk / name).write_bytes((tmp_path / name).read_bytes())
    store.close()
    remount(disk, "ro")
    with SqliteStore(disk / "rows.db", read_only=True) as copy:
        assert [entry.key for entry in copy.list()] == [key()]
    remount(disk, "rw")
    (disk / "rows.db-shm").unlink()
    remount(disk, "ro")
    with pytest.raises(StoreError, match=r"rows\.db-wal beside it has what was put last; copy both"):
        SqliteStore(disk / "rows.db", read_only=True)
    remount(disk, "rw")
