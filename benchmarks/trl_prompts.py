"""What ours and TRL's trainer are both given; it imports neither of them."""

import random

SYMBOLS = "0123456789"
PROMPTS, SESSIONS, STEPS = 45, 8, 3
COMPLETION = 3
LEARNING_RATE = 1e-5  # so small that rounds stay alike for as long as it is measured


def prompt_text(index: int) -> str:
    """Prompt `index` of those that one trajectory answers: four to nine symbols."""
    draw = random.Random(index)
    return f"-:{''.join(draw.choices(SYMBOLS, k=draw.randint(1, 6)))}="
