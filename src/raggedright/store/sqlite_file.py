"""The file of a SQLite store: its schema, how it is made and opened, its connections, and its errors as sentences.

The file is a plain SQLite database that the `sqlite3` shell can query; SCHEMA is its documentation. It is made whole
under another name and linked into place, so that it never exists half-made and of many makers one wins. A file
that is not ours, or of another version, is told by its header before SQLite opens it, and stays untouched.

Invariants: one connection a thread and process, since SQLite's must not cross a fork; every read happens in one
snapshot; every write begins by taking the write lock, so it waits at most `busy_timeout` and never half-way.

The surprise: put is durable once it returns, but may still stand in `<file>-wal`. Copy a store after closing it, or
with the shell's `.backup`.
"""

import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from raggedright.store.protocol import StoreError

APPLICATION_ID = 0x52476474  # "RGdt", at byte 68 of the file
FORMAT = 1  # the user_version, at byte 60
PAGE_SIZE = 16_384
WAL_BYTES = 64 * 2**20  # the log is written back to the file whenever it has grown by this

SCHEMA = (
    # format; deleted_round: this round and those before it are gone, whatever rows of theirs are still here
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    """CREATE TABLE sessions (
  id INTEGER PRIMARY KEY,
  round INTEGER NOT NULL, prompt TEXT NOT NULL, session INTEGER NOT NULL, attempt INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'failed')),
  cause TEXT NOT NULL,
  score REAL,
  UNIQUE (round, prompt, session, attempt)
) STRICT""",
    # tags: a JSON object; fields: a JSON list of the names in table fields
    """CREATE TABLE rows (
  id INTEGER PRIMARY KEY,
  session_id INTEGER NOT NULL REFERENCES sessions (id), trajectory INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL, response_tokens INTEGER NOT NULL, loss_tokens INTEGER NOT NULL,
  is_padding INTEGER NOT NULL CHECK (is_padding IN (0, 1)),
  tags TEXT NOT NULL, fields TEXT NOT NULL,
  UNIQUE (session_id, trajectory)
) STRICT""",
    # type: torch.float32, numpy.int64, str ...; value: as raggedright.store.encoding says
    """CREATE TABLE fields (
  row_id INTEGER NOT NULL REFERENCES rows (id), name TEXT NOT NULL, type TEXT NOT NULL, value BLOB NOT NULL,
  PRIMARY KEY (row_id, name)
) STRICT""",
    # the type that a field has in a round
    """CREATE TABLE types (
  round INTEGER NOT NULL, name TEXT NOT NULL, type TEXT NOT NULL, PRIMARY KEY (round, name)
) STRICT, WITHOUT ROWID""",
    """CREATE VIEW tags AS
  SELECT rows.id AS row_id, tag.key AS name, tag.value AS value FROM rows, json_each(rows.tags) AS tag""",
)


