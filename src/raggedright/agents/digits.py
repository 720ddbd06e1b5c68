"""A family of tasks small enough for a model made on the spot: what is the largest of some digits?

Every session cuts a task's digits into chunks of its own, so that sessions of one prompt differ in their number of
trajectories for as long as they run. A reply is one digit and then the end of text; anything else is malformed.

    -:37=       a first chunk with no memory yet, or a sub-agent's chunk
    4:19=       memory 4 and the next chunk, or what sub-agents reported and the main agent's chunk

Reward: 0.1 if every reply is well-formed, and 0.9 if then the answer is exact.
"""

import random
from collections.abc import Sequence

from raggedright.agents.session import Reply, Session, Task

DIGITS = "0123456789"
SYMBOLS = DIGITS + "-:|=wm"  # with an end of text and a padding token, 18 ids

FORM_REWARD = 0.1
EXACT_REWARD = 0.9
REPLY_TOKENS = 2


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
    """Chunks of 1 to `max_size` digits: first their number is drawn, `max_chunks` at most, then the borders."""
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
    """The digit of a well-formed reply: it, and then the end of text."""
    if len(reply.ids) != REPLY_TOKENS or reply.finish_reason != "stop":
        return None
    return reply.text if reply.text in DIGITS and len(reply.text) == 1 else None


def score(session: Session, answer: str | None, digits: Sequence[str]) -> float:
    """The reward of an answer, None for a malformed reply on the way; reports whether it is exact."""
    exact = answer == max(digits)
    session.report(exact_match=float(exact), well_formed=float(answer is not None))
    return FORM_REWARD * (answer is not None) + EXACT_REWARD * exact
