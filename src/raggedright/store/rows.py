"""From a store to the planner, and the rule by which rows leave a store.

Invariants: the planner sees one attempt of each session and all rows of it; a round is deleted only once a durable
checkpoint contains it.
"""

from collections.abc import Iterable
from itertools import pairwise

from raggedright.rows import Rows
from raggedright.store.protocol import SessionEntry, Store, StoreError


def rows_of(entries: Iterable[SessionEntry]) -> Rows:
    """The rows of one round's finished sessions, in the order of their keys; `wait` gives a sealed round's entries."""
    finished = sorted((entry for entry in entries if entry.state == "finished"), key=lambda entry: entry.key)
    for before, after in pairwise(finished):
        if before.key.round != after.key.round:
            raise StoreError(f"{after.key}: beside rows of round {before.key.round}; plan one round at a time")
        if before.key[:3] == after.key[:3]:
            raise StoreError(f"{after.key}: attempt {before.key.attempt} is finished, too; plan one of them")
    rows = [row for entry in finished for row in entry.rows]
    return Rows.from_columns(
        prompt=[row.key.prompt for row in rows],
        session=[row.key.session for row in rows],
        trajectory=[row.key.trajectory for row in rows],
        prompt_tokens=[row.prompt_tokens for row in rows],
        response_tokens=[row.response_tokens for row in rows],
        loss_tokens=[row.loss_tokens for row in rows],
        is_padding=[row.is_padding for row in rows],
    )


def prune(store: Store, *, durable_round: int, keep_rounds: int = 0) -> None:
    """Delete what a durable checkpoint of `durable_round` makes needless, but for the last `keep_rounds` rounds."""
    if keep_rounds < 0:
        raise StoreError(f"keep_rounds is {keep_rounds}; it takes a whole number from 0")
    if durable_round - keep_rounds >= 0:
        store.delete(durable_round - keep_rounds)
