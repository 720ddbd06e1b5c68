"""The file of a SQLite store: files that are not one, damaged ones, locked ones, and what the shell can ask it."""

import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import monotonic

import pytest
import torch

from raggedright.store.encoding import decode
from raggedright.store.protocol import StoreError
from raggedright.store.rows import prune
from raggedright.store.sqlite import SqliteStore
from raggedright.store.sqlite_schema import APPLICATION_ID, FORMAT
from store.values import VALUES, bare, key, row, same, tokens


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store with 20 sessions."""
    path = tmp_path / "rows.db"
    with SqliteStore(path) as store:
        for i in range(20):
            rows = [tokens(2_000, start=i, **VALUES)._replace(tags={"uid": "a", "turn": i}), tokens(5)]
            store.put(key("p", i), rows, score=i / 2)
    return path


def changed(path: Path, statement: str) -> bytes:
    """Run a statement on the file from outside; its bytes afterwards."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()
    return path.read_bytes()


def test_closing_leaves_one_file(path: Path) -> None:
    assert [found.name for found in path.parent.iterdir()] == ["rows.db"]


def test_a_store_can_be_opened_again(path: Path) -> None:
    with SqliteStore(str(path)) as store:
        assert [e.key for e in store.list()] == [key("p", i) for i in range(20)]
        (fields,) = store.get([row(key("p", 7))], ["input_ids", *VALUES])
        assert same(fields, {"input_ids": torch.arange(7, 2_008), **VALUES})


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"PRAGMA user_version = {FORMAT + 1}", f"format {FORMAT + 1}"),
        ("PRAGMA application_id = 5", "another program"),
        ("CREATE TABLE more (x)", "tables"),
        ("DROP VIEW tags", "tables"),
        ("CREATE TRIGGER t AFTER INSERT ON row_values BEGIN DELETE FROM row_values; END", "tables"),
    ],
)
def test_a_file_of_another_version_or_program_is_refused_and_stays_as_it_was(
    path: Path, statement: str, said: str
) -> None:
    before = changed(path, statement)
    with pytest.raises(StoreError, match=said):
        SqliteStore(path)
    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == ["rows.db"]


@pytest.mark.parametrize("content", [b"", b"hello", b"SQLite format 3\0", b"\0" * 5_000], ids=len)
def test_a_file_that_is_no_database_is_refused_and_stays_as_it_was(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.db").write_bytes(content)
    with pytest.raises(StoreError, match="no SQLite database"):
        SqliteStore(tmp_path / "rows.db")
    assert (tmp_path / "rows.db").read_bytes() == content


def test_paths_that_cannot_be_a_store_are_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a folder"):
        SqliteStore(tmp_path)
    with pytest.raises(StoreError, match="no folder"):
        SqliteStore(tmp_path / "no" / "rows.db")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/rows\.db"):
        SqliteStore(tmp_path / "file" / "rows.db")
    with pytest.raises(StoreError, match="open failed"):
        SqliteStore(tmp_path / ("x" * 300))
    with SqliteStore(tmp_path / "a ?mode=ro#%20ü'.db") as store:
        store.put(key(), [tokens(1)])


def read_all(path: Path) -> None:
    """All that is there is as it was put."""
    with SqliteStore(path, busy_timeout=1) as store:
        for entry in store.list():
            assert entry.key in [key("p", i) for i in range(20)]
            names = ["input_ids", *VALUES]
            (fields,) = store.get([row(entry.key)], names)
            assert same(fields, {"input_ids": torch.arange(entry.key.session, entry.key.session + 2_001), **VALUES})


def test_a_cut_file_is_an_error(path: Path) -> None:
    whole = path.read_bytes()
    for size in (50, 100, 4_096, 16_384, len(whole) // 2, len(whole) - 16_384):
        path.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"damaged|no SQLite database|tables|checksum|not there"):
            read_all(path)


def test_flipped_bytes_give_the_value_or_an_error(path: Path) -> None:
    whole, chance, refused = path.read_bytes(), random.Random(4), 0
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 30])):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(data))
        try:
            read_all(path)
        except StoreError:
            refused += 1
    assert refused > 20


