"""What every kind of fault needs: commands in processes of their own, runs to disturb, disks, and the three verdicts.

A command is `raggedright.cli.main` in a process that was forked from one that has torch imported, which saves seconds
per case; ranks of runs with several are processes of the launcher as always.
"""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from safetensors.torch import load_file

from fault_agents import BATCH_SIZE, SESSIONS
from raggedright.agents.digits import SYMBOLS
from raggedright.config.load import dump_config, make_config
from raggedright.report.events import read_events
from raggedright.store.sqlite import SqliteStore

ROUNDS = 4
TRAIN_SECONDS, READ_SECONDS = 300.0, 60.0  # longer is a hang
TOLERANCE = 1e-9  # of weights in float64, between numbers of ranks
MAX_MEMORY = 2 << 30  # that a command may take beyond what it starts with
FS_IOC_SHUTDOWN, NO_FLUSH = 0x8004587D, 2
CONFIG: dict[str, object] = {
    "seed": 3,
    "model": {
        "made": {
            "model_type": "qwen3",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "initializer_range": 0.1,
            "tie_word_embeddings": False,
        },
        "symbols": SYMBOLS,
        "dtype": "float64",
    },
    "prompts": {"source": "raggedright.agents.digits:tasks"},
    "agent": {"name": "fault_agents:wander"},
    "rollout": {"n": SESSIONS, "max_tokens": 4, "max_row_tokens": 24},
    "train": {"rounds": ROUNDS, "batch_size": BATCH_SIZE, "mini_batch_size": 2},
    "checkpoint": {"every": 1},
    "optimizer": {"lr": 3e-3},
    "logging": {"trackers": []},
}
Environment = Mapping[str, str] | None
_fork_server = multiprocessing.get_context("forkserver")


class FaultError(Exception):
    """A case that did not end as the docs promise."""


class LostError(FaultError):
    """Recorded work is missing."""


class WrongError(FaultError):
    """Other numbers than those of the undisturbed run."""


class UnclearError(FaultError):
    """A traceback, a hang, or a last line that does not name the cause."""


class NotTriedError(Exception):
    """This machine does not permit the fault."""


@dataclass(frozen=True)
class Ended:
    """A command that ended: its exit code, negative for a signal, and its output."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """Its last word."""
        return next(reversed(self.err.strip().splitlines() or self.out.strip().splitlines()), "")


class Command:
    """A `raggedright` command that runs, in a process group of its own."""

    def __init__(self, folder: Path, *argv: str, environment: Environment = None) -> None:
        self.argv, self._log = argv, folder / f"log-{time.monotonic_ns()}"
        arguments = (argv, str(self._log), dict(environment or {}))
        self._process = _fork_server.Process(target=_command, args=arguments, daemon=False)
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def wait_for(self, condition: Callable[[], bool], seconds: float = TRAIN_SECONDS) -> bool:
        """Wait until a condition holds; False where the command ended before."""
        deadline = time.monotonic() + seconds
        while self.is_running and not condition():
            if time.monotonic() > deadline:
                self.kill()
                raise UnclearError(f"{self} did not get there in {seconds:g} s")
            time.sleep(0.002)
        return self.is_running

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the command and all that it started."""
        if not self.is_running:
            return
        with suppress(psutil.Error):
            command = psutil.Process(self.pid)
            for each in (*command.children(recursive=True), command):
                with suppress(psutil.Error):
                    each.kill()

    def ranks(self) -> list[int]:
        """The processes of its ranks, in their order."""
        with suppress(psutil.Error):
            return sorted(child.pid for child in psutil.Process(self.pid).children())
        return []

    def join(self, seconds: float) -> None:
        """Wait for its end, at most so long."""
        self._process.join(seconds)

    def end(self, seconds: float = TRAIN_SECONDS) -> Ended:
        """Wait for its end, and read what it wrote."""
        self.join(seconds)
        if self.is_running:
            self.kill()
            raise UnclearError(f"{self} was still running after {seconds:g} s")
        out, err = (Path(f"{self._log}.{name}").read_bytes().decode(errors="replace") for name in ("out", "err"))
        ended = Ended(self._process.exitcode or 0, out, err)
        if marks := {c for c in out + err if not c.isprintable() and c not in "\n\t"}:
            raise UnclearError(f"{self} wrote {marks!r} to the terminal")
        if "Traceback" in out + err:
            raise UnclearError(f"{self} ended with a traceback: {ended.last}")
        return ended

    def __str__(self) -> str:
        return f"raggedright {' '.join(self.argv)}"


