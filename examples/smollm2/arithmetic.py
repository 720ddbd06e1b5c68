"""Arithmetic in words, and what a reply is worth: the tasks and the reward of configs/smollm2.toml.

Task i depends on (i, seed) alone. A reply is right if the last number in it is the answer; a right one is worth a
little more the shorter it is, so that a group in which all are right still has something to learn from.
"""

import random
import re

from raggedright.agents.session import Task

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps")
BREVITY = 0.2  # of a right reply's reward, lost evenly over LONG characters
LONG = 100


def task(index: int, seed: int) -> dict[str, object]:
    """A question with numbers up to 20, and its answer."""
    chance = random.Random(f"{seed}/{index}")
    name, things = chance.choice(NAMES), chance.choice(THINGS)
    a, b = chance.randint(2, 12), chance.randint(2, 8)
    text, answer = chance.choice(
        (
            (f"{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", a + b),
            (f"{name} had {a + b} {things} and gave away {b}. How many {things} does {name} have left?", a),
            (f"There are {a} {things} in a box and {b} in a bag. How many {things} are there in all?", a + b),
        )
    )
    return {"prompt": text, "answer": answer}


def reward(task: Task, reply: str) -> float:
    """1 for the shortest right reply, 0.8 for a right one of LONG characters or more, 0 for any other."""
    numbers = re.findall(r"\d+", reply)
    if not numbers or int(numbers[-1]) != task.data["answer"]:
        return 0.0
    return 1.0 - BREVITY * min(1.0, len(reply) / LONG)
