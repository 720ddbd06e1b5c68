"""The file of a SQLite store: foreign, damaged and locked files, and queries from the sqlite3 shell."""

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import monotonic

import numpy as np
import pytest
from safetensors.numpy import load

from raggedright.sessions import Session
from raggedright.store.encoding import dropped_digest
from raggedright.store.session_store import StoreError, prune
from raggedright.store.sqlite import SqliteStore
from raggedright.store.sqlite_file import APPLICATION_ID, FORMAT, make_file
from store.values import VALUES, failed, finished, key, keys_in, row, same, tokens


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store with 20 sessions."""
    path = tmp_path / "rows.db"
    with SqliteStore(path) as store:
        for i in range(20):
            store.append([session_of(i)])
    return path


def session_of(i: int) -> Session:
    return finished(key("p", i), tokens(2_000, start=i, extra=VALUES), tokens(5), score=i / 2, turn=float(i))


def alter(path: Path, statement: str) -> bytes:
    """Run a statement on the file; returns its bytes afterwards."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()
    return path.read_bytes()


def test_closing_leaves_one_file(path: Path) -> None:
    assert [file.name for file in path.parent.iterdir()] == ["rows.db"]


def test_a_store_can_be_opened_again(path: Path) -> None:
    with SqliteStore(str(path)) as store:
        assert keys_in(store) == [key("p", i) for i in range(20)]
        assert same(store.read([row(key("p", 7))])[0], session_of(7).trajectories[0].fields)


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        (f"PRAGMA user_version = {FORMAT + 1}", f"format {FORMAT + 1}"),
        ("PRAGMA application_id = 5", "another program"),
        ("CREATE TABLE more (x)", "tables"),
        ("DROP VIEW rows", "tables"),
        ("CREATE TRIGGER t AFTER INSERT ON arrays BEGIN DELETE FROM arrays; END", "tables"),
    ],
)
def test_a_file_of_another_version_or_program_is_refused_and_not_changed(
    path: Path, statement: str, match: str
) -> None:
    before = alter(path, statement)
    with pytest.raises(StoreError, match=match):
        SqliteStore(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["rows.db"]


@pytest.mark.parametrize("content", [b"", b"hello", b"SQLite format 3\0", b"\0" * 5_000], ids=len)
def test_a_file_that_is_not_a_database_is_refused_and_not_changed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.db").write_bytes(content)
    with pytest.raises(StoreError, match="not a SQLite database"):
        SqliteStore(tmp_path / "rows.db")
    assert (tmp_path / "rows.db").read_bytes() == content


def test_invalid_paths_are_errors(tmp_path: Path) -> None:
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
        store.append([finished(key(), tokens(1))])


def read_all(path: Path) -> None:
    """Check that everything in the store is as it was appended."""
    with SqliteStore(path, run=None, busy_timeout=1) as store:
        table = store.sessions(0)
        for i in range(len(table)):
            session = session_of(int(table.session[i]))
            assert table.session_key(i) == session.key
            assert table.score[i] == session.score
            assert table.metrics["turn"][i] == session.metrics["turn"]
            for key_, trajectory in zip(
                table.row_keys(np.flatnonzero(table.session_of_row == i)), session.trajectories, strict=True
            ):
                assert same(store.read([key_])[0], trajectory.fields)


def test_a_truncated_file_is_an_error(path: Path) -> None:
    whole = path.read_bytes()
    for size in (50, 100, 4_096, 16_384, len(whole) // 2, len(whole) - 16_384):
        path.write_bytes(whole[:size])
        with pytest.raises(StoreError):
            read_all(path)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_never_give_a_wrong_value(path: Path, seed: int) -> None:
    """When only tensors had checksums, 16 of 500 flips gave wrong scores, counts, keys or states."""
    small = path.with_name("small.db")
    with SqliteStore(small) as store:
        store.append([*(finished(key("p", i), tokens(2, start=i), score=i / 2, turn=1.0 * i) for i in range(40))])
    rng, refused = random.Random(seed), 0
    for whole, target in ((path.read_bytes(), path), (small.read_bytes(), small)):
        for _ in range(60):
            data = bytearray(whole)
            for _ in range(rng.choice([1, 1, 30])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            target.write_bytes(bytes(data))
            try:
                read_all(target) if target == path else read_small(target)
            except StoreError:
                refused += 1
    assert refused > 40


def read_rounds(path: Path) -> None:
    read_all(path)
    with SqliteStore(path) as store:
        store.sessions(1)


def read_small(path: Path) -> None:
    with SqliteStore(path, busy_timeout=1) as store:
        table = store.sessions(0)
        for i in range(len(table)):
            number = int(table.session[i])
            assert table.session_key(i) == key("p", number)
            assert (table.score[i], table.metrics["turn"][i]) == (number / 2, number)
            assert same(store.read([row(key("p", number))])[0], tokens(2, start=number).fields)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE log SET session = session + 100 WHERE session = 3",
        "UPDATE log SET text = replace(text, '1.5', '9.5')",
        "UPDATE log SET prompt = 'q' WHERE session = 3",
        "UPDATE log SET round = 1 WHERE session = 3",
        "UPDATE log SET digest = zeroblob(16)",
        "UPDATE arrays SET value = (SELECT value FROM arrays LIMIT 1)",
        "UPDATE arrays SET id = -id",
        "UPDATE log SET id = -1 WHERE session = 3",
        "UPDATE meta SET value = 'other' WHERE name = 'run'",
        "DELETE FROM meta WHERE name = 'run'",
        "UPDATE meta SET value = 0 WHERE name = 'dropped_round'",
        "UPDATE meta SET value = '-1' WHERE name = 'dropped_round'",
        "UPDATE meta SET value = zeroblob(16) WHERE name = 'dropped_digest'",
        "DELETE FROM meta WHERE name = 'dropped_digest'",
        "DELETE FROM arrays",
    ],
)
def test_an_altered_file_is_an_error(path: Path, statement: str) -> None:
    alter(path, statement)
    with pytest.raises(StoreError):
        read_rounds(path)


@pytest.mark.parametrize("use", ["sessions", "rounds", "read", "append", "drop"])
def test_an_altered_watermark_hides_no_session_and_deletes_none(path: Path, use: str) -> None:
    alter(path, "UPDATE meta SET value = 1 WHERE name = 'dropped_round'")
    calls = {
        "sessions": lambda store: store.sessions(0),
        "rounds": lambda store: store.rounds(),
        "read": lambda store: store.read([row(key("p", 1))]),
        "append": lambda store: store.append([failed(key("new"))]),
        "drop": lambda store: store.drop(0),
    }
    with SqliteStore(path) as store, pytest.raises(StoreError, match=r"rows\.db: meta.dropped_round is 1 .*checksum"):
        calls[use](store)
    alter(path, "UPDATE meta SET value = -1 WHERE name = 'dropped_round'")
    read_all(path)
    with SqliteStore(path) as store:
        assert len(store.sessions(0)) == 20


def test_the_file_and_the_log_of_another_run_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="belongs to run"):
        SqliteStore(path, run="mine")
    other, mine = tmp_path / "other.db", tmp_path / "mine.db"
    stores = [SqliteStore(file, run=file.stem) for file in (other, mine)]
    for store in stores:
        store.append([finished(key("p", i), tokens(2)) for i in range(3)])
    log = other.with_name("other.db-wal").read_bytes()
    for store in stores:
        store.close()
    mine.with_name("mine.db-wal").write_bytes(log)
    with SqliteStore(mine, run="mine") as store, pytest.raises(StoreError, match="another run"):
        store.sessions(0)