@pytest.fixture
def locked(path: Path) -> Iterator[Path]:
    """A store whose write lock another process holds."""
    hold = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN IMMEDIATE'); print(1, flush=True); sys.stdin.read()"  # noqa: E501
    process = subprocess.Popen([sys.executable, "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield path
    process.communicate()


def test_a_locked_store_can_be_read_and_a_put_fails_in_bounded_time(locked: Path) -> None:
    with SqliteStore(locked, busy_timeout=0.5) as store:
        assert len(store.list()) == 20
        for use in (lambda: store.put(key("q"), [tokens(1)]), lambda: store.delete(0)):
            began = monotonic()
            with pytest.raises(StoreError, match=r"locked for 0\.5 s"):
                use()
            assert monotonic() - began < 5
        assert len(store.list()) == 20


def test_a_handle_works_in_threads_and_after_a_fork(path: Path) -> None:
    with SqliteStore(path) as store:
        thread = Thread(target=lambda: store.put(key("thread"), [tokens(1)]))
        thread.start()
        thread.join()
        child = os.fork()
        if child == 0:
            try:
                store.put(key("fork"), [tokens(1)])
                store.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        store.put(key("parent"), [tokens(1)])
        assert {e.key.prompt for e in store.list()} == {"p", "thread", "fork", "parent"}
    with SqliteStore(path) as store:
        assert len(store.list()) == 23


def test_a_store_is_read_while_another_process_writes_it_and_is_not_changed_by_that(path: Path) -> None:
    before = path.read_bytes()
    with SqliteStore(path, read_only=True) as reader:
        assert len(reader.list()) == 20
        uses = [
            lambda: reader.put(key("q"), [tokens(1)]),
            lambda: reader.update({row(key("p", 1)): {"x": 1}}),
            lambda: reader.delete(0),
        ]
        for use in uses:
            with pytest.raises(StoreError, match=r"rows\.db: .* failed: the store is open for reading only"):
                use()
    assert path.read_bytes() == before
    with SqliteStore(path) as writer, SqliteStore(path, read_only=True) as reader:
        writer.put(key("q"), [tokens(1)])
        assert [entry.key for entry in reader.wait(0, [("q", 0)], timeout=0)] == [key("q")]
        writer.put(key("r"), [tokens(2)])
        assert len(reader.list()) == 22
        reader.close()
        writer.put(key("s"), [tokens(2)])
    with SqliteStore(path) as store:
        assert len(store.list()) == 23


def test_a_missing_store_is_not_made_for_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"rows\.db: open failed: No such file"):
        SqliteStore(tmp_path / "rows.db", read_only=True)
    assert not [*tmp_path.iterdir()]


def test_deleted_rounds_leave_their_space_to_later_ones(tmp_path: Path) -> None:
    sizes = []
    with SqliteStore(tmp_path / "rows.db") as store:
        for round in range(6):
            for i in range(10):
                store.put(key("p", i, round=round), [bare(x=torch.zeros(100_000))])
            store.delete(round - 1)
            store._database.connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            sizes.append((tmp_path / "rows.db").stat().st_size)
    assert sizes[-1] <= 1.1 * sizes[1]


def test_rounds_leave_the_file_once_a_checkpoint_has_them_and_keep_rounds_have_passed(tmp_path: Path) -> None:
    """As a trainer does it: a durable checkpoint every second round, the last round before it is kept."""
    path, left = tmp_path / "rows.db", []
    for round in range(6):
        with SqliteStore(path) as store:  # each round after a restart
            store.put(key(round=round), [tokens(round + 1)])
            if round % 2:
                prune(store, durable_round=round, keep_rounds=1)
            left.append([entry.key.round for entry in store.list()])
    assert left == [[0], [1], [1, 2], [3], [3, 4], [5]]
    with SqliteStore(path, read_only=True) as store:
        (fields,) = store.get([row(key(round=5))], ["input_ids"])
        assert same(fields, {"input_ids": torch.arange(7)})
        with pytest.raises(StoreError, match=r"round 4.*deleted"):
            store.get([row(key(round=4))], ["input_ids"])


def test_a_delete_that_was_killed_half_way_hides_all_and_is_completed(path: Path) -> None:
    changed(path, "UPDATE meta SET value = 0 WHERE name = 'deleted_round'")
    with SqliteStore(path) as store:
        assert list(store.list()) == []
        with pytest.raises(StoreError, match="deleted"):
            store.get([row(key("p", 1))], ["input_ids"])
        store.delete(0)
    connection = sqlite3.connect(path)
    for table in ("sessions", "rows", "blocks", "row_values", "fields", "types"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    connection.close()


def test_the_shell_can_ask_it(path: Path) -> None:
    connection = sqlite3.connect(path)
    ask = lambda sql: connection.execute(sql).fetchall()  # noqa: E731
    assert ask("PRAGMA application_id") == [(APPLICATION_ID,)]
    assert ask("SELECT name, value FROM meta") == [("deleted_round", -1), ("format", FORMAT)]
    assert ask("SELECT avg(score), count(*) FROM sessions WHERE state = 'finished'") == [(4.75, 20)]
    assert ask("SELECT max(value) FROM tags WHERE name = 'turn'") == [(19,)]
    assert ask("SELECT sum(prompt_tokens + response_tokens) FROM rows WHERE NOT is_padding") == [(20 * (2_001 + 6),)]
    assert ask("SELECT type FROM types WHERE name = 'input_ids'") == [("torch.int64",)]
    whole = decode(
        ask("SELECT p.value FROM row_values p JOIN rows r ON r.id = p.row_id WHERE r.response_tokens = 5")[0][0]
    )
    assert isinstance(whole, dict)
    assert same(whole["input_ids"], torch.arange(6))
    assert "input_ids" in json.loads(ask("SELECT fields FROM rows LIMIT 1")[0][0])
    connection.close()


def test_the_stores_of_one_machine_need_no_ray() -> None:
    code = "import sys, raggedright.store.sqlite, raggedright.store.memory; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"ray", "transfer_queue", "tensordict"} & {name.partition(".")[0] for name in done.stdout.split()}
