"""Which ports a run on this machine opens, and what strangers who write to them can do."""

import base64
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from torch.distributed.rendezvous import rendezvous

from integration.test_train import events_of, start
from parallel.whole_runs import write_run
from raggedright.train.peer_check import foreign_peer

SECONDS = 240.0
NOBODY = 65534
RANK = """
import sys
from pathlib import Path
from raggedright.config.load import load_config
from raggedright.train.world import TrainError, join_world

try:
    world = join_world(load_config(Path(sys.argv[1])))
except TrainError as error:
    sys.exit(f"refused: {error}")
print("joined", flush=True)
print("gathered", world.gather(world.dp_rank), flush=True)
"""
STRANGER = """
import os, socket, struct, sys, time

port, user, host = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.setgid(user)
os.setuid(user)
connections = [socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) for _ in range(2)]
for pair, connection in enumerate(connections):
    connection.connect((host, port))
    connection.sendall(struct.pack("<Q", pair))  # all that a gloo listener reads
print("connected", flush=True)
time.sleep(600)
"""
HELLO, SET = b"\0" + struct.pack("<I", 0x3C85F7CE), b"\1"  # what torch's TCPStore reads


class Stranger:
    """Unpickling one leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mknod, (str(self.mark),)


def listening(process: subprocess.Popen[str]) -> Iterator[tuple[int, str, int]]:
    """Process id, address and port of every socket that a run's processes listen on."""
    with suppress(psutil.Error):
        run = psutil.Process(process.pid)
        for each in (run, *run.children(recursive=True)):
            with suppress(psutil.Error):
                for found in each.net_connections("inet"):
                    if found.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                        yield each.pid, str(found.laddr[0]), int(found.laddr[1])


def addresses() -> list[str]:
    """Those of this machine, except loopback."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    found = [each for interface in psutil.net_if_addrs().values() for each in interface if each.family in kinds]
    return [each.address for each in found if not each.address.startswith(("127.", "::1", "fe80"))]


def attack(port: int, keys: list[str], value: bytes) -> None:
    """Write a value to keys of the TCPStore at the port, if it is one."""
    with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        texts = [[struct.pack("<Q", len(text)) + text for text in (f"/{key}".encode(), value)] for key in keys]
        connection.sendall(HELLO + b"".join(SET + key + text for key, text in texts))
        time.sleep(0.5)


def test_the_attack_writes_to_a_store_of_torch():
    store, _, _ = next(rendezvous("tcp://127.0.0.1:0", rank=0, world_size=1))
    port = store.port  # pyright: ignore[reportAttributeAccessIssue]
    attack(port, ["a", "b"], b"value")
    assert store.get("a") == store.get("b") == b"value"


@pytest.mark.xdist_group("launch")
def test_a_run_on_two_ranks_listens_on_loopback_alone_and_runs_no_code_of_strangers(tmp_path: Path):
    """torch's elastic launcher listens on all interfaces and unpickles what anybody writes to a known key."""
    process, mark = start(tmp_path, "waits", "--parallel.dp", "2", "--rollout.timeout", "600"), tmp_path / "ran"
    keys = [f"torch.rendezvous.raggedright-{process.pid}", "default_pg/0//cpu//0/0", "0", "1", "attempt 0/0"]
    seen = set[tuple[int, str, int]]()
    try:
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "waiting").exists() and process.poll() is None and time.monotonic() < deadline:
            seen |= set(listening(process))
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        assert {address for _, address, _ in seen} == {"127.0.0.1"}
        assert len(seen) == 2  # the process group's, one per rank
        assert process.pid not in {pid for pid, _, _ in seen}
        for _, _, port in seen:
            for outside in addresses():
                with pytest.raises(ConnectionRefusedError), socket.create_connection((outside, port), timeout=5):
                    pass
            attack(port, keys, base64.b64encode(pickle.dumps(Stranger(mark))))
            attack(port, keys, pickle.dumps(Stranger(mark)))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, err
    assert events_of(tmp_path, "end")[0]["reason"] == "interrupted"
    assert not mark.exists()


@contextmanager
def program(text: str, *arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that ends with the block."""
    command = [sys.executable, "-c", text, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def rank(folder: Path, dp_rank: int):
    """One of two ranks that the launcher would start."""
    return program(
        RANK,
        folder / "run" / "config.toml",
        RANK=str(dp_rank),
        WORLD_SIZE="2",
        GLOO_SOCKET_IFNAME="lo",
        RAGGEDRIGHT_RENDEZVOUS=str(folder / "rendezvous"),
    )


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::ffff:127.0.0.1"])
def test_a_rank_refuses_the_connections_of_another_user_before_it_exchanges_objects(tmp_path: Path, host: str):
    """gloo takes the first process that connects for the rank that is late."""
    if host and os.getuid():
        pytest.skip("only root can start a process of another user")
    write_run(tmp_path / "run", {"parallel": {"dp": 2}})
    with ExitStack() as stack:
        first = stack.enter_context(rank(tmp_path, 0))
        deadline = time.monotonic() + SECONDS
        while not (ports := [port for _, _, port in listening(first)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        if host:
            stranger = stack.enter_context(program(STRANGER, ports[0], NOBODY, host))
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "connected\n", stranger.communicate()
        stack.enter_context(rank(tmp_path, 1))
        out, err = first.communicate(timeout=SECONDS)
    if host:
        assert f"refused: a process of user {NOBODY}, not a rank of this run, is connected" in err
        assert "run the same command again" in err
        assert (first.returncode, out) == (1, "")
    else:
        assert out == "joined\ngathered [0, 1]\n", err


def test_a_connection_whose_other_end_no_process_holds_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raggedright.train.peer_check.WAIT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        assert "an unknown process" in (foreign_peer() or "")  # in the listener's queue
        accepted, _ = listener.accept()
        assert foreign_peer() is None
        accepted.close()
        assert f"port {listener.getsockname()[1]} " in (foreign_peer() or "")
