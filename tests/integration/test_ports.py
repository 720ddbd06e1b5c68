"""Which ports a run on this machine opens, and what strangers who write to them can do."""

import base64
import os
import pickle
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from torch.distributed.rendezvous import rendezvous

from integration.test_train import events_of, start

SECONDS = 240.0
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
