"""A round whose sessions have all ended: what every rank plans from, the same on each of them.

The first rank reads the list of sessions from the store and gives it to the others, so that a late writer cannot make
two ranks see two rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raggedright.advantages import Scores
from raggedright.rows import Rows
from raggedright.store.listing import entries_of, listing_of
from raggedright.store.protocol import Key, RowEntry, SessionEntry, Store
from raggedright.store.rows import rows_of
from raggedright.train.world import World

SEAL_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class SealedRound:
    """The sessions of a round in the order of their keys, and their rows in the same order."""

    round: int
    sessions: Sequence[SessionEntry]
    entries: Sequence[RowEntry]
    rows: Rows

    @property
    def keys(self) -> list[Key]:
        """The store's key of each row."""
        return [entry.key for entry in self.entries]

    @property
    def failed(self) -> dict[tuple[str, int], str]:
        """The cause of each failed session, by prompt and session."""
        return {(s.key.prompt, s.key.session): s.cause for s in self.sessions if s.state == "failed"}

    def scores(self, on_failure: str) -> Scores:
        """The score of each session that counts: a failed one is zero, or does not count."""
        finished = [(s.key, s.score) for s in self.sessions if s.state == "finished"]
        if on_failure == "zero":
            finished += [(s.key, 0.0) for s in self.sessions if s.state == "failed"]
        return Scores.from_columns(
            prompt=[key.prompt for key, _ in finished],
            session=[key.session for key, _ in finished],
            score=[np.nan if score is None else score for _, score in finished],
        )

    def session_metrics(self) -> dict[str, float]:
        """Means over sessions of what agents reported beside the score; a session counts once."""
        return mean_reports([reports(session) for session in self.sessions if session.state == "finished"])


def reports(session: SessionEntry) -> dict[str, float]:
    """What the agent reported of a session; its rows carry it as tags."""
    tags: Mapping[str, object] = session.rows[0].tags if session.rows else {}
    found = {name.removeprefix("metric/"): value for name, value in tags.items() if name.startswith("metric/")}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def mean_reports(sessions: Sequence[Mapping[str, float]], *, prefix: str = "session") -> dict[str, float]:
    """The mean of each name over the sessions that reported it."""
    values: dict[str, list[float]] = {}
    for session in sessions:
        for name, value in session.items():
            values.setdefault(name, []).append(value)
    return {f"{prefix}/{name}/mean": sum(found) / len(found) for name, found in sorted(values.items())}


def seal_round(store: Store, world: World, *, round: int, sessions: Sequence[tuple[str, int]]) -> SealedRound:
    """Read the round on the first rank; the same on every rank. All ranks have put their sessions before."""
    ended: Sequence[SessionEntry] = ()
    if world.is_first:
        ended = sorted(store.wait(round, sessions, timeout=SEAL_TIMEOUT), key=lambda entry: entry.key)
    if world.dp_size > 1:
        listing = world.from_first(listing_of(ended) if world.is_first else None)
        ended = ended or entries_of(listing)
    rows = [row for entry in ended if entry.state == "finished" for row in entry.rows]
    return SealedRound(round, ended, rows, rows_of(ended))
