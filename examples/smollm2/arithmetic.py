"""Arithmetic word problems: the tasks and the reward of configs/smollm2.toml.

Task i depends only on (i, seed). The answer is never one of the question's numbers, so a reply that contains it is
right. Short replies get a part of the reward, so that groups in which all replies are right, or all are wrong, also
have something to learn from.
"""

import random
import re

from raggedright.agents import Task

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps")
RIGHT, SHORT = 0.8, 0.2
LONG = 100  # characters; a reply of this length gets nothing for being short


def task(index: int, seed: int) -> dict[str, object]:
    """A question with numbers up to 17, and its answer."""
    rng = random.Random(f"{seed}/{index}")
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.sample(range(2, 10), 2)
    text, answer = rng.choice(
        (
            (f"{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", a + b),
            (f"{name} had {a + b} {things} and gave away {b}. How many {things} does {name} have left?", a),
            (f"There are {a} {things} in a box and {b} in a bag. How many {things} are there in all?", a + b),
        )
    )
    return {"prompt": text, "answer": answer}


def reward(task: Task, reply: str) -> float:
    """RIGHT for the right number, and up to SHORT for a reply with any number."""
    numbers = [int(number) for number in re.findall(r"\d+", reply)]
    if not numbers:
        return 0.0
    return RIGHT * (task.data["answer"] in numbers) + SHORT * max(0.0, 1.0 - len(reply) / LONG)
