"""A store in the memory of one process, for tests and for the library. Threads share it.

Fields are kept as the bytes that a file would have, so that what was put stays as it was and all refusals are the same.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Condition
from time import monotonic

from raggedright.store.checks import (
    Encoded,
    check_can_become,
    check_put,
    check_replaced,
    check_types,
    field_missing,
    last_attempts,
    not_final,
    round_deleted,
    row_missing,
)
from raggedright.store.encoding import decode_field, encode_fields
from raggedright.store.protocol import (
    Fields,
    Key,
    NewRow,
    NewSession,
    RowEntry,
    SessionEntry,
    SessionKey,
    State,
    Store,
    StoreError,
)

__all__ = ["MemoryStore"]


@dataclass(slots=True)
class _Session:
    entry: SessionEntry
    fields: list[dict[str, Encoded]]


class MemoryStore(Store):
    """A store that lasts as long as the object."""

    def __init__(self) -> None:
        self._changed = Condition()  # its lock guards all that follows
        self._sessions: dict[SessionKey, _Session] = {}
        self._types: dict[int, dict[str, str]] = {}
        self._watermark = -1
        self._closed = False

    def put_all(self, sessions: Sequence[NewSession]) -> None:
        """Record several sessions; here each is there at once."""
        for new in sessions:
            self._put(new)

    def _put(self, new: NewSession) -> None:
        check_put(new)
        session, rows, state, cause, score = new._replace(key=SessionKey(*new.key))
        encoded = [encode_fields(Key(*session, i), row.fields) for i, row in enumerate(rows)]
        entries = tuple(_entry(Key(*session, i), row) for i, row in enumerate(rows))
        with self._changed:
            self._check_open()
            if session.round <= self._watermark:
                raise round_deleted(str(session), self._watermark)
            before = self._sessions.get(session)
            check_can_become(session, before.entry.state if before else None, state)
            types = dict(self._types.get(session.round, {}))
            for entry, fields in zip(entries, encoded, strict=True):
                check_types(types, entry.key, _types(fields))
            self._types[session.round] = types
            entry = SessionEntry(key=session, state=state, cause=cause, score=score, rows=entries)
            self._sessions[session] = _Session(entry, encoded)
            self._changed.notify_all()

    def list(
        self,
        *,
        round: int | None = None,
        prompt: str | None = None,
        session: int | None = None,
        state: State | None = None,
    ) -> Sequence[SessionEntry]:
        """Sessions that match, in the order of their keys."""
        with self._changed:
            self._check_open()
            entries = [found.entry for found in self._sessions.values()]
        matching = [
            entry
            for entry in entries
            if (round is None or entry.key.round == round)
            and (prompt is None or entry.key.prompt == prompt)
            and (session is None or entry.key.session == session)
            and (state is None or entry.state == state)
        ]
        return sorted(matching, key=lambda entry: entry.key)

    def get(self, keys: Sequence[Key], fields: Sequence[str]) -> Sequence[dict[str, object]]:
        """These fields of these rows, in the order asked for."""
        with self._changed:
            self._check_open()
            found = [self._find(key) for key in keys]
            for key, row in zip(keys, found, strict=True):
                for name in fields:
                    if name not in row:
                        raise field_missing(key, name)
            data = [[row[name].data for name in fields] for row in found]
        return [
            {name: decode_field(key, name, value) for name, value in zip(fields, values, strict=True)}
            for key, values in zip(keys, data, strict=True)
        ]

    def update(self, values: Mapping[Key, Fields]) -> None:
        """Add fields to rows that are there, all of them or none."""
        encoded = {Key(*key): encode_fields(key, fields) for key, fields in values.items()}
        with self._changed:
            self._check_open()
            types = {key.round: dict(self._types.get(key.round, {})) for key in encoded}
            for key, fields in encoded.items():
                row = self._find(key)
                for name in fields.keys() & row.keys():
                    check_replaced(key, name, row[name].type, fields[name].type)
                check_types(types[key.round], key, _types(fields))
            self._types.update(types)
            for key, fields in encoded.items():
                self._add(key, fields)

    def delete(self, round: int) -> None:
        """Forget all sessions of a round and of those before it."""
        with self._changed:
            self._check_open()
            self._watermark = max(self._watermark, round)
            self._sessions = {key: found for key, found in self._sessions.items() if key.round > self._watermark}
            self._types = {number: types for number, types in self._types.items() if number > self._watermark}
            self._changed.notify_all()

    def wait(self, round: int, sessions: Collection[tuple[str, int]], *, timeout: float) -> Sequence[SessionEntry]:
        """The last attempt of each of these (prompt, session) pairs, once all are finished or failed."""
        until, wanted = monotonic() + timeout, {(prompt, session) for prompt, session in sessions}
        with self._changed:
            while True:
                self._check_open()
                if wanted and round <= self._watermark:
                    raise round_deleted(f"round {round}", self._watermark)
                entries = last_attempts(self.list(round=round), wanted)
                if len(entries) == len(wanted) and all(entry.state != "running" for entry in entries):
                    return entries
                left = until - monotonic()
                if left <= 0:
                    states: dict[tuple[str, int], str] = {(e.key.prompt, e.key.session): e.state for e in entries}
                    raise not_final(round, wanted, states, timeout)
                self._changed.wait(left)

    def close(self) -> None:
        """Let go of what was put."""
        with self._changed:
            self._closed = True
            self._sessions, self._types = {}, {}
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store in memory is closed; make another one")

    def _find(self, key: Key) -> dict[str, Encoded]:
        found = self._sessions.get(SessionKey(*key[:4]))
        if found is None or not 0 <= key.trajectory < len(found.fields):
            raise row_missing(key, found.entry.state if found else None, self._watermark)
        return found.fields[key.trajectory]

    def _add(self, key: Key, fields: dict[str, Encoded]) -> None:
        found = self._sessions[key.of_session]
        found.fields[key.trajectory] = {**found.fields[key.trajectory], **fields}
        rows = [*found.entry.rows]
        rows[key.trajectory] = rows[key.trajectory]._replace(field_names=frozenset(found.fields[key.trajectory]))
        found.entry = replace(found.entry, rows=tuple(rows))


def _types(fields: Mapping[str, Encoded]) -> dict[str, str]:
    return {name: value.type for name, value in fields.items()}


def _entry(key: Key, row: NewRow) -> RowEntry:
    return RowEntry(
        key=key,
        prompt_tokens=row.prompt_tokens,
        response_tokens=row.response_tokens,
        loss_tokens=row.loss_tokens,
        is_padding=row.is_padding,
        tags=dict(row.tags),
        field_names=frozenset(row.fields),
    )
