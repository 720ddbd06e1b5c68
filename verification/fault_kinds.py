"""The kinds of faults. A function tries one case: it returns if the case was survived and raises a `Fault` otherwise.

What a case does follows from its number and from draws of its own seed, so that a case can be tried again.
"""

import json
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import psutil

from fault_agents import MISBEHAVING
from fault_runs import (
    READ_SECONDS,
    ROUNDS,
    Case,
    Command,
    CutDisk,
    LostError,
    UnclearError,
    WrongError,
    check_finished,
    check_refused,
    check_weights,
    flip_bit,
    memory_disk,
    misbehaving,
    mount,
    newest_checkpoint,
    num_rounds,
    waiting,
)
from raggedright.errors import RaggedRightError
from raggedright.store.sqlite import SqliteStore

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
FULL = ("No space left on device", "the disk is full")
SLOW_AGENTS = {
    "hangs", "hangs_in_a_thread", "swallows_its_cancellation", "loops_without_end", "sleeps_in_the_loop",
    "returns_a_number_that_sleeps", "raises_text_that_sleeps",
}  # fmt: skip
ZOO = [name for name in MISBEHAVING if name != "ends_the_process"]
PLAN = ("--dp", "2", "--batch-size", "4", "--mini-batch-size", "2", "--rollout-n", "4")
ESCAPES = "\x1b]0;owned\x07\x1b[31m\u202e\x00\x9b2J"


@dataclass(frozen=True)
class Kind:
    """A kind of fault and how many cases of it are tried."""

    group: str
    name: str
    cases: int
    attempt: Callable[[Case], None]


KINDS: list[Kind] = []


def kind(group: str, name: str, cases: int) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Add a kind."""

    def add(attempt: Callable[[Case], None]) -> Callable[[Case], None]:
        KINDS.append(Kind(group, name, cases, attempt))
        return attempt

    return add


# Kills


@kind("kills", "kill -9 of a run with one rank, twice", 6)
def _kill_one(case: Case) -> None:
    for kill in range(2):
        command = case.start(environment={"PACE": f"{case.chance.uniform(0, 0.2)}"})
        if _wait_for_moment(case, command, first_round=kill):
            _kill_and_check(case, command, [command.pid])
    case.finish()


@kind("kills", "kill -9 of one of two ranks", 2)
def _kill_rank(case: Case) -> None:
    command = case.start("--parallel.dp", "2", environment={"PACE": "0.3"})
    if command.wait_for(lambda: num_rounds(case.run) > 0):
        time.sleep(case.chance.uniform(0, 0.5))
        rank = case.number % 2
        with suppress(ProcessLookupError):
            os.kill(command.ranks()[rank], signal.SIGKILL)
        check_refused(command.end(), f"rank {rank} was killed by SIGKILL")
    case.finish("--parallel.dp", "2" if case.number % 2 else "1")


@kind("kills", "kill -9 of a rank, with max_restarts", 1)
def _restart_rank(case: Case) -> None:
    command = case.start("--parallel.dp", "2", "--max-restarts", "1", environment={"PACE": "0.3"})
    if command.wait_for(lambda: num_rounds(case.run) > 0):
        os.kill(case.chance.choice(command.ranks()), signal.SIGKILL)
    ended = command.end()
    if ended.code:
        raise LostError(f"the run did not go on: {ended.last}")
    check_finished(case.run, case.shared.undisturbed)


@kind("kills", "kill -9 of the launcher of two ranks", 2)
def _kill_launcher(case: Case) -> None:
    command = case.start("--parallel.dp", "2", environment={"PACE": "0.3"})
    if command.wait_for(lambda: num_rounds(case.run) > case.number % 2):
        ranks = command.ranks()
        _kill_and_check(case, command, [command.pid])
        deadline = time.monotonic() + 30
        while any(psutil.pid_exists(rank) for rank in ranks):
            if time.monotonic() > deadline:
                raise UnclearError("ranks outlive their launcher")
            time.sleep(0.05)
    case.finish()


@kind("kills", "kill -9 between checkpoints, another dp", 2)
def _kill_and_change(case: Case) -> None:
    for dp in case.chance.sample((1, 2, 1), 2):
        command = case.start("--parallel.dp", str(dp), "--checkpoint.every", "2", environment={"PACE": "0.2"})
        target = min(num_rounds(case.run) + 1, ROUNDS - 1)
        if command.wait_for(lambda target=target: num_rounds(case.run) >= target):
            time.sleep(case.chance.uniform(0, 0.5))
            _kill_and_check(case, command, [command.pid, *command.ranks()])
    case.finish("--checkpoint.every", "2")


def _wait_for_moment(case: Case, command: Command, first_round: int) -> bool:
    """Wait for a moment of the run that the case's number chooses: its start, a round, a checkpoint, the export."""
    run = case.run
    match (case.number + first_round) % 4:
        case 0:
            reached = command.wait_for((run / "config.toml").exists)
        case 1:
            reached = command.wait_for(lambda: num_rounds(run) > first_round)
        case 2:
            reached = command.wait_for((run / "checkpoints" / ".new").exists)
        case _:
            reached = command.wait_for((run / "model.new").exists)
    time.sleep(case.chance.uniform(0, 0.3) if case.number % 2 else 0)
    return reached


