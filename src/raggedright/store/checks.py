"""What may be put, the same for every backend: keys, states, counts, tags, and one dtype a field and round.

The surprise: None is no value. It agrees with every dtype, here as in a batch's schema; plain Python values agree with
each other and with None, and never with a tensor or an array.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, get_args

from raggedright.store.protocol import Key, NewRow, NewSession, SessionEntry, SessionKey, State, StoreError

LARGEST = 2**63 - 1
MOST_ROWS = 2**16  # of a session
_STATES = get_args(State)
_PLAIN_TAGS = frozenset((bool, int, type(None)))


class Encoded(NamedTuple):
    """A field's value as bytes, and its type for comparing: `torch.float32`, `numpy.int64`, `str`, `None`."""

    type: str
    data: bytes


def check_put(new: NewSession) -> None:
    """Refuse what cannot be a session, whatever the store holds."""
    session, rows, state, cause, score = new
    check_session(session)
    if state not in _STATES:
        raise StoreError(f"{session}: state is {state!r}; it takes {', '.join(_STATES)}")
    if rows and state != "finished":
        counted = f"{len(rows)} row{'s' if len(rows) > 1 else ''}"
        raise StoreError(f"{session}: {counted} with state {state}; only a finished session has rows")
    if bool(cause) != (state == "failed") or not is_text(cause):
        raise StoreError(f"{session}: cause is {cause!r:.80} with state {state}; a failed session has one, others none")
    if score is not None and not _is_number(score):
        raise StoreError(f"{session}: score is {score!r:.80}; it takes a finite number or None, or put it as failed")
    if len(rows) > MOST_ROWS:
        raise StoreError(f"{session}: {len(rows):,} rows; a session has at most {MOST_ROWS:,}")
    for i, row in enumerate(rows):
        _check_row(session, i, row)


def check_session(session: SessionKey) -> None:
    """Refuse what cannot be a session's key."""
    for name in ("round", "session", "attempt"):
        if not _is_count(getattr(session, name)):
            raise StoreError(f"{session!r:.200}: {name} is no whole number from 0 to {LARGEST:,}")
    if not is_text(session.prompt):
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


def _check_row(session: SessionKey, trajectory: int, row: NewRow) -> None:
    prompt, response, loss = counts = row.prompt_tokens, row.response_tokens, row.loss_tokens
    if not (_is_count(prompt) and _is_count(response) and _is_count(loss)) or loss > response:
        raise StoreError(
            f"{Key(*session, trajectory)}: prompt_tokens, response_tokens and loss_tokens are "
            f"{', '.join(map(str, counts))}; they take whole numbers from 0, and loss_tokens at most response_tokens"
        )
    if type(row.is_padding) is not bool:
        raise StoreError(f"{Key(*session, trajectory)}: is_padding is {row.is_padding!r:.80}; it takes True or False")
    for name, value in row.tags.items():
        kind = type(value)
        if not is_text(name) or not (kind in _PLAIN_TAGS or is_text(value) or _is_number(value)):
            raise StoreError(
                f"{Key(*session, trajectory)}: tag {name} is {value!r:.80}; it takes text, a finite number, a boolean "
                "or None"
            )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def is_text(value: object) -> bool:
    """Whether it is text of whole Unicode characters, which UTF-8 can hold."""
    return type(value) is str and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))
