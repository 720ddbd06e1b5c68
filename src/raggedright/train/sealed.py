"""A round whose sessions have all ended: what every rank plans from, the same on each of them.

Each rank says what became of the sessions that it ran, and all have the same whole; nobody asks the store, so that a
late writer cannot make two ranks see two rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raggedright.advantages import Scores
from raggedright.rows import Rows
from raggedright.store.listing import Listing, join_listings
from raggedright.store.protocol import Key, RowEntry
from raggedright.store.rows import rows_of
from raggedright.train.world import TrainError, World

MOST_CARRIED = 2**22  # bytes of vectors that come to every rank with the list


@dataclass(frozen=True, eq=False)
class SealedRound:
    """The sessions of a round in the order of their keys, and their rows in the same order."""

    round: int
    sessions: Listing
    rows: Rows

    @cached_property
    def entries(self) -> list[RowEntry]:
        """What the store's listing says of each row."""
        return [row for session in self.sessions for row in session.rows]

    @property
    def keys(self) -> Sequence[Key]:
        """The store's key of each row."""
        return self.sessions.keys

    @cached_property
    def failed(self) -> dict[tuple[str, int], str]:
        """The cause of each failed session, by prompt and session."""
        key, state, cause, *_ = self.sessions.sessions
        return {key[i][1:3]: cause[i] for i, each in enumerate(state) if each == "failed"}

    def scores(self, on_failure: str) -> Scores:
        """The score of each session that counts: a failed one is zero, or does not count."""
        key, state, _, score, _ = self.sessions.sessions
        _, prompt, session, _ = [*zip(*key, strict=True)] or [()] * 4
        failed = np.array([each == "failed" for each in state], dtype=bool)
        counts = np.array([each == "finished" for each in state], dtype=bool) | (failed & (on_failure == "zero"))
        return Scores.from_columns(
            prompt=np.array(prompt, dtype=object)[counts],
            session=np.array(session, dtype=np.int64)[counts],
            score=np.where(failed, 0.0, np.array(score, dtype=float))[counts],  # None becomes nan
        )

    def session_metrics(self) -> dict[str, float]:
        """Means over sessions of what agents reported beside the score; a session counts once."""
        return mean_reports([(reports(tags), count) for tags, count in self.sessions.first_tags])


def reports(tags: Mapping[str, object]) -> dict[str, float]:
    """What the agent reported of a session; its rows carry it as tags."""
    return {
        name.removeprefix("metric/"): float(value)
        for name, value in tags.items()
        if name.startswith("metric/") and isinstance(value, int | float)
    }


def mean_reports(found: Sequence[tuple[Mapping[str, float], int]], *, prefix: str = "session") -> dict[str, float]:
    """The mean of each name over the sessions that reported it; what so many sessions reported alike stands once."""
    means = {}
    for name in sorted({name for report, _ in found for name in report}):
        values = [(report[name], count) for report, count in found if name in report]
        means[f"{prefix}/{name}/mean"] = sum(v * n for v, n in values) / sum(n for _, n in values)
    return means


def seal_round(world: World, *, round: int, own: Listing, num_sessions: int) -> SealedRound:
    """The round's sessions from what each rank has run, the same on every rank; all of them are in the store."""
    listing = join_listings(world.gather(own.without_vectors(above=MOST_CARRIED // world.dp_size)))
    if len(listing) != num_sessions:
        raise TrainError(
            f"round {round}: {len(listing):,} of its {num_sessions:,} sessions have ended; "
            "please report this with the run folder"
        )
    return SealedRound(round, listing, rows_of(listing))