class Database:
    """The connections of this process to one store's file."""

    def __init__(self, path: Path, busy_timeout: float) -> None:
        self.path, self.busy_timeout = path, busy_timeout
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._connections: dict[int, sqlite3.Connection] = {}
        self._closed = False
        with self.errors("open"):
            if not path.exists():
                _make(path)
            check_header(path)
            try:
                self._check_schema()
            except BaseException:
                self.close()
                raise

    @contextmanager
    def read(self, what: str) -> Iterator[sqlite3.Connection]:
        """A connection that sees one snapshot."""
        with self.errors(what), self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def write(self, what: str) -> Iterator[sqlite3.Connection]:
        """A connection whose changes are durable at the end of the block, or undone where it raises."""
        with self.errors(what), self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    def connection(self) -> sqlite3.Connection:
        """This thread's connection."""
        if self._closed:
            raise StoreError(f"{self.path}: the store is closed; open it again")
        if self._process != os.getpid():
            _INHERITED.append(self._connections)  # closing them here would break them in the parent
            self._process, self._connections, self._lock = os.getpid(), {}, threading.Lock()
        mine = self._connections.get(threading.get_ident())
        return mine or self._connect()

    def close(self) -> None:
        """Write the log back to the file, where nobody else is reading, and close all connections of this process."""
        if not self._closed and self._process == os.getpid():
            with self._lock, suppress(sqlite3.Error):  # what was put is durable in the log, too
                for connection in self._connections.values():
                    connection.execute("PRAGMA busy_timeout = 100")
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                    break
            for connection in self._connections.values():
                with suppress(sqlite3.Error):
                    connection.close()
        self._closed, self._connections = True, {}

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """What SQLite and the file system say, as a StoreError."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: {what} failed: {self._sentence(error)}") from error
        except (OverflowError, UnicodeEncodeError) as error:
            raise StoreError(f"{self.path}: {what} failed: no key or name in a store is like that ({error})") from error
        except OSError as error:
            raise StoreError(f"{self.path}: {what} failed: {error.strerror or error}; mend the path or disk") from error

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
            connection = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode=rw",  # never makes the file
                uri=True,
                timeout=self.busy_timeout,
                isolation_level=None,
                check_same_thread=False,  # so that close() can close those of other threads
            )
            for pragma in (
                "synchronous = FULL",
                "trusted_schema = OFF",
                "cell_size_check = ON",
                "cache_size = -16384",
                f"wal_autocheckpoint = {WAL_BYTES // PAGE_SIZE}",
                f"journal_size_limit = {WAL_BYTES}",
            ):
                connection.execute(f"PRAGMA {pragma}")
            self._connections[threading.get_ident()] = connection
        return connection

    def _check_schema(self) -> None:
        found = self.connection().execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
        if {sql for (sql,) in found} != set(SCHEMA):
            raise StoreError(f"{self.path}: its tables are not a store's; the file was altered: use another path")

    def _sentence(self, error: sqlite3.Error) -> str:
        code = getattr(error, "sqlite_errorcode", None)
        primary, said = (
            (code & 0xFF if code is not None else None),
            f"{error} ({getattr(error, 'sqlite_errorname', '')})",
        )
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return f"others kept the file locked for {self.busy_timeout:g} s; end them, or raise busy_timeout"
        if primary == sqlite3.SQLITE_FULL:
            free = shutil.disk_usage(self.path.parent).free
            return f"the disk is full, {free:,} bytes are free; make room or delete rounds, then repeat it"
        if primary == sqlite3.SQLITE_READONLY:
            return "the file cannot be written; mount its file system for writing, or set the file's permissions"
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return f"{said}: the file is damaged; restore a copy, or move it away and run its rounds again"
        if primary == sqlite3.SQLITE_CANTOPEN:
            return f"{said}: the file, or {self.path.name}-wal beside it, cannot be opened for writing; see permissions"
        if primary == sqlite3.SQLITE_IOERR:
            return f"{said}: the disk reports an error; see the system's log, then open the store again"
        return f"{said}; open the store again"


_INHERITED: list[dict[int, sqlite3.Connection]] = []


def check_header(path: Path) -> None:
    """Refuse a file that is not a store's, or of another version, or cannot be written; without touching it."""
    if path.is_dir():
        raise StoreError(f"{path}: is a folder; a store is a file in it, such as {path / 'rows.db'}")
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or header[:16] != b"SQLite format 3\0":
        raise StoreError(f"{path}: has {path.stat().st_size:,} bytes and is no SQLite database; use another path")
    application, version = int.from_bytes(header[68:72]), int.from_bytes(header[60:64])
    if application != APPLICATION_ID:
        raise StoreError(f"{path}: is a database of another program (application_id {application}); use another path")
    if version != FORMAT:
        raise StoreError(
            f"{path}: is in format {version} and this version takes {FORMAT}; open it with its own version"
        )
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        raise StoreError(f"{path}: cannot be written, or is on a read-only file system; copy it, and open the copy")


def _make(path: Path) -> None:
    """Make an empty store under another name and link it into place, unless somebody else was first."""
    if not path.parent.is_dir():
        raise StoreError(f"{path}: there is no folder {path.parent}; make it first")
    made = path.with_name(f".{path.name}.{uuid4().hex}.new")
    try:
        connection = sqlite3.connect(made, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous = OFF")  # nobody knows the file yet; it is synced whole below
            connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("BEGIN IMMEDIATE")
            for statement in SCHEMA:
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES ('format', ?), ('deleted_round', -1)", (FORMAT,))
            connection.execute("COMMIT")
        finally:
            connection.close()  # the last one to close writes the log back
        _sync(made)
        with suppress(FileExistsError):
            os.link(made, path)
        _sync(path.parent)
    finally:
        for name in (made, *(made.with_name(made.name + end) for end in ("-wal", "-shm", "-journal"))):
            name.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Have a file, or a folder's names, on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
