"""The rows of the comparison on a real model, for our trainer and for TRL's; it imports neither of them."""

import random
from typing import NamedTuple

PROMPTS, SESSIONS, STEPS = 2, 8, 2  # per round: prompts, sessions of each, optimizer steps
LEARNING_RATE = 1e-7  # so small that rounds do not change during the measurement
FIRST_ID, LAST_ID = 1_000, 40_000  # ordinary tokens of SmolLM2


class Shape(NamedTuple):
    """Tokens of a prompt and of a completion."""

    prompt: int
    completion: int


SHAPES = {"shared prompts": Shape(256, 64), "long completions": Shape(64, 256)}
TURNS = 8


def prompt_ids(index: int, shape: Shape) -> list[int]:
    """The ids of a prompt; the first one is its index."""
    return [index, *_ids(f"prompt {index}", shape.prompt - 1)]


def completion_ids(index: int, session: int, shape: Shape) -> list[int]:
    """The ids of a session's completion."""
    return _ids(f"completion {index} {session}", shape.completion)


def _ids(name: str, count: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randint(FIRST_ID, LAST_ID) for _ in range(count)]
