"""From a store to the planner, and the rule by which rows leave a store.

Invariants: the planner sees one attempt of each session and all rows of it; a round is deleted only once a durable
checkpoint contains it.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from raggedright.arrays import within
from raggedright.rows import Rows
from raggedright.store.listing import listing_of
from raggedright.store.protocol import SessionEntry, SessionKey, Store, StoreError


def rows_of(entries: Iterable[SessionEntry]) -> Rows:
    """The rows of one round's finished sessions, in the order of their keys; `wait` gives a sealed round's entries."""
    listing = listing_of(entries)
    sessions, said = listing.sessions, listing.about
    _check_one_round([key for key, state in zip(sessions.key, sessions.state, strict=True) if state == "finished"])
    _, prompt, number, _ = [*zip(*sessions.key, strict=True)] or [()] * 4
    num_rows = sessions.num_rows
    return Rows.from_columns(
        prompt=np.array(prompt, dtype=object).repeat(num_rows),
        session=np.array(number, dtype=np.int64).repeat(num_rows),
        trajectory=within(num_rows),
        prompt_tokens=said.prompt_tokens,
        response_tokens=said.response_tokens,
        loss_tokens=said.loss_tokens,
        is_padding=said.is_padding,
    )


def _check_one_round(finished: Sequence[tuple]) -> None:
    """Refuse two rounds, and two attempts of a session; keys are in order."""
    round, prompt, session, _ = [*zip(*finished, strict=True)] or [()] * 4
    if len({*round}) < 2 and len({*zip(prompt, session, strict=True)}) == len(finished):
        return
    for before, after in pairwise(finished):
        if before[0] != after[0]:
            raise StoreError(f"{SessionKey(*after)}: beside rows of round {before[0]}; plan one round at a time")
        if before[:3] == after[:3]:
            raise StoreError(f"{SessionKey(*after)}: attempt {before[3]} is finished, too; plan one of them")


def prune(store: Store, *, durable_round: int, keep_rounds: int = 0) -> None:
    """Delete what a durable checkpoint of `durable_round` makes needless, but for the last `keep_rounds` rounds."""
    if keep_rounds < 0:
        raise StoreError(f"keep_rounds is {keep_rounds}; it takes a whole number from 0")
    if durable_round - keep_rounds >= 0:
        store.delete(durable_round - keep_rounds)
