"""What may be put, the same for every backend: keys, states, counts, tags, and one dtype a field and round.

The surprise: None is no value. It agrees with every dtype, here as in a batch's schema; plain Python values agree with
each other and with None, and never with a tensor or an array.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import NamedTuple, get_args

import numpy as np

from raggedright.store.listing import Listing, SessionLine, Sessions
from raggedright.store.protocol import Key, NewRow, NewSession, SessionEntry, SessionKey, State, StoreError
from raggedright.store.tags import is_number, is_text, tags_text

LARGEST = 2**63 - 1
MOST_ROWS = 2**16  # of a session
_STATES = get_args(State)


class Encoded(NamedTuple):
    """A field's value as bytes, and its type for comparing: `torch.float32`, `numpy.int64`, `str`, `None`."""

    type: str
    data: bytes


def check_put(new: NewSession) -> list[str]:
    """Refuse what cannot be a session, whatever the store holds; the tags of each row, as JSON."""
    session, rows, state, cause, score = new
    check_line((session, state, cause, score, len(rows)))
    return [_check_row(session, i, row) for i, row in enumerate(rows)]


def check_line(line: SessionLine) -> None:
    """Refuse what cannot be a session, of which this is listed."""
    key, state, cause, score, num_rows = line
    session = SessionKey(*key)
    check_session(session)
    if state not in _STATES:
        raise StoreError(f"{session}: state is {state!r}; it takes {', '.join(_STATES)}")
    if num_rows and state != "finished":
        counted = f"{num_rows} row{'s' if num_rows > 1 else ''}"
        raise StoreError(f"{session}: {counted} with state {state}; only a finished session has rows")
    if bool(cause) != (state == "failed") or not is_text(cause):
        raise StoreError(f"{session}: cause is {cause!r:.80} with state {state}; a failed session has one, others none")
    if score is not None and not is_number(score):
        raise StoreError(f"{session}: score is {score!r:.80}; it takes a finite number or None, or put it as failed")
    if num_rows > MOST_ROWS:
        raise StoreError(f"{session}: {num_rows:,} rows; a session has at most {MOST_ROWS:,}")


def check_listing(listing: Listing) -> None:
    """Refuse what cannot be put; its tags were checked when they became text."""
    if not _is_plain(listing.sessions):  # most are
        for line in listing.sessions.lines:
            check_line(line)
    prompt, response, loss = listing.about[:3]
    num_rows = int(listing.sessions.num_rows.sum())
    vectors = (listing.vectors or {}).values()
    if any(len(column) != num_rows for column in (*listing.about, *(ragged.sizes for ragged in vectors))):
        raise StoreError(f"a listing has {num_rows:,} rows and not as many numbers, tags and vectors")
    for column in (prompt, response, loss, response - loss) if num_rows else ():
        wrong = np.flatnonzero(column < 0) if column.dtype == np.int64 else np.arange(1)
        if len(wrong):
            raise _wrong_counts(listing.keys[wrong[0]], *(each[wrong[0]] for each in listing.about[:3]))


def _is_plain(sessions: Sessions) -> bool:
    """Whether all are plainly well: found out for all at once, and false where that takes a closer look."""
    rounds, prompts, numbers, attempts = [*zip(*sessions.key, strict=True)] or [()] * 4
    counts = *rounds, *numbers, *attempts
    return (
        {*map(type, counts)} == {int}
        and 0 <= min(counts) <= max(counts) <= LARGEST
        and {*map(type, prompts)} == {str}
        and all(map(is_text, {*prompts}))
        and sessions.state.count("finished") == sessions.cause.count("") == len(sessions.key)
        and all(type(score) is float and isfinite(score) for score in sessions.score)
        and sessions.num_rows.max() <= MOST_ROWS
    )


def check_session(session: SessionKey) -> None:
    """Refuse what cannot be a session's key."""
    round, prompt, number, attempt = session
    if not (_is_count(round) and _is_count(number) and _is_count(attempt)):
        name = next(name for name in ("round", "session", "attempt") if not _is_count(getattr(session, name)))
        raise StoreError(f"{session!r:.200}: {name} is no whole number from 0 to {LARGEST:,}")
    if not is_text(prompt):
        raise StoreError(f"{session!r:.200}: prompt is no text; it takes a string of whole Unicode characters")


