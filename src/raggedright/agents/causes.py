"""Why a session failed, in one line for the ledger: "ValueError: no such city (agent.py:12)"."""

import asyncio
import traceback
from pathlib import Path

from raggedright.agents.watchdog import AgentBlocked

MOST_CHARACTERS = 300
_ASYNCIO = str(Path(asyncio.__file__).parent)


def one_line(text: str) -> str:
    """Text that a ledger can show: one line, bounded, whole characters."""
    line = " ".join(text[: 4 * MOST_CHARACTERS].encode("utf-8", "replace").decode().split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 3]}..."


def cause_of(error: BaseException, runner_file: str) -> str:
    """What an agent raised, and the line of its own file; `runner_file` is where it was called from."""
    others = 0
    while isinstance(error, BaseExceptionGroup):
        others += len(error.exceptions) - 1
        error = error.exceptions[0]
    try:
        text = str(error)
    except Exception as unprintable:  # an exception may do anything in its __str__
        text = f"its text raised {type(unprintable).__name__}"
    name = type(error).__name__
    if isinstance(error, asyncio.CancelledError):
        text = text or "the agent cancelled its own task; catch it, or let it finish"
    where = _place(error, runner_file)
    tail = f"{f' ({where})' if where else ''}{f' and {others} more' if others else ''}"
    head = one_line(text if isinstance(error, AgentBlocked) else f"{name}: {text}" if text else name)
    return one_line(f"{head[: MOST_CHARACTERS - len(tail)]}{tail}")


def _place(error: BaseException, runner_file: str) -> str:
    """The deepest frame in the agent's file, as file:line; that file is the first one behind the runner and asyncio."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename != runner_file and not frame.f_code.co_filename.startswith(_ASYNCIO)
    ]
    if not frames:
        return ""
    file = frames[0][0]
    return f"{Path(file).name}:{[line for name, line in frames if name == file][-1]}"
