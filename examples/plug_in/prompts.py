"""Prompts of your own: a function that makes task number `index`, the same for the same index and seed.

[prompts]
source = "examples.plug_in.prompts:sums"
"""

from collections.abc import Mapping
from random import Random


def sums(index: int, seed: int) -> Mapping[str, object]:
    """Two digits to add."""
    random = Random(f"{seed} {index}")
    first, second = random.randrange(5), random.randrange(5)
    return {"question": f"{first}|{second}=", "answer": str(first + second)}
