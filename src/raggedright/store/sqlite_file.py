"""The connections of a process to a SQLite store's file, and SQLite's errors as sentences.

Invariants: one connection per thread and process, because SQLite's must not cross a fork; every read happens in one
snapshot; every write begins by taking the write lock, so it waits at most `busy_timeout`, and never half-way.

A file that is opened for reading only is not written, whatever its permissions. If its folder cannot be written either
and there is no log next to it, SQLite is told that the file does not change; whether that is true is checked after
every read.

Note: what was appended is durable, but may still be in `<file>-wal`. Copy a store after closing it, or with the shell's
`.backup`.
"""

import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raggedright.store.protocol import StoreError
from raggedright.store.sqlite_schema import PAGE_SIZE, SCHEMA, check_header, make_file

WAL_BYTES = 64 * 2**20  # the log is written back to the file whenever it has grown by this
OWN_BYTES = 2**18  # with less room than this, SQLite's own files do not fit, which it reports as other faults
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


class Database:
    """The connections of this process to one store's file."""

    def __init__(self, path: Path, run: str, busy_timeout: float, *, read_only: bool = False) -> None:
        self.path, self.busy_timeout, self.read_only = path, busy_timeout, read_only
        self._log = path.with_name(f"{path.name}-wal")
        self._resting: os.stat_result | None = None  # of a file that does not change
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._connections: dict[int, sqlite3.Connection] = {}
        self._closed = False
        with self.errors("open"):
            if not path.exists() and not read_only:
                make_file(path, run)
            check_header(path)
            can_write = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
            if not can_write and not read_only:
                raise StoreError(
                    f"{path}: cannot be written, or is on a read-only file system; open it with read_only, or copy it"
                )
            if read_only and not can_write and not self._has_log():
                self._resting = path.stat()
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
            self._check_resting()

    @contextmanager
    def write(self, what: str) -> Iterator[sqlite3.Connection]:
        """A connection whose changes are durable at the end of the block, or undone where it raises."""
        if self.read_only:
            raise StoreError(
                f"{self.path}: {what} failed: the store is open for reading only; open it without read_only"
            )
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
        """Write the log back to the file, unless others are reading, and close all connections of this process."""
        if not self._closed and self._process == os.getpid():
            with self._lock, suppress(sqlite3.Error):  # what was put is durable in the log, too
                for connection in () if self.read_only else self._connections.values():
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
        except UnicodeDecodeError as error:  # SQLite quotes what it cannot read
            raise StoreError(f"{self.path}: {what} failed: {_DAMAGED}") from error
        except (OverflowError, UnicodeEncodeError) as error:
            raise StoreError(f"{self.path}: {what} failed: a key or name cannot be stored ({error})") from error
        except OSError as error:
            raise StoreError(
                f"{self.path}: {what} failed: {error.strerror or error}; check the path and the disk"
            ) from error

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
            how = "mode=rw" if not self.read_only else "mode=ro" if self._resting is None else "immutable=1"
            connection = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?{how}",  # none of these makes the file
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

    def _check_resting(self) -> None:
        if self._resting is None:
            return
        now, then = self.path.stat(), self._resting
        if (now.st_mtime_ns, now.st_size, now.st_ino) != (
            then.st_mtime_ns,
            then.st_size,
            then.st_ino,
        ) or self._has_log():
            raise StoreError(
                f"{self.path}: another process writes it, on a file system that is read-only here; open the store again"
            )

    def _check_schema(self) -> None:
        found = self.connection().execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
        if {sql for (sql,) in found} != set(SCHEMA):
            raise StoreError(f"{self.path}: its tables are not a store's; the file was altered: use another path")
        # An altered index would hide sessions, which their digests cannot show. Their arrays are not looked at.
        (fault,) = self.connection().execute("PRAGMA integrity_check(log)").fetchone()
        if fault != "ok":
            raise StoreError(f"{self.path}: {' '.join(fault.split()):.100}: {_DAMAGED}")

    def _sentence(self, error: sqlite3.Error) -> str:
        code = getattr(error, "sqlite_errorcode", None)
        primary, said = (
            (code & 0xFF if code is not None else None),
            f"{error} ({getattr(error, 'sqlite_errorname', '')})",
        )
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return f"other processes kept the file locked for {self.busy_timeout:g} s; end them, or raise busy_timeout"
        free = shutil.disk_usage(self.path.parent).free
        looks_damaged = primary in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT)
        if primary == sqlite3.SQLITE_FULL or (looks_damaged and free < OWN_BYTES):
            return f"the disk is full, {free:,} bytes are free; make room, then run the same command again"
        if primary == sqlite3.SQLITE_READONLY:
            return "the file cannot be written; mount its file system for writing, or set the file's permissions"
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return f"{said}: {_DAMAGED}"
        if primary == sqlite3.SQLITE_CANTOPEN and self.read_only:
            return f"{said}: {self._log.name} next to it has what was appended last; copy both to another folder"
        if primary == sqlite3.SQLITE_CANTOPEN:
            return f"{said}: the file or {self._log.name} cannot be opened for writing; check their permissions"
        if primary == sqlite3.SQLITE_IOERR:
            return f"{said}: the disk reports an error; see the system's log, then open the store again"
        return f"{said}; open the store again"


_INHERITED: list[dict[int, sqlite3.Connection]] = []