def _command(argv: tuple[str, ...], log: str, environment: dict[str, str]) -> None:
    """The process of a command."""
    from raggedright.cli import main

    os.setsid()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        with open(f"{log}.{name}", "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", errors="replace") for number in (1, 2))
    if argv[0] != "train":
        memory = psutil.Process().memory_info().vms + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    code = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def prepare_processes() -> None:
    """Import what commands need once, in the process that they are forked from."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    os.environ["OMP_NUM_THREADS"] = "1"
    modules = ("raggedright.cli", "raggedright.train.launch", "transformers.models.qwen3.modeling_qwen3")
    _fork_server.set_forkserver_preload(["fault_runs", "raggedright.report.run_page", *modules])


@dataclass(frozen=True)
class Case:
    """One try of a kind of fault: its number, what it draws from, its own folder, and the runs that all share."""

    number: int
    chance: random.Random
    folder: Path
    shared: "Shared"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self, *options: str, out: Path | None = None, environment: Environment = None) -> Command:
        """`raggedright train` in the case's run folder, or another."""
        argv = ("train", str(self.shared.config), "--out", str(out or self.run), *options)
        return Command(self.folder, *argv, environment=environment)

    def train(self, *options: str, out: Path | None = None, environment: Environment = None) -> Ended:
        return self.start(*options, out=out, environment=environment).end()

    def finish(self, *options: str, out: Path | None = None, environment: Environment = None) -> None:
        """Run the same command again, which must end with the weights and the ledger of the undisturbed run."""
        run = out or self.run
        recorded = self.recorded_sessions(run)
        ended = self.train(*options, out=run, environment=environment)
        if ended.code:
            raise LostError(f"the run cannot be resumed: {ended.last}")
        start = next(reversed([line for line in event_lines(run) if line["event"] == "start"]))
        if (found := start["sessions_found"]) != (there := recorded.get(start["resumed_from"] + 1, 0)):
            raise LostError(f"{there} sessions were recorded and {found} were used")
        check_finished(run, self.shared.undisturbed)

    def recorded_sessions(self, run: Path) -> dict[int, int]:
        """How many finished sessions of each round the store of a run has that does not go on; looks at a copy."""
        with TemporaryDirectory(dir=self.folder) as name:
            for file in run.glob("rows.db*"):
                shutil.copy(file, name)
            if not (Path(name) / "rows.db").exists():
                return {}
            with SqliteStore(Path(name) / "rows.db") as store:
                return store.rounds()


@dataclass(frozen=True)
class Shared:
    """Made once: a config, and runs that nobody disturbed, that stopped in round 3, and with one failed session."""

    config: Path
    undisturbed: Path
    stopped: Path
    failed: Path

    @classmethod
    def make(cls, folder: Path) -> "Shared":
        """Run them."""
        shared = cls(folder / "config.toml", folder / "undisturbed", folder / "stopped", folder / "failed")
        shared.config.write_text(dump_config(make_config(CONFIG, source="the config of all cases")))
        case = Case(0, random.Random(0), folder, shared)
        stopped = case.start(out=shared.stopped, environment=waiting(folder / "waiting", round=3))
        first = case.start(out=shared.undisturbed)
        failed = case.start(out=shared.failed, environment=misbehaving("raises"))
        stopped.wait_for((folder / "waiting").exists)
        time.sleep(2)  # for the sessions that do not wait to end
        stopped.signal(signal.SIGTERM)
        for command, code in ((first, 0), (failed, 0), (stopped, 130)):
            if (ended := command.end()).code != code:
                raise RuntimeError(f"{command} ended with {ended.code}: {ended.err}")
        return shared


