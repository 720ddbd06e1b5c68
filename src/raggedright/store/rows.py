"""From a store to the planner, and the rule by which rows leave a store.

Invariants: the planner sees one attempt of each session and all rows of it; a round is deleted only once a durable
checkpoint contains it.
"""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from raggedright.arrays import within
from raggedright.rows import Rows
from raggedright.store.listing import listing_of
from raggedright.store.protocol import SessionEntry, SessionKey, Store, StoreError


def rows_of(entries: Iterable[SessionEntry]) -> Rows:
    """The rows of one round's finished sessions, in the order of their keys; `wait` gives a sealed round's entries."""
    listing = listing_of(entries)
    finished = [key for key, state, *_ in listing.sessions if state == "finished"]
    for before, after in pairwise(finished):
        if before[0] != after[0]:
            raise StoreError(f"{SessionKey(*after)}: beside rows of round {before[0]}; plan one round at a time")
        if before[:3] == after[:3]:
            raise StoreError(f"{SessionKey(*after)}: attempt {before[3]} is finished, too; plan one of them")
    said, num_rows = listing.about, np.array([line[4] for line in listing.sessions], dtype=np.int64)
    return Rows.from_columns(
        prompt=np.array([line[0][1] for line in listing.sessions], dtype=object).repeat(num_rows),
        session=np.array([line[0][2] for line in listing.sessions], dtype=np.int64).repeat(num_rows),
        trajectory=within(num_rows),
        prompt_tokens=said.prompt_tokens,
        response_tokens=said.response_tokens,
        loss_tokens=said.loss_tokens,
        is_padding=said.is_padding,
    )


def prune(store: Store, *, durable_round: int, keep_rounds: int = 0) -> None:
    """Delete what a durable checkpoint of `durable_round` makes needless, but for the last `keep_rounds` rounds."""
    if keep_rounds < 0:
        raise StoreError(f"keep_rounds is {keep_rounds}; it takes a whole number from 0")
    if durable_round - keep_rounds >= 0:
        store.delete(durable_round - keep_rounds)
