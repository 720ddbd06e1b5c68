"""The speed of the stores: append, read, list and drop of 360, 4k and 32k rows of about 57 KB, in sessions of eight.

    python benchmarks/bench_store.py [--quick] [--only sqlite,memory] [--folder DIR]

Sessions are appended one by one, as agents do, and rows are read 360 at a time in random order, as ranks do. Values are
made beforehand and released after reading, so 32k rows are not held in memory (except by the memory store). `bare` is
TransferQueue alone with the same eight rows per put, `bare-360` with 360. `sqlite-360` appends the sessions of 360 rows
in one transaction, as the trainer does with sessions that end together. Each size runs in its own process, after a few
sessions to warm up; a listing is the median of three. Memory is the proportional set size of the process and its
children; `trimmed` is after glibc has returned free memory to the system. `disk` is the speed of a plain file with the
same number of fsyncs.
"""

import argparse
import ctypes
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from bench_store_ray import BACKENDS as ON_RAY
from bench_store_ray import compare_side_by_side
from raggedright.store.session_store import Store
from store_rows import ROWS_PER_SESSION, row_bytes, session_of, session_rows

SIZES = (360, 4_000, 32_000)
ROWS_PER_READ = 360
COLUMNS = (
    "append rows/s",
    "MB/s",
    "read rows/s",
    "MB/s",
    "list s",
    "drop s",
    "memory MB",
    "full",
    "emptied",
    "trimmed",
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


# A backend is a function that opens an empty store, by its folder.
BACKENDS: dict[str, Open] = {"memory": open_memory, "sqlite": open_sqlite, "sqlite-360": open_sqlite, **ON_RAY}
SESSIONS_PER_APPEND = {"sqlite-360": 360 // ROWS_PER_SESSION}


def memory() -> float:
    """The proportional set size of this process and its children, in megabytes."""
    me = psutil.Process()
    return sum(process.memory_full_info().pss for process in [me, *me.children(recursive=True)]) / 1e6


def trimmed() -> float:
    """The same after the allocator has returned its free memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory()


def file_size(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def measure(name: str, num_rows: int, folder: Path) -> list[float]:
    """One backend at one size: the figures of COLUMNS."""
    block = SESSIONS_PER_APPEND.get(name, 1)
    sessions = [session_rows(i) for i in range(16)]
    num_sessions = num_rows // ROWS_PER_SESSION
    megabytes = sum(row_bytes(sessions[i % 16]) for i in range(num_sessions)) / 1e6
    with BACKENDS[name](folder) as store:

        def put(round: int, num_sessions: int) -> float:
            began = perf_counter()
            for first in range(0, num_sessions, block):
                some = range(first, min(first + block, num_sessions))
                store.append([session_of(sessions[i % 16], i, round) for i in some])
            getattr(store, "flush", lambda: None)()
            return perf_counter() - began

        put(0, 8)
        table = store.sessions(0)
        store.read(table.row_keys(np.arange(len(table.session_of_row))))
        store.drop(0)
        empty = trimmed()
        put_s = put(1, num_sessions)
        list_s, keys = [], []
        for _ in range(3):
            began = perf_counter()
            table = store.sessions(1)
            list_s.append(perf_counter() - began)
            keys = table.row_keys(np.arange(len(table.session_of_row)))
        random.Random(0).shuffle(keys)
        began = perf_counter()
        for i in range(0, len(keys), ROWS_PER_READ):
            store.read(keys[i : i + ROWS_PER_READ])
        get_s = perf_counter() - began
        full, size = memory(), file_size(folder)
        began = perf_counter()
        store.drop(1)
        delete_s = perf_counter() - began
        used = [empty, full, memory(), trimmed()]
        if size:
            put(2, num_sessions)
        again = file_size(folder)
    n = len(keys)
    rates = [n / put_s, megabytes / put_s, n / get_s, megabytes / get_s]
    return [*rates, median(list_s), delete_s, *used, size, again]


def measure_disk(num_rows: int, folder: Path) -> float:
    """Rows per second written to a plain file with one fsync per session: the current limit of the disk."""
    block = os.urandom(row_bytes(session_rows(0)))
    began = perf_counter()
    with (folder / "plain").open("wb") as file:
        for _ in range(num_rows // ROWS_PER_SESSION):
            file.write(block)
            file.flush()
            os.fdatasync(file.fileno())
    took = perf_counter() - began
    (folder / "plain").unlink()
    return num_rows // ROWS_PER_SESSION * ROWS_PER_SESSION / took


def run_one(name: str, num_rows: int, where: Path) -> list[float]:
    """Run a measurement in its own process."""
    command = [sys.executable, __file__, "--one", name, str(num_rows), "--folder", str(where)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [float(figure) for figure in done.stdout.split()]


def report(sizes: tuple[int, ...], names: list[str], where: Path) -> None:
    """Run all measurements, print the table and which goals are met."""
    figures_by_case: dict[tuple[str, int], list[float]] = {}
    table = Table("store", "rows", *COLUMNS, title="rows of ~57 KB, sessions of 8")
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=where) as folder:
            print(f"disk, {size:,} rows: {measure_disk(min(size, 4_000), Path(folder)):,.0f} rows/s", flush=True)
        for name in names:
            figures = figures_by_case[name, size] = run_one(name, size, where)
            print(f"{name}, {size:,} rows: append {figures[0]:,.0f}, read {figures[2]:,.0f} rows/s", flush=True)
            table.add_row(
                name, f"{size:,}", *(f"{x:,.3f}" if i in (4, 5) else f"{x:,.0f}" for i, x in enumerate(figures))
            )
    Console(width=170).print(table)
    for size in sizes:
        for ours, bare, rows in (("sqlite", "bare", ROWS_PER_SESSION), ("sqlite-360", "bare-360", 360)):
            if (ours, size) in figures_by_case and (bare, size) in figures_by_case:
                for column, what in ((0, f"put of {rows} rows a time"), (2, "get")):
                    ratio = figures_by_case[ours, size][column] / figures_by_case[bare, size][column]
                    goal(f"sqlite {what}, {size:,} in all, at least {bare}'s", ratio, "x", ratio >= 1)
    for name in ("sqlite", "transfer_queue"):
        if (name, SIZES[-1]) in figures_by_case:
            seconds = figures_by_case[name, SIZES[-1]][4]
            goal(f"{name} lists {SIZES[-1]:,} rows in under 0.2 s", seconds, "s", seconds < 0.2)
    if {"transfer_queue", "bare"} <= {*names}:
        for size, put, got in compare_side_by_side():
            goal(f"transfer_queue put at {size:,} rows takes at most 1.2 x bare, side by side", put, "x", put <= 1.2)
            goal(f"transfer_queue get at {size:,} rows takes at most 1.2 x bare, side by side", got, "x", got <= 1.2)


def goal(what: str, figure: float, unit: str, met: bool) -> None:
    print(f"goal {'met   ' if met else 'missed'}  {what}: {figure:.2f} {unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="360 and 4k rows only")
    parser.add_argument("--only", help="these backends, by commas")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where files are made")
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "ROWS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            print(*measure(args.one[0], int(args.one[1]), folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    report(SIZES[:2] if args.quick else SIZES, args.only.split(",") if args.only else [*BACKENDS], args.folder)


if __name__ == "__main__":
    main()
