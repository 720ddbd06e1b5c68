"""What a SQLite store's file is: its tables, how a new one is made, and how one is told from other files.

The file is a plain SQLite database that the `sqlite3` shell can query; SCHEMA is its documentation. It is made whole
under another name and linked into place, so that it never exists half-made and of many makers one wins. A file
that is not ours, or of another version, is told by its header before SQLite opens it, and stays untouched.
"""

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from raggedright.store.checks import MOST_ROWS
from raggedright.store.protocol import StoreError

APPLICATION_ID = 0x52476474  # "RGdt", at byte 68 of the file
FORMAT = 4  # the user_version, at byte 60
PAGE_SIZE = 16_384

SCHEMA = (
    # format; deleted_round: this round and those before it are gone, whatever rows of theirs are still here
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    # block, first: where its rows begin, if they share a block; apart: whether some of their fields are in table fields
    # rows: a JSON list with a list a row, see the view rows; fields: the lists of field names that its rows have
    """CREATE TABLE sessions (
  id INTEGER PRIMARY KEY,
  round INTEGER NOT NULL, prompt TEXT NOT NULL, session INTEGER NOT NULL, attempt INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'failed')),
  cause TEXT NOT NULL,
  score REAL,
  num_rows INTEGER NOT NULL,
  block INTEGER,
  first INTEGER,
  apart INTEGER NOT NULL,
  rows TEXT NOT NULL,
  fields TEXT NOT NULL,
  UNIQUE (round, prompt, session, attempt)
) STRICT""",
    f"""CREATE VIEW rows AS
  SELECT s.id * {MOST_ROWS} + r.key AS id, s.id AS session_id, r.key AS trajectory,
    json_extract(r.value, '$[0]') AS prompt_tokens, json_extract(r.value, '$[1]') AS response_tokens,
    json_extract(r.value, '$[2]') AS loss_tokens, json_extract(r.value, '$[3]') AS is_padding,
    json_extract(r.value, '$[4]') AS tags,
    json_extract(s.fields, '$[' || json_extract(r.value, '$[5]') || ']') AS fields
  FROM sessions s, json_each(s.rows) r""",
    """CREATE VIEW tags AS
  SELECT rows.id AS row_id, tag.key AS name, tag.value AS value FROM rows, json_each(rows.tags) AS tag""",
    # value: the rows of sessions of one round by field, as raggedright.store.blocks says
    "CREATE TABLE blocks (id INTEGER PRIMARY KEY, round INTEGER NOT NULL, value BLOB NOT NULL) STRICT",
    # of rows that are in no block; value: a dict of a row's fields, as raggedright.store.encoding says
    "CREATE TABLE row_values (row_id INTEGER PRIMARY KEY, value BLOB NOT NULL) STRICT",
    # fields that are not in their row's value, or replaced there: large ones, and those of an update
    """CREATE TABLE fields (
  row_id INTEGER NOT NULL, name TEXT NOT NULL, type TEXT NOT NULL, value BLOB NOT NULL,
  PRIMARY KEY (row_id, name)
) STRICT""",
    # the type that a field has in a round: torch.float32, numpy.int64, str ...
    """CREATE TABLE types (
  round INTEGER NOT NULL, name TEXT NOT NULL, type TEXT NOT NULL, PRIMARY KEY (round, name)
) STRICT, WITHOUT ROWID""",
)


def check_header(path: Path) -> None:
    """Refuse a file that is not a store's, or of another version; without touching it."""
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


def make(path: Path) -> None:
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