@pytest.fixture
def locked(path: Path) -> Iterator[Path]:
    """A store with its write lock held by another process."""
    hold = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN IMMEDIATE'); print(1, flush=True); sys.stdin.read()"  # noqa: E501
    process = subprocess.Popen([sys.executable, "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield path
    process.communicate()


def test_a_locked_store_can_be_read_and_writes_fail_in_bounded_time(locked: Path) -> None:
    with SqliteStore(locked, busy_timeout=0.5) as store:
        assert len(store.sessions(0)) == 20
        for use in (lambda: store.append([failed(key("q"))]), lambda: store.drop(0)):
            start = monotonic()
            with pytest.raises(StoreError, match=r"locked for 0\.5 s"):
                use()
            assert monotonic() - start < 5
        assert len(store.sessions(0)) == 20


def test_a_handle_works_in_threads_and_after_a_fork(path: Path) -> None:
    with SqliteStore(path) as store:
        thread = Thread(target=lambda: store.append([failed(key("thread"))]))
        thread.start()
        thread.join()
        child = os.fork()
        if child == 0:
            try:
                store.append([failed(key("fork"))])
                store.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        store.append([failed(key("parent"))])
        assert {*store.sessions(0).prompt} == {"p", "thread", "fork", "parent"}
    with SqliteStore(path) as store:
        assert len(store.sessions(0)) == 23


def test_a_read_only_store_can_be_read_during_writes_and_is_not_changed(path: Path) -> None:
    before = path.read_bytes()
    with SqliteStore(path, read_only=True) as reader:
        assert len(reader.sessions(0)) == 20
        for use in (lambda: reader.append([failed(key("q"))]), lambda: reader.drop(0)):
            with pytest.raises(StoreError, match=r"rows\.db: .* failed: the store is open for reading only"):
                use()
    assert path.read_bytes() == before
    with SqliteStore(path) as writer, SqliteStore(path, read_only=True) as reader:
        writer.append([failed(key("q"))])
        assert reader.wait(0, [("q", 0)], timeout=0).session_key(0) == key("q")
        writer.append([failed(key("r"))])
        assert len(reader.sessions(0)) == 22
        reader.close()
        writer.append([failed(key("s"))])
    with SqliteStore(path) as store:
        assert len(store.sessions(0)) == 23


def test_a_missing_store_is_not_created_for_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"rows\.db: open failed: No such file"):
        SqliteStore(tmp_path / "rows.db", read_only=True)
    assert not [*tmp_path.iterdir()]


def test_later_rounds_use_the_space_of_dropped_ones(tmp_path: Path) -> None:
    sizes = []
    with SqliteStore(tmp_path / "rows.db") as store:
        for round in range(6):
            for i in range(10):
                store.append([finished(key("p", i, round=round), tokens(1, extra={"x": np.zeros(50_000)}))])
            store.drop(round - 1)
            store._database.connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            sizes.append((tmp_path / "rows.db").stat().st_size)
    assert sizes[-1] <= 1.1 * sizes[1]


def test_prune_drops_rounds_of_a_durable_checkpoint_except_the_last_keep_rounds(tmp_path: Path) -> None:
    """As in a trainer: a durable checkpoint every second round, and the round of the checkpoint is kept."""
    path, remaining = tmp_path / "rows.db", []
    for round in range(6):
        with SqliteStore(path) as store:  # each round after a restart
            store.append([finished(key(round=round), tokens(round + 1))])
            if round % 2:
                prune(store, durable_round=round, keep_rounds=1)
            remaining.append([*store.rounds()])
    assert remaining == [[0], [1], [1, 2], [3], [3, 4], [5]]
    with SqliteStore(path, read_only=True) as store:
        assert same(store.read([row(key(round=5))])[0], tokens(6).fields)
        with pytest.raises(StoreError, match=r"round 4.*dropped"):
            store.read([row(key(round=4))])


def test_an_interrupted_drop_hides_the_round_and_is_completed_by_the_next(path: Path) -> None:
    with SqliteStore(path) as store:
        digest = dropped_digest(store.run, 0).hex()
    alter(path, f"UPDATE meta SET value = iif(name = 'dropped_round', 0, x'{digest}') WHERE name LIKE 'dropped%'")
    with SqliteStore(path) as store:
        assert len(store.sessions(0)) == 0
        with pytest.raises(StoreError, match="dropped"):
            store.read([row(key("p", 1))])
        store.drop(0)
    connection = sqlite3.connect(path)
    for table in ("sessions", "rows", "log", "arrays"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    connection.close()


def test_the_file_can_be_queried_with_sql(path: Path) -> None:
    connection = sqlite3.connect(path)
    select = lambda sql: connection.execute(sql).fetchall()  # noqa: E731
    assert select("PRAGMA application_id") == [(APPLICATION_ID,)]
    assert select("SELECT value FROM meta WHERE name = 'dropped_round'") == [(-1,)]
    assert select("SELECT avg(score), count(*) FROM sessions WHERE state = 'finished'") == [(4.75, 20)]
    assert select("SELECT max(metrics ->> 'turn') FROM sessions") == [(19.0,)]
    assert select("SELECT sum(prompt_tokens + response_tokens) FROM rows WHERE role = 'agent'") == [(20 * (2_001 + 6),)]
    query = "SELECT value FROM arrays JOIN rows ON arrays_id = arrays.id WHERE response_tokens = 5"
    assert same(load(select(query)[0][0]), tokens(5).fields)
    connection.close()


def test_the_stores_of_one_machine_need_no_ray() -> None:
    code = "import sys, raggedright.store.sqlite, raggedright.store.memory; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"ray", "transfer_queue", "tensordict"} & {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("place", [0, 1])
def test_an_altered_key_in_the_table_or_its_index_is_an_error(tmp_path: Path, place: int) -> None:
    """An altered index could hide a session without an error."""
    path, prompt = tmp_path / "rows.db", b"a unique prompt"
    with SqliteStore(path) as store:
        store.append([finished(key(prompt.decode(), 0), tokens(2))])
        round = key("p", 0).round
    data = path.read_bytes()
    at = [i for i in range(len(data)) if data.startswith(prompt, i)][place]
    path.write_bytes(data[:at] + b"b" + data[at + 1 :])
    with pytest.raises(StoreError, match=r"rows.db"), SqliteStore(path) as store:
        store.sessions(round)


def test_a_file_system_without_links_has_stores_too_and_the_first_process_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vfat, for one, refuses a link with EPERM."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "rows.db"
    makers = [Thread(target=make_file, args=(path, f"run {i}")) for i in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    before = path.stat().st_ino, path.read_bytes()
    make_file(path, "a later run")
    assert (path.stat().st_ino, path.read_bytes()) == before
    assert [file.name for file in tmp_path.iterdir()] == ["rows.db"]
    with SqliteStore(tmp_path / "other.db") as store:
        store.append([session_of(0)])
