"""Sampled trajectories for the page: each token with its kind and its shade.

Prompt tokens and observations carry no loss. A loss token is shaded by its advantage, in four steps up to the largest
advantage on the page. The page has a limited number of tokens, and what is left out is counted. A token without loss
that repeats, such as the placeholder of an image, is shown once with its count.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from raggedright.report.events import SampledSession, SampledTrajectory, SamplesEvent
from raggedright.report.text import counted, more, number, signed, value_text, visible

LAST_SESSIONS, FIRST_SESSIONS, MAX_TRAJECTORIES = 4, 2, 12
MAX_TRAJECTORY_TOKENS, MAX_PAGE_TOKENS = 400, 6000
MAX_TOKEN, MAX_TASK = 60, 400
SHADES = 4
MIN_REPEATS = 4  # fewer repeats of a token are shown one by one


class Token(NamedTuple):
    """A token on the page: its text, classes and tooltip, and whether a line ends with it."""

    text: str
    kind: str
    title: str
    ends_line: bool


@dataclass(frozen=True, slots=True)
class ShownTrajectory:
    """A trajectory on the page."""

    role: str
    facts: tuple[str, ...]
    tokens: tuple[Token, ...]
    note: str


@dataclass(frozen=True, slots=True)
class ShownSession:
    """A session on the page."""

    name: str
    score: str
    task: str
    trajectories: tuple[ShownTrajectory, ...]
    note: str


class ShownRound(NamedTuple):
    """The sessions of one round."""

    round: int
    sessions: tuple[ShownSession, ...]


def shown_samples(samples: Sequence[SamplesEvent]) -> tuple[list[ShownRound], float]:
    """The last sampled round and, for comparison, the first; and the largest advantage in them."""
    chosen = [(each, most) for each, most in _ends(samples) if each.sessions]
    trajectories = [
        trajectory
        for each, most in chosen
        for session in each.sessions[:most]
        for trajectory in session.trajectories[:MAX_TRAJECTORIES]
    ]
    largest = max((abs(a) for t in trajectories for a in t.advantages if math.isfinite(a)), default=0.0)
    room, shown = MAX_PAGE_TOKENS, []
    for each, most in chosen:
        sessions = []
        for session in each.sessions[:most]:
            sessions.append(_session(session, largest, room))
            room -= sum(len(trajectory.tokens) for trajectory in sessions[-1].trajectories)
        shown.append(ShownRound(each.round, tuple(sessions)))
    return shown, largest


def _ends(samples: Sequence[SamplesEvent]) -> Iterable[tuple[SamplesEvent, int]]:
    if samples:
        yield samples[-1], LAST_SESSIONS
    if len(samples) > 1:
        yield samples[0], FIRST_SESSIONS


def _session(session: SampledSession, largest: float, room: int) -> ShownSession:
    shown = []
    for trajectory in session.trajectories[:MAX_TRAJECTORIES]:
        shown.append(_trajectory(trajectory, largest, min(room, MAX_TRAJECTORY_TOKENS)))
        room -= len(shown[-1].tokens)
    return ShownSession(
        name=f"{visible(session.prompt, 40)} / {session.session}",
        score=number(session.score),
        task=value_text(dict(session.task), MAX_TASK) if session.task else "",
        trajectories=tuple(shown),
        note=more(len(session.trajectories) - len(shown), "row"),
    )


def _trajectory(trajectory: SampledTrajectory, largest: float, room: int) -> ShownTrajectory:
    runs = _runs(trajectory)
    tokens = tuple(_token(trajectory, start, largest, count) for start, count in runs[: max(room, 0)])
    left = sum(count for _, count in runs[len(tokens) :])
    loss_tokens = sum(1 for value in trajectory.mask if value > 0)
    facts = [counted(len(trajectory.tokens), "token"), f"{loss_tokens:,} with loss"]
    facts += [f"reward {number(trajectory.reward)}"] if trajectory.reward is not None else []
    facts += [_advantage(trajectory)] if loss_tokens and trajectory.advantages else []
    facts += [f"ended: {visible(trajectory.finish_reason, 20)}"] if trajectory.finish_reason else []
    note = more(left, "token")
    return ShownTrajectory(visible(trajectory.role or "agent", 40), tuple(facts), tokens, note)


def _runs(trajectory: SampledTrajectory) -> list[tuple[int, int]]:
    """The position of each shown token, and how many tokens it represents."""
    runs: list[tuple[int, int]] = []
    kinds = [(t, i < trajectory.prompt_tokens, _has_loss(trajectory, i)) for i, t in enumerate(trajectory.tokens)]
    for _, group in groupby(range(len(kinds)), kinds.__getitem__):
        places = [*group]
        if len(places) < MIN_REPEATS or _has_loss(trajectory, places[0]):
            runs += [(i, 1) for i in places]
        else:
            runs.append((places[0], len(places)))
    return runs


def _has_loss(trajectory: SampledTrajectory, i: int) -> bool:
    j = i - trajectory.prompt_tokens
    return 0 <= j < len(trajectory.mask) and trajectory.mask[j] > 0


def _advantage(trajectory: SampledTrajectory) -> str:
    pairs = zip(trajectory.advantages, trajectory.mask, strict=False)
    values = [value for value, mask in pairs if mask > 0 and math.isfinite(value)]
    if not values:
        return "no advantage"
    low, high = min(values), max(values)
    return f"advantage {signed(low)}" if number(low) == number(high) else f"advantage {signed(low)} to {signed(high)}"


def _token(trajectory: SampledTrajectory, i: int, largest: float, count: int) -> Token:
    text = trajectory.tokens[i]
    shown, ends_line, j = visible(text, MAX_TOKEN), text.endswith("\n"), i - trajectory.prompt_tokens
    if not _has_loss(trajectory, i):
        shown += f" x {count:,}" if count > 1 else ""
        return Token(shown, "prompt" if j < 0 else "seen", "", ends_line)
    advantage = trajectory.advantages[j] if j < len(trajectory.advantages) else math.nan
    words = [f"advantage {signed(advantage)}"]
    words += [f"log-prob {number(trajectory.log_probs[j])}"] if j < len(trajectory.log_probs) else []
    return Token(shown, f"loss {shade(advantage, largest)}", ", ".join(words), ends_line)


def shade(advantage: float, largest: float) -> str:
    """The class of an advantage: up1 to up4, down1 to down4, or flat."""
    if not math.isfinite(advantage) or advantage == 0 or largest == 0:
        return "flat"
    level = min(max(math.ceil(abs(advantage) / largest * SHADES), 1), SHADES)
    return f"{'up' if advantage > 0 else 'down'}{level}"
