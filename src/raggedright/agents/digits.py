"""The digits tasks (what is the largest of some digits?) and the two agents that learn them.

The tasks are small enough for a model with random initial weights. Every session cuts a task's digits into chunks of
its own, so that sessions of one prompt differ in their number of trajectories. A reply is one digit and then the end of
text; anything else is malformed.

    -:37=       a first chunk with no memory yet, or a sub-agent's chunk
    4:19=       memory 4 and the next chunk, or the reports of sub-agents and the main agent's chunk

Reward: 0.1 if every reply is well-formed, and 0.9 if the answer is also exact. The reward of a session goes to all its
trajectories, so the model must learn to write for a context that it will not see.
"""

import asyncio
import random
from collections.abc import Sequence

from raggedright.agents.agent_session import Session, Task
from raggedright.agents.trajectory import Reply

DIGITS = "0123456789"
SYMBOLS = DIGITS + "-:|=wm"  # with an end of text and a padding token, 18 ids

FORM_REWARD = 0.1
EXACT_REWARD = 0.9
REPLY_TOKENS = 2


async def compact(task: Task, session: Session) -> float:
    """Context compaction: one trajectory per chunk, one after another, with one digit of memory between them.

    After each chunk the agent writes its memory, the largest digit so far, and continues in a fresh context with that
    memory and the next chunk. A malformed memory ends the session. The last memory is the answer.
    """
    digits = digits_of(task)
    memory: str | None = "-"
    for chunk in cut(digits, session.random, max_chunks=4):
        trajectory = session.trajectory(f"{memory}:{''.join(chunk)}=")
        memory = digit_of(await trajectory.generate(max_tokens=REPLY_TOKENS))
        if memory is None:
            break
    return score(session, memory, digits)


async def delegate(task: Task, session: Session) -> float:
    """Delegation: one trajectory per sub-agent, all at once, then one of the main agent.

    The main agent keeps the first chunk and gives one of the others to each sub-agent, which reports the largest digit
    of its chunk. The main agent answers from its own chunk and the reports. A malformed report ends the session.
    """
    digits = digits_of(task)
    first, *others = cut(digits, session.random, max_chunks=3)
    # All are opened before any of them runs: the number of a trajectory names its randomness, so the order must not
    # depend on which of them is faster.
    sub_agents = [session.trajectory(f"-:{''.join(chunk)}=", role="sub-agent") for chunk in others]
    replies = await asyncio.gather(*(sub.generate(max_tokens=REPLY_TOKENS) for sub in sub_agents))
    reports = [digit_of(reply) for reply in replies]
    if None in reports:
        return score(session, None, digits)
    main = session.trajectory(f"{''.join(map(str, reports)) or '-'}:{''.join(first)}=", role="main")
    answer = digit_of(await main.generate(max_tokens=REPLY_TOKENS))
    return score(session, answer, digits)


def tasks(index: int, seed: int) -> dict[str, object]:
    """Task `index` of a seed: two to seven digits, which can be cut into more than one number of chunks."""
    draw = random.Random(f"digits/{seed}/{index}")
    return {"digits": draw.choices(DIGITS, k=draw.randint(2, 7))}


def digits_of(task: Task) -> list[str]:
    """The task's digits, as single characters."""
    digits = task.data.get("digits")
    if not isinstance(digits, Sequence) or not digits or not all(str(digit) in DIGITS for digit in digits):
        raise ValueError(f"task {task.uid}: field digits is {digits!r:.60}; it takes a list of digits")
    return [str(digit) for digit in digits]


def cut(digits: Sequence[str], draw: random.Random, *, max_chunks: int, max_size: int = 3) -> list[list[str]]:
    """Chunks of 1 to `max_size` digits: first their number is drawn, at most `max_chunks`, then the borders."""
    fewest = -(-len(digits) // max_size)
    num_chunks = draw.randint(fewest, max(fewest, min(max_chunks, len(digits))))
    chunks, start = [], 0
    for left in range(num_chunks - 1, -1, -1):
        rest = len(digits) - start
        size = draw.randint(max(1, rest - left * max_size), min(max_size, rest - left))
        chunks.append([*digits[start : start + size]])
        start += size
    return chunks


def digit_of(reply: Reply) -> str | None:
    """The digit of a well-formed reply, which is the digit and then the end of text."""
    if len(reply.ids) != REPLY_TOKENS or reply.finish_reason != "stop":
        return None
    return reply.text if reply.text in DIGITS and len(reply.text) == 1 else None


def score(session: Session, answer: str | None, digits: Sequence[str]) -> float:
    """The reward of an answer, which is None after a malformed reply; reports whether it is exact."""
    exact = answer == max(digits)
    session.report(exact_match=float(exact), well_formed=float(answer is not None))
    return FORM_REWARD * (answer is not None) + EXACT_REWARD * exact
