"""What a SQLite store's file is: its tables, how a new file is made, and how other files are recognised.

The file is a plain SQLite database that the `sqlite3` shell can query through the views `sessions` and `rows`. A new
file is made whole under another name and then linked into place, so that it never exists half-made, a full disk leaves
nothing behind, and one of several makers wins. A file that is not ours, or of another version, is recognised by its
header before SQLite opens it, and is not touched.
"""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from uuid import uuid4

from raggedright.files import sync
from raggedright.sessions import MOST_TRAJECTORIES, ROW_COLUMNS
from raggedright.store.protocol import StoreError

APPLICATION_ID = 0x52476474  # "RGdt", at byte 68 of the file
FORMAT = 5  # the user_version, at byte 60
PAGE_SIZE = 16_384
_ROW_COLUMNS = ", ".join(f"json_extract(r.value, '$[{i}]') AS {name}" for i, name in enumerate(ROW_COLUMNS))

SCHEMA = (
    # run: the id of the run that the sessions belong to; dropped_round: this round and those before it are gone
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
    log.id * {MOST_TRAJECTORIES} + r.key AS arrays_id
  FROM log, json_each(log.text, '$[3]') r""",
)


def check_header(path: Path) -> None:
    """Refuse a file that is not a store's, or of another version, without touching it."""
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
    made = path.with_name(f".{path.name}.{uuid4().hex}.new")
    try:
        with closing(sqlite3.connect(made, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.execute("BEGIN IMMEDIATE")
            for statement in SCHEMA:
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES ('run', ?), ('dropped_round', -1)", (run,))
            connection.execute("COMMIT")
        sync(made)
        with suppress(FileExistsError):
            os.link(made, path)
        sync(path.parent)
    finally:
        for name in (made, made.with_name(f"{made.name}-journal")):
            name.unlink(missing_ok=True)
