"""The file of a SQLite store: its format, how it is made and recognised, connections to it, and SQLite's errors.

The file is a plain SQLite database that the `sqlite3` shell can query through the views `sessions` and `rows`. A new
file is made under another name and then linked into place, so it never exists half-made, a full disk leaves nothing
behind, and of several processes that make it one wins. A file of another program or version is recognised by its
header before SQLite opens it, and is not changed.

Invariants: one connection per thread and process, because SQLite connections must not cross a fork; every read happens
in one snapshot; every write begins by taking the write lock, so it waits at most `busy_timeout`, and never half-way.

A read-only store is never written, whatever its permissions. If its folder cannot be written either and there is no
log next to it, SQLite opens the file as immutable; after every read we check that it has not changed.

Note: what was appended is durable, but may still be in `<file>-wal`. Copy a store after closing it, or with the shell's
`.backup`.
"""

import errno
import fcntl
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from raggedright.files import sync
from raggedright.sessions import MAX_TRAJECTORIES, ROW_COLUMNS
from raggedright.store.encoding import dropped_digest
from raggedright.store.session_store import StoreError

APPLICATION_ID = 0x52476474  # "RGdt", at byte 68 of the file
FORMAT = 6  # the user_version, at byte 60
PAGE_SIZE = 16_384
WAL_BYTES = 64 * 2**20  # the log is written back to the file whenever it has grown by this much
MIN_FREE_BYTES = 2**18  # with less free space SQLite's temporary files do not fit, which it reports as other errors
_ROW_COLUMNS = ", ".join(f"json_extract(r.value, '$[{i}]') AS {name}" for i, name in enumerate(ROW_COLUMNS))

SCHEMA = (
    # run: the id of the run that the sessions belong to; dropped_round: this round and those before it were dropped;
    # dropped_digest: over both
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value ANY NOT NULL) STRICT, WITHOUT ROWID",
    # text and digest: as raggedright.store.encoding makes them
    """CREATE TABLE log (
  id INTEGER PRIMARY KEY,
  round INTEGER NOT NULL, prompt TEXT NOT NULL, session INTEGER NOT NULL, attempt INTEGER NOT NULL,
  text TEXT NOT NULL,
  digest BLOB NOT NULL,
  UNIQUE (round, prompt, session, attempt)
) STRICT""",
    # id: that of the session x 65,536 + the number of the trajectory; value: arrays in safetensors' format
    "CREATE TABLE arrays (id INTEGER PRIMARY KEY, value BLOB NOT NULL, digest BLOB NOT NULL) STRICT",
    """CREATE VIEW sessions AS
  SELECT id, round, prompt, session, attempt,
    iif(json_extract(text, '$[1]') = '', 'finished', 'failed') AS state, json_extract(text, '$[0]') AS score,
    json_extract(text, '$[1]') AS cause, json_array_length(text, '$[3]') AS num_rows,
    json_extract(text, '$[2]') AS metrics
  FROM log""",
    f"""CREATE VIEW rows AS
  SELECT log.round, log.prompt, log.session, log.attempt, r.key AS trajectory, {_ROW_COLUMNS},
    log.id * {MAX_TRAJECTORIES} + r.key AS arrays_id
  FROM log, json_each(log.text, '$[3]') r""",
)
_READING = ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON", "cache_size = -16384")
_WRITING = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "trusted_schema = OFF",
    "cell_size_check = ON",
    "cache_size = -16384",
    f"wal_autocheckpoint = {WAL_BYTES // PAGE_SIZE}",
    f"journal_size_limit = {WAL_BYTES}",
)
_DAMAGED = "the file is damaged; restore a copy, or move it away and run its rounds again"


