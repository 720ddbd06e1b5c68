"""The stores' speed: put, get, list and delete of 360, 4k and 32k rows of about 57 KB, in sessions of eight.

    python benchmarks/bench_store.py [--quick] [--only sqlite,memory] [--folder DIR]

Rows are put session by session, as agents do, and got 360 at a time in random order, as ranks do; values are made
beforehand and dropped once read, so 32k rows pass through without being held (but by the memory store). Each size
runs in a process of its own, so that its memory is its own. `disk` is what a plain file takes with the same fsyncs.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from raggedright.store.protocol import Store
from store_rows import FIELDS, ROWS_A_SESSION, row_bytes, session_key, session_rows

SIZES = (360, 4_000, 32_000)
ROWS_A_GET = 360
COLUMNS = (
    "put rows/s",
    "MB/s",
    "get rows/s",
    "MB/s",
    "list s",
    "delete s",
    "RSS MB, full",
    "emptied",
    "file MB",
    "again",
)

Open = Callable[[Path], AbstractContextManager[Store]]


def open_memory(folder: Path) -> AbstractContextManager[Store]:
    from raggedright.store.memory import MemoryStore

    return MemoryStore()


def open_sqlite(folder: Path) -> AbstractContextManager[Store]:
    from raggedright.store.sqlite import SqliteStore

    return SqliteStore(folder / "rows.db")


# A backend is a function that opens an empty store, by its folder. Those of an optional module join by
# `BACKENDS: dict[str, Open]` in benchmarks/bench_store_ray.py, which may fail to import where Ray is not installed.
BACKENDS: dict[str, Open] = {"memory": open_memory, "sqlite": open_sqlite}


def load_optional() -> None:
    """Add the backends that need more than is installed everywhere, or say why not."""
    try:
        BACKENDS.update(import_module("bench_store_ray").BACKENDS)
    except ImportError as error:
        print(f"transfer_queue is left out: {error}", file=sys.stderr)


def rss() -> float:
    """Megabytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def file_size(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def measure(open_store: Open, num_rows: int, folder: Path) -> list[float]:
    """One backend at one size: the figures of COLUMNS."""
    sessions = [session_rows(i) for i in range(16)]
    num_sessions = num_rows // ROWS_A_SESSION
    megabytes = sum(row_bytes(sessions[i % 16]) for i in range(num_sessions)) / 1e6
    with open_store(folder) as store:

        def put(round: int) -> float:
            began = perf_counter()
            for i in range(num_sessions):
                store.put(session_key(i, round), sessions[i % 16], score=0.5)
            return perf_counter() - began

        put_s = put(0)
        began = perf_counter()
        keys = [row.key for entry in store.list(round=0) for row in entry.rows]
        list_s = perf_counter() - began
        random.Random(0).shuffle(keys)
        began = perf_counter()
        for i in range(0, len(keys), ROWS_A_GET):
            store.get(keys[i : i + ROWS_A_GET], FIELDS)
        get_s = perf_counter() - began
        full, size = rss(), file_size(folder)
        began = perf_counter()
        store.delete(0)
        delete_s = perf_counter() - began
        emptied = rss()
        put(1)
        again = file_size(folder)
    n = len(keys)
    return [n / put_s, megabytes / put_s, n / get_s, megabytes / get_s, list_s, delete_s, full, emptied, size, again]


def measure_disk(num_rows: int, folder: Path) -> float:
    """Rows a second that a plain file takes, one fsync a session: what the disk allows at this moment."""
    block = os.urandom(row_bytes(session_rows(0)))
    began = perf_counter()
    with (folder / "plain").open("wb") as file:
        for _ in range(num_rows // ROWS_A_SESSION):
            file.write(block)
            file.flush()
            os.fdatasync(file.fileno())
    took = perf_counter() - began
    (folder / "plain").unlink()
    return num_rows // ROWS_A_SESSION * ROWS_A_SESSION / took


def run_one(name: str, num_rows: int, where: Path) -> list[float]:
    """A measurement in a process of its own."""
    command = [sys.executable, __file__, "--one", name, str(num_rows), "--folder", str(where)]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [float(figure) for figure in told.stdout.split()]


def report(sizes: tuple[int, ...], names: list[str], where: Path) -> None:
    """Run all, print the table and how the goals fare."""
    found: dict[tuple[str, int], list[float]] = {}
    table = Table("store", "rows", *COLUMNS, title="rows of ~57 KB, sessions of 8")
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=where) as folder:
            print(f"disk, {size:,} rows: {measure_disk(min(size, 4_000), Path(folder)):,.0f} rows/s", flush=True)
        for name in names:
            figures = found[name, size] = run_one(name, size, where)
            table.add_row(
                name, f"{size:,}", *(f"{x:,.3f}" if i in (4, 5) else f"{x:,.0f}" for i, x in enumerate(figures))
            )
    Console(width=150).print(table)
    for (name, size), figures in found.items():
        if name == "sqlite" and size == SIZES[-1]:
            print(f"goal: sqlite lists {size:,} rows in under 0.2 s: {figures[4]:.3f} s")
        bare = found.get(("bare", size))
        if bare and name in ("sqlite", "transfer_queue"):
            least = 1.0 if name == "sqlite" else 1 / 1.2
            for column, what in ((0, "put"), (2, "get")):
                ratio = figures[column] / bare[column]
                print(f"goal: {name} {what} at {size:,} rows at least {least:.2f} x bare: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="360 and 4k rows only")
    parser.add_argument("--only", help="these backends, by commas")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where files are made")
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "ROWS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    load_optional()
    if args.one:
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            print(*measure(BACKENDS[args.one[0]], int(args.one[1]), folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    report(SIZES[:2] if args.quick else SIZES, args.only.split(",") if args.only else [*BACKENDS], args.folder)


if __name__ == "__main__":
    main()
