"""Faults of ports: what a run with two ranks listens on, and a process of another user that connects to it."""

import os
import pickle
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from fault_kinds import kind
from fault_runs import (
    Case,
    Command,
    NotTriedError,
    UnclearError,
    WrongError,
    check_finished,
    check_refused,
    waiting,
)

STRANGER = """
import encodings.idna, os, socket, sys  # all before it is another user, who may not read them
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
connections = []
for line in sys.stdin:
    host, port, *messages = line.split()
    for message in messages:
        try:
            connections.append(socket.create_connection((host, int(port)), timeout=5))
            connections[-1].sendall(bytes.fromhex(message))
        except OSError as error:
            print(error, flush=True)
        else:
            print("sent", flush=True)
"""
PAIRS = 8  # of the numbers by which gloo's listener tells one connection of a peer from another
SEND_UNBOUND_BUFFER = 1
TCP_STORE_HELLO, TCP_STORE_SET = b"\0" + struct.pack("<I", 0x3C85F7CE), b"\1"
TCP_STORE_KEYS = ("/default_pg/0//cpu//0/0", "/0", "/1", "/attempt 0/0")


class Payload:
    """Unpickling one leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mknod, (str(self.mark),)


def _listeners(command: Command) -> set[tuple[str, int]]:
    """Address and port of every socket that the command and its ranks listen on."""
    found = set[tuple[str, int]]()
    for pid in (command.pid, *command.ranks()):
        with suppress(psutil.Error):
            connections = psutil.Process(pid).net_connections("inet")
            found |= {(str(each.laddr[0]), int(each.laddr[1])) for each in connections if each.status == "LISTEN"}
    return found


@kind("ports", "sockets that two ranks listen on", 1)
def _addresses(case: Case) -> None:
    command = case.start("--parallel.dp", "2", environment=waiting(case.folder / "waiting", round=2))
    seen = set[str]()

    def look() -> bool:
        seen.update(host for host, _ in _listeners(command))
        return (case.folder / "waiting").exists()

    command.wait_for(look)
    command.signal(signal.SIGTERM)
    command.end()
    if outside := seen - {"127.0.0.1", "::1", "::ffff:127.0.0.1"}:
        raise WrongError(f"the run listens on {outside}")
    if not seen:
        raise UnclearError("no socket was seen")


@kind("ports", "another user connects to the ranks", 6)
def _stranger(case: Case) -> None:
    """The run finishes, or is refused and can be started again; nothing that the stranger sent is unpickled."""
    if os.getuid():
        raise NotTriedError("only root can start a process of another user")
    mark = case.folder / "ran"
    messages = _messages(case.number, pickle.dumps(Payload(mark)))
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    command = case.start("--parallel.dp", "2", environment={"PACE": "0.3"})
    try:
        attacked = _attack(command, stranger, messages, late_rank=case.number // 3 % 2)
        ended = command.end()
    finally:
        command.kill()
        stranger.communicate(timeout=60)
    if mark.exists():
        raise WrongError("code of another user ran in a rank")
    if not attacked:
        raise UnclearError(f"the stranger reached no rank: {ended.last}")
    if ended.code:
        check_refused(ended, "not a rank of this run", "was killed by SIGABRT")
        case.finish("--parallel.dp", "2")
    else:
        check_finished(case.run, case.shared.undisturbed)


def _attack(command: Command, stranger: subprocess.Popen[str], messages: list[bytes], late_rank: int) -> int:
    """Connect to every listener as long as the command runs; one rank is held back, so that the stranger is first.

    Returns how many messages were sent.
    """
    attacked, held, num_sent = set[tuple[str, int]](), list[int](), 0
    stdin, stdout = stranger.stdin, stranger.stdout
    assert stdin
    assert stdout

    def attack() -> bool:
        nonlocal num_sent
        ranks = command.ranks()
        if len(ranks) == 2 and not attacked and not held:
            held.append(ranks[late_rank])
            os.kill(held[0], signal.SIGSTOP)
        for host, port in _listeners(command) - attacked:
            attacked.add((host, port))
            stdin.write(f"{host} {port} {' '.join(message.hex() for message in messages)}\n")
            num_sent += sum(stdout.readline() == "sent\n" for _ in messages)
        if attacked and held:
            os.kill(held.pop(), signal.SIGCONT)
        return False

    command.wait_for(attack)
    return num_sent


def _messages(number: int, payload: bytes) -> list[bytes]:
    """Take the place of a rank in gloo; or send a pickle as one; or write it to keys of a TCPStore."""
    numbers = [struct.pack("<Q", pair) for pair in range(PAIRS)]
    match number % 3:
        case 0:
            return numbers
        case 1:
            header = struct.pack("<6Q", 48 + len(payload), SEND_UNBOUND_BUFFER, 0, 0, len(payload), 0)
            return [pair + header + payload for pair in numbers]
        case _:
            texts = [(key.encode(), payload) for key in TCP_STORE_KEYS]
            sets = [TCP_STORE_SET + b"".join(struct.pack("<Q", len(t)) + t for t in pair) for pair in texts]
            return [TCP_STORE_HELLO + b"".join(sets)]
