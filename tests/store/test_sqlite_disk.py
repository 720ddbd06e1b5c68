"""A full disk and a read-only file system: real mounts, because root ignores permission bits."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raggedright.store.session_store import StoreError
from raggedright.store.sqlite import SqliteStore
from store.values import finished, key, keys_in, row, same, tokens


def remount(disk: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=True)


def of_size(size: int, value: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.full(size, value, dtype=np.uint8)}


def fill(store: SqliteStore, size: int) -> int:
    """Append sessions until one is refused; returns how many were appended."""
    for i in range(10_000):
        try:
            store.append([finished(key("p", i), tokens(1, extra=of_size(size, i % 256)))])
        except StoreError as error:
            if "disk is full" in str(error) and f"session p/{i}" in str(error):
                return i
            raise
    raise AssertionError("the disk was never full")


@pytest.mark.parametrize("size", [3_000, 400_000, 3_000_000])
def test_a_full_disk_is_an_error_and_loses_nothing(mount: Callable[[int], Path], size: int) -> None:
    path = mount(12) / "rows.db"
    with SqliteStore(path) as store:
        count = fill(store, size)
        assert len(store.sessions(0)) == count
    with SqliteStore(path) as store:
        assert keys_in(store) == [key("p", i) for i in range(count)]
        rows = store.read([row(key("p", i)) for i in range(count)], ["x"])
        assert all(same(fields, of_size(size, i % 256)) for i, fields in enumerate(rows))


def test_a_full_disk_can_be_used_again_once_rounds_are_dropped(mount: Callable[[int], Path]) -> None:
    disk = mount(26)
    (disk / "ballast").write_bytes(b"\0" * 16_000_000)
    with SqliteStore(disk / "rows.db") as store:
        count = fill(store, 400_000)
        (disk / "ballast").unlink()
        store.drop(0)
        for i in range(count // 2):
            store.append([finished(key("q", i, round=1), tokens(1, extra=of_size(400_000)))])
        assert len(store.sessions(1)) == count // 2


def test_too_little_space_for_a_new_store_is_an_error_and_leaves_no_file(mount: Callable[[int], Path]) -> None:
    """Once there is space, the same path works."""
    disk = mount(1)
    for free in (4_096, 12_288, 20_480, 32_768, 49_152, 65_536, 81_920, 98_304, 114_688, 131_072):
        (disk / "ballast").write_bytes(b"\0" * (2**20 - free))
        names, cause = ["ballast"], "rows.db: open failed"
        try:
            SqliteStore(disk / "rows.db").close()
        except StoreError as error:
            names, cause = sorted(file.name for file in disk.iterdir()), str(error)
        assert (names, "rows.db: open failed" in cause) == (["ballast"], True)
        (disk / "ballast").unlink()
        with SqliteStore(disk / "rows.db") as store:
            store.append([finished(key(), tokens(1))])
        for file in disk.iterdir():
            file.unlink()


def test_writing_to_a_read_only_file_system_is_an_error(mount: Callable[[int], Path]) -> None:
    disk = mount(8)
    with SqliteStore(disk / "rows.db") as store:
        store.append([finished(key(), tokens(3))])
    before = (disk / "rows.db").read_bytes()
    remount(disk, "ro")
    with pytest.raises(StoreError, match="read-only"):
        SqliteStore(disk / "rows.db")
    with pytest.raises(StoreError, match=r"[Rr]ead-only|unable to open"):
        SqliteStore(disk / "new.db")
    assert [file.name for file in disk.iterdir()] == ["rows.db"]
    remount(disk, "rw")
    assert (disk / "rows.db").read_bytes() == before
    with SqliteStore(disk / "rows.db") as store:
        assert len(store.sessions(0)) == 1


def test_a_read_only_file_system_can_be_read(mount: Callable[[int], Path]) -> None:
    disk = mount(8)
    with SqliteStore(disk / "rows.db") as store:
        store.append([finished(key(), tokens(3))])
    remount(disk, "ro")
    with SqliteStore(disk / "rows.db", read_only=True) as store:
        assert keys_in(store) == [key()]
        assert same(store.read([row(key())])[0], tokens(3).fields)
        with pytest.raises(StoreError, match="reading only"):
            store.append([finished(key("q"), tokens(1))])
        remount(disk, "rw")
        with SqliteStore(disk / "rows.db") as writer:
            writer.append([finished(key("q"), tokens(1))])
        with pytest.raises(StoreError, match=r"rows\.db: another process writes it"):
            store.sessions(0)
    remount(disk, "ro")
    with SqliteStore(disk / "rows.db", read_only=True) as store:
        assert len(store.sessions(0)) == 2
    remount(disk, "rw")


def test_a_log_on_a_read_only_file_system_is_read_or_reported(mount: Callable[[int], Path], tmp_path: Path) -> None:
    disk = mount(8)
    store = SqliteStore(tmp_path / "rows.db")
    store.append([finished(key(), tokens(3))])  # still in the log, as after a crash
    for name in ("rows.db", "rows.db-wal", "rows.db-shm"):
        (disk / name).write_bytes((tmp_path / name).read_bytes())
    store.close()
    remount(disk, "ro")
    with SqliteStore(disk / "rows.db", read_only=True) as copy:
        assert keys_in(copy) == [key()]
    remount(disk, "rw")
    (disk / "rows.db-shm").unlink()
    remount(disk, "ro")
    with pytest.raises(StoreError, match=r"rows\.db-wal next to it has what was appended last"):
        SqliteStore(disk / "rows.db", read_only=True)
    remount(disk, "rw")