def waiting(file: Path, round: int) -> dict[str, str]:
    """The environment in which every second session of a round touches a file and waits for ever."""
    return {"FAULT": "waits", "FAULT_ROUND": str(round), "FAULT_FILE": str(file)}


def misbehaving(name: str, round: int = 2) -> dict[str, str]:
    """The environment in which one session of a round misbehaves."""
    return {"FAULT": name, "FAULT_ROUND": str(round)}


def check_finished(run: Path, expected: Path) -> None:
    """Every round once, every session of it counted, and the expected weights."""
    events = read_events(run / "events.jsonl")
    rounds = {each.round: sum(each.ledger.sessions.values()) for each in events.rounds}
    if rounds != dict.fromkeys(range(1, ROUNDS + 1), BATCH_SIZE * SESSIONS):
        raise LostError(f"sessions by round are {rounds}")
    check_weights(run, expected)


def check_weights(run: Path, expected: Path) -> None:
    """The exported model is that of another run."""
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (run, expected))
    distance = max(float((one[name] - other[name]).abs().max()) for name in other)
    if not distance < TOLERANCE:
        raise WrongError(f"weights differ by {distance:g}")


def check_refused(ended: Ended, *words: str) -> None:
    """The command ended with one sentence that has one of these words in it."""
    if ended.code != 1 or not ended.last.startswith("raggedright: "):
        raise UnclearError(f"exit code {ended.code}, and the last line is {ended.last!r}")
    if not any(word in ended.last for word in words):
        raise UnclearError(f"the last line names none of {', '.join(words)}: {ended.last!r}")


def num_rounds(run: Path) -> int:
    """Rounds in the events of a run that may be going on."""
    try:
        return sum(b'"event": "round"' in line for line in (run / "events.jsonl").read_bytes().splitlines())
    except FileNotFoundError:
        return 0


def newest_checkpoint(run: Path) -> Path | None:
    return max((run / "checkpoints").glob("round-*"), default=None)


@contextmanager
def memory_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own, of so many megabytes."""
    disk = folder / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", disk)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], capture_output=True)


class CutDisk:
    """An ext4 file system in a file, from which the power can be cut."""

    def __init__(self, folder: Path) -> None:
        self.path, self._image = folder / "disk", folder / "disk.ext4"
        self.path.mkdir()
        self._image.write_bytes(b"")
        os.truncate(self._image, 32 << 20)
        if not shutil.which("mkfs.ext4"):
            raise NotTriedError("there is no mkfs.ext4")
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", self._image], check=True, capture_output=True)
        self.mount()

    def mount(self) -> None:
        """Mount it; after a cut its journal is replayed."""
        mount("-o", "loop", self._image, self.path)

    def cut_power(self) -> None:
        """Lose whatever was not synced; every operation from now on is an input/output error."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            ioctl(descriptor, FS_IOC_SHUTDOWN, struct.pack("I", NO_FLUSH))
        finally:
            os.close(descriptor)

    def unmount(self) -> None:
        subprocess.run(["umount", self.path], capture_output=True)


def mount(*arguments: object) -> None:
    """Mount a file system."""
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise NotTriedError(f"mounting is not permitted here: {done.stderr.strip()}")


def flip_bit(path: Path, chance: random.Random) -> None:
    """Alter one bit of a file."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def event_lines(run: Path) -> list[dict[str, Any]]:
    """The events of a run, as they are."""
    return [json.loads(line) for line in (run / "events.jsonl").read_bytes().splitlines()]