def _kill_and_check(case: Case, command: Command, processes: list[int]) -> None:
    """Kill, and check that no checkpoint is gone."""
    before = newest_checkpoint(case.run)
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.join(READ_SECONDS)
    if before is not None and not before.exists() and newest_checkpoint(case.run) is None:
        raise LostError(f"{before} is gone")


# Signals


@kind("signals", "SIGTERM, SIGHUP, Ctrl-C, dp 1 and 2", 6)
def _end_by_signal(case: Case) -> None:
    options = ("--parallel.dp", str(1 + case.number // len(SIGNALS) % 2))
    command = case.start(*options, environment=waiting(case.folder / "waiting", round=3))
    command.wait_for((case.folder / "waiting").exists)
    command.signal(SIGNALS[case.number % len(SIGNALS)])
    ended = command.end()
    if ended.code != 130 or "interrupted after 2 rounds" not in ended.out:
        raise UnclearError(f"exit code {ended.code}: {ended.out[-300:]} {ended.last}")
    if newest_checkpoint(case.run) != case.run / "checkpoints" / "round-000002":
        raise LostError("there is no checkpoint of the round before")
    if not (case.run / "report.html").exists():
        raise LostError("there is no report")
    case.finish()


# Disks


@kind("disks", "a full disk, then room", 10)
def _full_disk(case: Case) -> None:
    _fill_disk(case, "1", kilobytes=(0, 8, 40, 100, 160, 250, 400, 600)[case.number % 8] + case.number // 8 * 37)


@kind("disks", "a full disk with two ranks, then room", 1)
def _full_disk_ranks(case: Case) -> None:
    _fill_disk(case, "2", kilobytes=200 + 97 * case.number)


def _fill_disk(case: Case, dp: str, *, kilobytes: int) -> None:
    with memory_disk(case.folder, 8) as disk:
        ballast, run = disk / "ballast", disk / "run"
        ballast.write_bytes(b"\0" * ((8 << 20) - 4096 - 1024 * kilobytes))
        ended = case.train("--parallel.dp", dp, out=run)
        if ended.code:
            check_refused(ended, *FULL)
            if "make room" not in ended.last:
                raise UnclearError(f"no remedy in {ended.last!r}")
        ballast.unlink()
        case.finish("--parallel.dp", dp, out=run)


@kind("disks", "a read-only disk, then a writable one", 1)
def _read_only(case: Case) -> None:
    with memory_disk(case.folder, 16) as disk:
        run = disk / "run"
        shutil.copytree(case.shared.stopped, run)
        mount("-o", "remount,ro", disk)
        check_refused(case.train(out=run), "Read-only file system")
        mount("-o", "remount,rw", disk)
        case.finish(out=run)


@kind("disks", "a power cut that loses unsynced data", 4)
def _power_cut(case: Case) -> None:
    disk = CutDisk(case.folder)
    try:
        run = disk.path / "run"
        command = case.start(out=run, environment={"PACE": f"{case.chance.uniform(0, 0.2)}"})
        if command.wait_for(lambda: num_rounds(run) >= case.number % ROUNDS or (run / "model").exists()):
            time.sleep(case.chance.uniform(0, 0.5))
        kept = newest_checkpoint(run)
        disk.cut_power()
        if command.is_running:
            check_refused(command.end(), "Input/output error", "disk I/O error")
        command.end()
        disk.unmount()
        disk.mount()
        if kept is not None and not newest_checkpoint(run):
            raise LostError(f"{kept.name} was lost")
        case.finish(out=run)
    finally:
        disk.unmount()


# Damaged files


def _resume_damaged(case: Case, words: tuple[str, ...], repair: Callable[[], object]) -> None:
    """Resume: with the right numbers, or refused with the file's name; then as the message advises."""
    ended = case.train()
    if ended.code == 0:
        check_finished(case.run, case.shared.undisturbed)
        return
    check_refused(ended, *words)
    repair()
    case.finish()


def _copy(case: Case) -> None:
    shutil.copytree(case.shared.stopped, case.run)


def _spoil(path: Path, case: Case, way: int) -> None:
    """Empty, zeros, half, an altered bit, garbage: the five ways."""
    data = path.read_bytes()
    match way % 5:
        case 0:
            path.write_bytes(b"")
        case 1:
            path.write_bytes(b"\0" * len(data))
        case 2:
            path.write_bytes(data[: case.chance.randrange(len(data))])
        case 3:
            flip_bit(path, case.chance)
        case _:
            path.write_bytes(case.chance.randbytes(len(data)))


@kind("damaged files", "config.toml", 5)
def _config_file(case: Case) -> None:
    _copy(case)
    _spoil(case.run / "config.toml", case, case.number)
    _resume_damaged(
        case,
        ("config", "a run with other settings"),
        lambda: shutil.copy(case.shared.stopped / "config.toml", case.run),
    )


@kind("damaged files", "events.jsonl", 10)
def _events_file(case: Case) -> None:
    """Rounds that are gone from the record are said to be; the weights do not depend on it."""
    _copy(case)
    _spoil(case.run / "events.jsonl", case, case.number)
    ended = case.train()
    if ended.code:
        check_refused(ended, "events.jsonl")
        shutil.copy(case.shared.stopped / "events.jsonl", case.run)
        case.finish()
    elif "events.jsonl has" in ended.out + ended.err:
        check_weights(case.run, case.shared.undisturbed)
    else:
        check_finished(case.run, case.shared.undisturbed)


@kind("damaged files", "state.json of a checkpoint", 9)
def _state_file(case: Case) -> None:
    _copy(case)
    newest = newest_checkpoint(case.run)
    assert newest is not None
    texts = (b"[" * 200_000, b"[]", b'{"round": "six"}', b'{"round": 2, "optimizer_steps": {"actor": 1e999}}')
    if (way := case.number % 9) < len(texts):
        (newest / "state.json").write_bytes(texts[way])
    else:
        _spoil(newest / "state.json", case, way)
    _resume_damaged(case, ("state.json",), lambda: shutil.rmtree(newest))


@kind("damaged files", "an altered bit in state.json", 12)
def _state_bit(case: Case) -> None:
    _copy(case)
    newest = newest_checkpoint(case.run)
    assert newest is not None
    flip_bit(newest / "state.json", case.chance)
    _resume_damaged(case, ("state.json", newest.name), lambda: shutil.rmtree(newest))


@kind("damaged files", "an altered bit in weights and optimizer", 8)
def _checkpoint_file(case: Case) -> None:
    _copy(case)
    newest = newest_checkpoint(case.run)
    assert newest is not None
    name = case.chance.choice(("__0_0.distcp", ".metadata"))
    flip_bit(newest / name, case.chance)
    _resume_damaged(case, (name,), lambda: shutil.rmtree(newest))


@kind("damaged files", "an altered bit in rows.db, resumed", 8)
def _rows_file(case: Case) -> None:
    _copy(case)
    flip_bit(case.run / "rows.db", case.chance)
    _resume_damaged(case, ("rows.db", "was altered"), lambda: _remove_rows(case))


@kind("damaged files", "an altered bit in the last dropped round", 4)
def _dropped_round(case: Case) -> None:
    """A later round there hides sessions that nobody dropped."""
    _copy(case)
    bit = 1 << case.number % 4
    with closing(sqlite3.connect(case.run / "rows.db", isolation_level=None)) as connection:
        change = "UPDATE meta SET value = (value | ?1) - (value & ?1) WHERE name = 'dropped_round'"
        connection.execute(change, (bit,))
    _resume_damaged(case, ("meta.dropped_round",), lambda: _remove_rows(case))


@kind("damaged files", "damaged write-ahead log: sessions run again", 4)
def _log_file(case: Case) -> None:
    """SQLite ignores what follows the damage: those sessions are gone, and run again with the same seeds."""
    every = ("1", str(ROUNDS))[case.number % 2]
    command = case.start("--checkpoint.every", every, environment=waiting(case.folder / "waiting", round=3))
    command.wait_for((case.folder / "waiting").exists)
    time.sleep(2)  # for the sessions that do not wait to be recorded
    _kill_and_check(case, command, [command.pid])
    flip_bit(case.run / "rows.db-wal", case.chance)
    case.finish("--checkpoint.every", every)


@kind("damaged files", "run_id", 6)
def _id_file(case: Case) -> None:
    _copy(case)
    if case.number % 6 == 5:
        (case.run / "run_id").unlink()
    else:
        _spoil(case.run / "run_id", case, case.number % 6)
    _resume_damaged(case, ("run_id", "belongs to run"), lambda: _remove_rows(case, "run_id"))


@kind("damaged files", "rows.db of another run", 2)
def _other_rows(case: Case) -> None:
    _copy(case)
    _remove_rows(case)
    shutil.copy(case.shared.failed / "rows.db", case.run)
    _resume_damaged(case, ("belongs to run",), lambda: _remove_rows(case))


@kind("damaged files", "an altered bit in rows.db, read back", 200)
def _read_altered(case: Case) -> None:
    """What is read is what was recorded, or an error that names it."""
    file = case.folder / "rows.db"
    shutil.copy(case.shared.stopped / "rows.db", file)
    expected = _contents(file)
    flip_bit(file, case.chance)
    try:
        found = _contents(file)
    except RaggedRightError as error:
        if "rows.db" not in str(error) and "round" not in str(error):
            raise UnclearError(str(error)) from None
        return
    if expected.keys() - found.keys():
        raise LostError(f"{expected.keys() - found.keys()} are gone")
    if found != expected:
        raise WrongError(f"{[key for key in found if found[key] != expected.get(key)]} are not what was recorded")


def _contents(file: Path) -> dict[str, str]:
    """All that a store has, by key."""
    contents = {}
    with SqliteStore(file) as store:
        for table in (store.sessions(round) for round in range(ROUNDS + 1)):
            for i in range(len(table)):
                session = table.take(np.array([i]))
                contents[str(table.session_key(i))] = repr(
                    [_plain(getattr(session, each.name)) for each in fields(session)]
                )
                keys = session.row_keys(np.arange(len(session.rows)))
                for key, row in zip(keys, store.read(keys), strict=True):
                    contents[str(key)] = repr(sorted((name, value.tolist()) for name, value in row.items()))
    return contents


def _plain(value: object) -> object:
    """Arrays as lists, also in a mapping, so that texts of them can be compared."""
    if isinstance(value, Mapping):
        return {name: _plain(inside) for name, inside in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _remove_rows(case: Case, *others: str) -> None:
    for name in ("rows.db", "rows.db-wal", "rows.db-shm", *others):
        (case.run / name).unlink(missing_ok=True)


# Hostile inputs


@kind("hostile inputs", "report: altered events", 60)
def _report_altered(case: Case) -> None:
    lines = (case.shared.stopped / "events.jsonl").read_bytes().splitlines(keepends=True)
    place = case.chance.randrange(len(lines))
    lines[place] = _altered(lines[place], case)
    _report(case, b"".join(lines))


@kind("hostile inputs", "report: links, FIFOs, deep, long lines", 9)
def _report_strange(case: Case) -> None:
    folder, events = case.run, case.shared.stopped / "events.jsonl"
    precious = case.folder / "precious"
    precious.write_text("mine")
    folder.mkdir()
    match case.number % 9:
        case 0 | 1 | 2 as number:
            shutil.copy(events, folder)
            name = ("report.html", "report.html.new", ".report.html.tmp")[number]
            (folder / name).symlink_to(precious)
        case 3:
            os.mkfifo(folder / "events.jsonl")
        case 4:
            (folder / "events.jsonl").mkdir()
        case 5:
            (folder / "events.jsonl").symlink_to("/dev/zero")
        case 6:
            (folder / "events.jsonl").write_bytes(b'{"event": "round", "metrics": ' + b"[" * 3_000_000 + b"\n")
        case 7:
            (folder / "events.jsonl").write_bytes(b'{"event": "round", "x": [' + b"[1]," * 30_000_000 + b"[1]]}\n")
        case _:
            (folder / "events.jsonl").symlink_to(precious)
    _check_read(case, Command(case.folder, "report", str(folder)))
    if precious.read_text() != "mine":
        raise LostError("a file of the user was overwritten")


def _report(case: Case, events: bytes) -> None:
    case.run.mkdir()
    (case.run / "events.jsonl").write_bytes(events)
    _check_read(case, Command(case.folder, "report", str(case.run)))


@kind("hostile inputs", "plan: altered rows", 60)
def _plan_altered(case: Case) -> None:
    lines = [_row(prompt, session).encode() for prompt in range(4) for session in range(4)]
    place = case.chance.randrange(len(lines))
    lines[place] = _altered(lines[place], case)
    file = case.folder / "rows.jsonl"
    file.write_bytes(b"".join(lines))
    _check_read(case, Command(case.folder, "plan", str(file), *PLAN))


@kind("hostile inputs", "plan: devices, deep, long lines, escapes", 7)
def _plan_strange(case: Case) -> None:
    file = case.folder / "rows.jsonl"
    match case.number % 7:
        case 0:
            file.write_text(_row(ESCAPES, 1) + _row(ESCAPES, -1))
        case 1:
            file = Path("/dev/zero")
        case 2:
            file.write_bytes(b"[" * 3_000_000)
        case 3:
            file.write_bytes(b'{"prompt": "' + b"x" * 100_000_000)
        case 4:
            file.mkdir()
        case 5:
            file.write_text(_row(ESCAPES, 0) * 2)
        case _:
            file.write_text(_row(ESCAPES, 2**40))
    _check_read(case, Command(case.folder, "plan", str(file), *PLAN))


def _row(prompt: object, session: int) -> str:
    row = {"prompt": f"p{prompt}", "session": session, "trajectory": 0, "prompt_tokens": 5, "response_tokens": 7}
    return json.dumps(row) + "\n"


def _altered(line: bytes, case: Case) -> bytes:
    """A line of JSON with one value replaced by a strange one, or with damaged bytes."""
    chance, value = case.chance, json.loads(line)
    strange = (
        -1, 2**31, 2**63, 10**400, 1e308, -0.5, True, None, "", ESCAPES, "\ud800", "<script>alert(1)</script>", [], {},
        [[]], {"a": {}}, "x" * 100_000, [0] * 10_000, float("nan"), float("inf"),
    )  # fmt: skip
    match chance.randrange(4):
        case 0:
            data = bytearray(line)
            data[chance.randrange(len(data))] = chance.randrange(256)
            return bytes(data)
        case 1:
            return line[: chance.randrange(len(line))] + b"\n"
        case _:
            _replace(value, chance.choice(strange), chance)
            return json.dumps(value).encode() + b"\n"


def _replace(value: object, new: object, chance: random.Random) -> None:
    """Put a new value somewhere into nested lists and objects."""
    places = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    if not places:
        return
    place = chance.choice(places)
    inside = value[place]  # pyright: ignore[reportIndexIssue]
    if isinstance(inside, dict | list) and inside and chance.random() < 0.8:
        _replace(inside, new, chance)
    else:
        value[place] = new  # pyright: ignore[reportIndexIssue]


def _check_read(case: Case, command: Command) -> None:
    """A command that reads strangers' files shows them or refuses them in one sentence; it does not hang."""
    ended = command.end(READ_SECONDS)
    if ended.code:
        check_refused(ended, str(case.folder), "/dev/zero", "row ", "prompt", "session")


# Agents


@kind("agents", f"one session misbehaves, in {len(ZOO)} ways", len(ZOO))
def _zoo(case: Case) -> None:
    name = ZOO[case.number % len(ZOO)]
    options = ("--rollout.timeout", "5") if name in SLOW_AGENTS else ()
    ended = case.train(*options, environment=misbehaving(name))
    if ended.code:
        raise LostError(f"{name} ended the run: {ended.last}")
    check_weights(case.run, case.shared.failed)
    events = map(json.loads, (case.run / "events.jsonl").read_bytes().splitlines())
    causes = [each["cause"] for event in events for each in event.get("failed", ())]
    if len(causes) != 1 or not causes[0]:
        raise UnclearError(f"{name}: the causes of failures are {causes}")


@kind("agents", "os._exit in one of two ranks", 1)
def _exit_in_rank(case: Case) -> None:
    ended = case.train("--parallel.dp", "2", environment=misbehaving("ends_the_process"))
    check_refused(ended, "ended with exit code 7")
    if "run the same command again to resume" not in ended.last:
        raise UnclearError(f"no remedy in {ended.last!r}")
    case.finish("--parallel.dp", "2")
