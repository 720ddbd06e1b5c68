"""The tiles tasks (count red squares) and their agent, which sees one tile at a time and keeps a note of one digit.

A task is a row of coloured squares. A session cuts it into tiles of its own, of one to three squares each; most tiles
are shown as an image and some are written in letters, so that rows with images and rows of text mix. After each tile
the agent writes its note, the red squares so far, and continues in a fresh context with that note and the next tile:

    -:<image>=      a first tile, and no note yet
    2:<image>=      two red squares so far, and the next tile
    2:grr=          the same with a tile in letters

A malformed note ends the session; the last note is the answer. Reward: 0.1 if every note is well-formed, and 0.9 if the
answer is also exact.
"""

import random
from collections.abc import Mapping, Sequence

import numpy as np

from raggedright.agents.agent_session import Session, Task
from raggedright.agents.digits import EXACT_REWARD, FORM_REWARD, REPLY_TOKENS, cut, digit_of

COLOURS: Mapping[str, tuple[int, int, int]] = {"r": (215, 45, 40), "g": (40, 170, 70), "b": (45, 75, 210)}
SYMBOLS = "0123456789-:=" + "".join(COLOURS)

SIDE = 14  # pixels of a square
NOISE = 20  # at most, added to or taken from each of its channels
START, END = "<|vision_start|>", "<|vision_end|>"


def tasks(index: int, seed: int) -> dict[str, object]:
    """Task `index` of a seed: two to six squares, of which any number is red."""
    draw = random.Random(f"tiles/{seed}/{index}")
    num_squares = draw.randint(2, 6)
    num_red = draw.randint(0, num_squares)
    squares = ["r"] * num_red + draw.choices("gb", k=num_squares - num_red)
    draw.shuffle(squares)
    return {"squares": "".join(squares)}


def paint(squares: Sequence[str], draw: random.Random) -> np.ndarray:
    """A tile as an image [height, width, 3]: its squares side by side, each in a slightly different shade."""
    shades = [[value + draw.randint(-NOISE, NOISE) for value in COLOURS[square]] for square in squares]
    strip = np.clip(np.array(shades), 0, 255).astype(np.uint8)
    return strip.repeat(SIDE, axis=0)[None].repeat(SIDE, axis=0)


class Tiles:
    """The agent; `told` is the share of tiles that are written in letters."""

    def __init__(self, *, told: float = 0.3) -> None:
        self._told = told

    async def __call__(self, task: Task, session: Session) -> float:
        """One trajectory per tile, one after another."""
        squares = _squares_of(task)
        note: str | None = "-"
        num_shown = 0
        for tile in cut(squares, session.random, max_chunks=3):
            if session.random.random() < self._told:
                trajectory = session.trajectory(f"{note}:{''.join(tile)}=", role="told")
            else:
                num_shown += 1
                image = paint(tile, session.random)
                trajectory = session.trajectory(f"{note}:{START}{session.image}{END}=", images=[image], role="shown")
            reply = await trajectory.generate(max_tokens=REPLY_TOKENS)
            note = digit_of(reply)
            if note is None:
                break
        exact = note == str(squares.count("r"))
        session.report(exact_match=exact, well_formed=note is not None, images=num_shown)
        return FORM_REWARD * (note is not None) + EXACT_REWARD * exact


def _squares_of(task: Task) -> list[str]:
    squares = task.data.get("squares")
    if not isinstance(squares, str) or not squares or not all(square in COLOURS for square in squares):
        raise ValueError(f"task {task.uid}: field squares is {squares!r:.60}; it takes letters of {''.join(COLOURS)}")
    return [*squares]
