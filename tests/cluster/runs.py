"""Runs on a real Ray cluster of several nodes on this machine, and what is done to them while they run."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import psutil
import ray

from parallel.whole_runs import wander, write_run
from raggedright.agents.agent_session import Session, Task
from raggedright.config import load_config
from raggedright.config.schema import Config
from raggedright.store.transfer_queue import TransferQueueStore
from raggedright.train.launch import launch

ROUNDS, PROMPTS, SESSIONS = 3, 6, 4
HELD_ROUND = 2
Changes = dict[str, dict[str, object]]


class Held:
    """Wanders; in the held round every second session waits until the file `go` is in the folder."""

    def __init__(self, folder: str) -> None:
        self.go = Path(folder) / "go"

    async def __call__(self, task: Task, session: Session) -> float:
        score = await wander(task, session)
        if session.key.round == HELD_ROUND and session.key.session % 2:
            while not self.go.exists():
                await asyncio.sleep(0.05)
        return score


def make_run(folder: Path, *changes: Changes) -> Config:
    """A run of three rounds; it stops in the second one until it is let go."""
    config = write_run(
        folder,
        {
            "agent": {"name": "cluster.runs:Held", "options": {"folder": str(folder)}},
            "train": {"rounds": ROUNDS, "epochs": 1},
            "checkpoint": {"every": 1},
        },
        *changes,
    )
    return load_config(config / "config.toml")


def on_ray(address: str, *, max_restarts: int = 2) -> Changes:
    return {
        "parallel": {
            "dp": 2,
            "launcher": "ray",
            "address": address,
            "placement": "spread",
            "max_restarts": max_restarts,
            "start_timeout": 120,
        },
        "store": {"storage_units": 1, "keep_rounds": ROUNDS},
    }


def launch_and(config: Config, do: Callable[[], None], *, then: Callable[[], None] = lambda: None) -> None:
    """Train; when the held round waits for the held sessions alone, do one thing, let it go, and do the other.

    An error unless the run goes on within a minute; or, where the machine is so busy that its first start took longer,
    in that time.
    """
    began, errors = time.time(), []

    def run() -> None:
        try:
            launch(config)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # nodes are added in the main thread alone
    thread.start()
    try:
        wait_held(config, thread)
        died = time.time()
        do()
        (config.out / "go").touch()
        then()
    finally:
        (config.out / "go").touch()
        thread.join(600)
    for error in errors:
        raise error
    events = [json.loads(line) for line in (config.out / "events.jsonl").read_text().splitlines()]
    starts = [datetime.fromisoformat(each["time"]).timestamp() for each in events if each["event"] == "start"]
    assert len(starts) == 2
    print(f"started in {starts[0] - began:.0f} s, went on after {starts[1] - died:.0f} s")  # pytest -s shows it
    assert starts[1] - died < max(60, starts[0] - began)


def wait_held(config: Config, run: threading.Thread, timeout: float = 400.0) -> None:
    """Until half of the held round's sessions are in the store, and the others are running."""
    until, store = time.monotonic() + timeout, None
    while time.monotonic() < until and run.is_alive():
        if store is None and (config.out / "checkpoints" / f"round-{HELD_ROUND - 1:06}").exists():
            name = f"{config.out} {ray.get_runtime_context().get_job_id()}"
            store = TransferQueueStore(run=name, storage_units=config.store.storage_units, attach=True)
        if store and store.rounds().get(HELD_ROUND) == PROMPTS * SESSIONS // 2:
            return
        time.sleep(0.1)
    raise AssertionError(f"{config.out} did not come to its held round in {timeout:g} s")


def processes(title: str) -> list[psutil.Process]:
    """Ray's workers of this name, among the nodes that this process started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline() and process.cmdline()[0].startswith(f"ray::{title}"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill(title: str) -> None:
    """End one of Ray's workers of this name, as a crash would."""
    victim = processes(title)[-1]
    victim.kill()
    psutil.wait_procs([victim], timeout=30)


def wait_gone(found: list[psutil.Process]) -> None:
    """Until all of these have ended."""
    _, alive = psutil.wait_procs(found, timeout=60)
    assert not alive
