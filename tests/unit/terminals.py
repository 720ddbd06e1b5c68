"""Runs a command as a user sees it: in a terminal of some width, or in a pipe."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?!\n)")


def run_in_terminal(
    *command: str, width: int, timeout: float = 120, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """The exit code and what a terminal got from a command's standard output and error, escape sequences included."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**inherited, "TERM": "xterm-256color", **(environment or {})},
    )
    os.close(follower)
    chunks, deadline = [], time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            if not select.select([leader], [], [], 1.0)[0]:
                continue
            try:
                chunk = os.read(leader, 65_536)
            except OSError:  # Linux: the other end is closed
                break
            if not chunk:
                break
            chunks.append(chunk)
        return process.wait(timeout=max(1.0, deadline - time.monotonic())), b"".join(chunks).decode()
    finally:
        os.close(leader)
        if process.poll() is None:
            process.kill()
            process.wait()


def run_in_pipe(*command: str, width: int) -> tuple[int, str]:
    """The exit code and what a pipe got, with COLUMNS set."""
    environment = {**os.environ, "COLUMNS": str(width)}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=120
    )
    return done.returncode, done.stdout


def raggedright(where: str, *args: str, width: int) -> tuple[int, list[str]]:
    """The exit code and the lines that `raggedright` prints in a "terminal" or a "pipe", without escape sequences."""
    command = (sys.executable, "-m", "raggedright", *args)
    code, text = (run_in_terminal if where == "terminal" else run_in_pipe)(*command, width=width)
    return code, ESCAPES.sub("", text).replace("\r\n", "\n").splitlines()
