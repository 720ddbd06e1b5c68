"""The prompts and settings that our trainer and TRL's share; it imports neither of them."""

import random

SYMBOLS = "0123456789"
PROMPTS, SESSIONS, STEPS = 45, 8, 3
COMPLETION = 3
LEARNING_RATE = 1e-5  # so small that rounds do not change during the measurement


def prompt_text(index: int) -> str:
    """Prompt `index`: four to nine symbols, answered by one trajectory."""
    draw = random.Random(index)
    return f"-:{''.join(draw.choices(SYMBOLS, k=draw.randint(1, 6)))}="