def check_header(path: Path) -> None:
    """Refuse a file that is not a store, or of another version, without changing it."""
    if path.is_dir():
        raise StoreError(f"{path}: is a folder; a store is a file in it, such as {path / 'rows.db'}")
    if path.exists() and not path.is_file():
        raise StoreError(f"{path}: is not a regular file; use another path")
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or header[:16] != b"SQLite format 3\0":
        raise StoreError(f"{path}: has {path.stat().st_size:,} bytes and is not a SQLite database; use another path")
    application, version = int.from_bytes(header[68:72]), int.from_bytes(header[60:64])
    if application != APPLICATION_ID:
        raise StoreError(f"{path}: is a database of another program (application_id {application}); use another path")
    if version != FORMAT:
        raise StoreError(
            f"{path}: is in format {version} and this version of raggedright reads {FORMAT}; read it with the version "
            "that wrote it, or start again with --fresh"
        )


def make_file(path: Path, run: str) -> None:
    """Make an empty store under another name and link it into place, unless another process was first."""
    if not path.parent.is_dir():
        raise StoreError(f"{path}: there is no folder {path.parent}; make it first")
    new_path = path.with_name(f".{path.name}.{uuid4().hex}.new")
    try:
        with closing(sqlite3.connect(new_path, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.execute("BEGIN IMMEDIATE")
            for statement in SCHEMA:
                connection.execute(statement)
            meta = {"run": run, "dropped_round": -1, "dropped_digest": dropped_digest(run, -1)}
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            connection.execute("COMMIT")
        sync(new_path)
        with suppress(FileExistsError):
            _put_in_place(new_path, path)
        sync(path.parent)
    finally:
        for name in (new_path, new_path.with_name(f"{new_path.name}-journal")):
            name.unlink(missing_ok=True)


def _put_in_place(new_path: Path, path: Path) -> None:
    """Give a new file its name; a FileExistsError if another process was first.

    Some file systems, such as vfat, have no links. There the file is renamed, under a lock of its folder, because a
    rename would replace the file of another process.
    """
    try:
        os.link(new_path, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):
            raise
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                raise FileExistsError(path) from None
            os.rename(new_path, path)
        finally:
            os.close(descriptor)


class Database:
    """The connections of this process to the file of one store."""

    def __init__(self, path: Path, run: str, busy_timeout: float, *, read_only: bool = False) -> None:
        self.path, self.busy_timeout, self.read_only = path, busy_timeout, read_only
        self._log = path.with_name(f"{path.name}-wal")
        self._immutable_state: tuple[int, ...] | None = None  # of a file that is opened as immutable
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._connections: dict[int, sqlite3.Connection] = {}
        self._closed = False
        with self._errors("open"):
            if not path.exists() and not read_only:
                make_file(path, run)
            check_header(path)
            can_write = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
            if not can_write and not read_only:
                raise StoreError(
                    f"{path}: cannot be written, or is on a read-only file system; open it with read_only, or copy it"
                )
            if read_only and not can_write and not self._has_log():
                self._immutable_state = self._state()
            try:
                self._check_schema()
            except BaseException:
                self.close()
                raise

    @contextmanager
    def read(self, operation: str) -> Iterator[sqlite3.Connection]:
        """A connection that sees one snapshot."""
        with self._errors(operation), self._transaction("BEGIN") as connection:
            yield connection
            if self._immutable_state is not None and (self._state() != self._immutable_state or self._has_log()):
                raise StoreError(
                    f"{self.path}: another process writes it, on a file system that is read-only here; open the store "
                    "again"
                )

    @contextmanager
    def write(self, operation: str) -> Iterator[sqlite3.Connection]:
        """A connection whose changes are durable at the end of the block, or undone if it raises."""
        if self.read_only:
            raise StoreError(
                f"{self.path}: {operation} failed: the store is open for reading only; open it without read_only"
            )
        with self._errors(operation), self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    def connection(self) -> sqlite3.Connection:
        """The connection of this thread."""
        if self._closed:
            raise StoreError(f"{self.path}: the store is closed; open it again")
        if self._process != os.getpid():
            _INHERITED.append(self._connections)  # closing them here would break them in the parent
            self._process, self._connections, self._lock = os.getpid(), {}, threading.Lock()
        return self._connections.get(threading.get_ident()) or self._connect()

    def close(self) -> None:
        """Write the log back to the file, unless other processes are reading, and close all connections."""
        if not self._closed and self._process == os.getpid():
            with self._lock, suppress(sqlite3.Error):  # what was appended is durable in the log, too
                for connection in () if self.read_only else self._connections.values():
                    connection.execute("PRAGMA busy_timeout = 100")
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                    break
            for connection in self._connections.values():
                with suppress(sqlite3.Error):
                    connection.close()
        self._closed, self._connections = True, {}

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        connection = self.connection()
        connection.execute(begin)
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                with suppress(sqlite3.Error):  # the first error says more
                    connection.execute("ROLLBACK")
            raise

    def _connect(self) -> sqlite3.Connection:
        living = {thread.ident for thread in threading.enumerate()}
        with self._lock:
            for ident in self._connections.keys() - living:
                self._connections.pop(ident).close()
            mode = "mode=rw" if not self.read_only else "mode=ro" if self._immutable_state is None else "immutable=1"
            connection = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?{mode}",  # none of these modes creates the file
                uri=True,
                timeout=self.busy_timeout,
                isolation_level=None,
                check_same_thread=False,  # so that close() can close those of other threads
            )
            for pragma in _READING if self.read_only else _WRITING:
                connection.execute(f"PRAGMA {pragma}")
            self._connections[threading.get_ident()] = connection
        return connection

    def _has_log(self) -> bool:
        return self._log.exists() and self._log.stat().st_size > 0

    def _state(self) -> tuple[int, ...]:
        stat = self.path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _check_schema(self) -> None:
        statements = self.connection().execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
        if {sql for (sql,) in statements} != set(SCHEMA):
            raise StoreError(f"{self.path}: its tables are not a store's; the file was altered: use another path")
        # An altered index would hide sessions, which digests cannot detect. Arrays are not checked here.
        (fault,) = self.connection().execute("PRAGMA integrity_check(log)").fetchone()
        if fault != "ok":
            raise StoreError(f"{self.path}: {' '.join(fault.split()):.100}: {_DAMAGED}")

    @contextmanager
    def _errors(self, operation: str) -> Iterator[None]:
        """Raise errors of SQLite and of the file system as StoreErrors."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: {operation} failed: {self._explain(error)}") from error
        except UnicodeDecodeError as error:  # SQLite quotes text that it cannot read
            raise StoreError(f"{self.path}: {operation} failed: {_DAMAGED}") from error
        except (OverflowError, UnicodeEncodeError) as error:
            raise StoreError(f"{self.path}: {operation} failed: a key or name cannot be stored ({error})") from error
        except OSError as error:
            cause = error.strerror or error
            raise StoreError(f"{self.path}: {operation} failed: {cause}; check the path and the disk") from error

    def _explain(self, error: sqlite3.Error) -> str:
        """The cause of an error of SQLite, and its remedy."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the extended code
        message = f"{error} ({getattr(error, 'sqlite_errorname', '')})"
        free = shutil.disk_usage(self.path.parent).free
        is_locked = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        may_be_full = is_locked or code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT)
        if code == sqlite3.SQLITE_FULL or (may_be_full and free < MIN_FREE_BYTES):
            return f"the disk is full, {free:,} bytes are free; make room, then run the same command again"
        if is_locked:
            return f"other processes kept the file locked for {self.busy_timeout:g} s; end them, or raise busy_timeout"
        if code == sqlite3.SQLITE_READONLY:
            return "the file cannot be written; mount its file system for writing, or set the file's permissions"
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return f"{message}: {_DAMAGED}"
        if code == sqlite3.SQLITE_CANTOPEN and self.read_only:
            return f"{message}: {self._log.name} next to it has what was appended last; copy both to another folder"
        if code == sqlite3.SQLITE_CANTOPEN:
            return f"{message}: the file or {self._log.name} cannot be opened for writing; check their permissions"
        if code == sqlite3.SQLITE_IOERR:
            return f"{message}: the disk reports an error; see the system's log, then open the store again"
        return f"{message}; open the store again"


_INHERITED: list[dict[int, sqlite3.Connection]] = []  # connections of a parent process, kept open