def check_can_become(session: SessionKey, before: str | None, state: State) -> None:
    """Running may become finished or failed; nothing else is put twice."""
    if before is None or (before == "running" and state != "running"):
        return
    remedy = "put it as finished or failed" if before == "running" else "put a run of its own under the next attempt"
    raise StoreError(f"{session}: put as {state} and it is {before} already; {remedy}")


def check_types(types: dict[str, str], key: Key, of_row: Mapping[str, str]) -> None:
    """Compare the types of a row's fields with those of its round, and add to these what is new."""
    for name, new in of_row.items():
        old = types.get(name)
        if old is None:
            if new != "None":
                types[name] = new
        elif old != new != "None" and ("." in old or "." in new):
            raise StoreError(
                f"{key}: field {name} is {new} and {old} in other rows of the round; a field keeps its dtype"
            )


def check_replaced(key: Key, name: str, old: str, new: str) -> None:
    """A field is replaced by one of the same type; None is no value."""
    if old != new and "None" not in (old, new):
        raise StoreError(f"{key}: field {name} is {old} and the new value {new}; replace it by one of the same type")


def row_missing(key: Key, state: str | None, watermark: int) -> StoreError:
    """Why there is no such row: its round was deleted, its session is not finished, or nobody put it."""
    if key.round <= watermark:
        return round_deleted(str(key), watermark)
    if state is None:
        return StoreError(f"{key}: no such session is in the store; list() says which are")
    if state != "finished":
        return StoreError(f"{key}: its session is {state}; only a finished one has rows")
    return StoreError(f"{key}: its session is finished and has no such row; list() says which it has")


def field_missing(key: Key, name: str) -> StoreError:
    """That a row has no such field."""
    return StoreError(f"{key}: field {name} is not there; list() says which fields a row has")


def round_deleted(what: str, watermark: int) -> StoreError:
    """That a round is gone, and will stay so."""
    return StoreError(f"{what}: rounds up to {watermark} were deleted; use a later one")


def not_final(
    round: int, wanted: Iterable[tuple[str, int]], states: Mapping[tuple[str, int], str], timeout: float
) -> StoreError:
    """Who is missing when the time is over."""
    wanted = sorted(wanted)
    missing = [pair for pair in wanted if states.get(pair) not in ("finished", "failed")]
    names = [f"{p:.60}/{s} ({states.get((p, s), 'not put')})" for p, s in missing[:10]]
    more = f" and {len(missing) - 10:,} more" if len(missing) > 10 else ""
    return StoreError(
        f"round {round}: {len(missing):,} of {len(wanted):,} sessions are not final after {timeout:g} s: "
        f"{', '.join(names)}{more}; wait longer, or put them as failed"
    )


def last_attempts(entries: Iterable[SessionEntry], wanted: Iterable[tuple[str, int]]) -> list[SessionEntry]:
    """Of entries in the order of their keys, the last attempt of each of these pairs."""
    pairs = set(wanted)
    last = {(e.key.prompt, e.key.session): e for e in entries if (e.key.prompt, e.key.session) in pairs}
    return list(last.values())


def _check_row(session: SessionKey, trajectory: int, row: NewRow) -> str:
    prompt, response, loss, _, is_padding, tags = row
    if not (_is_count(prompt) and _is_count(response) and _is_count(loss)) or loss > response:
        raise _wrong_counts(Key(*session, trajectory), prompt, response, loss)
    if type(is_padding) is not bool:
        raise StoreError(f"{Key(*session, trajectory)}: is_padding is {is_padding!r:.80}; it takes True or False")
    try:
        return tags_text(tags)
    except StoreError as error:
        raise StoreError(f"{Key(*session, trajectory)}: {error}") from None


def _wrong_counts(key: Key, prompt: object, response: object, loss: object) -> StoreError:
    return StoreError(
        f"{key}: prompt_tokens, response_tokens and loss_tokens are {prompt}, {response}, {loss}; they take whole "
        "numbers from 0, and loss_tokens at most response_tokens"
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST
