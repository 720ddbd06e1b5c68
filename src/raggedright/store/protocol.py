"""What a store promises, whichever backend it is. One conformance suite says so for all of them.

A session's rows become visible all at once, when it is put as finished, and stay as they were put. An answer has
exactly the keys and fields that were asked for, in that order, bit for bit; whatever is missing, of another type, half
written or of a deleted round is a StoreError that names it, within a bounded time. Never a shorter answer.

The surprise: a key has an attempt in it. A session that is run again (a retry, a restart) is put under the next
attempt, so no key is ever written twice and a late writer cannot touch what another one put.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self

from raggedright.errors import RaggedRightError

if TYPE_CHECKING:
    from raggedright.ragged import Ragged
    from raggedright.store.listing import Listing

State = Literal["running", "finished", "failed"]
Tag = str | int | float | bool | None
Fields = Mapping[str, object]


class StoreError(RaggedRightError):
    """What was asked of a store cannot be; nothing was changed."""


class SessionKey(NamedTuple):
    """One run of an agent on a prompt, in a round; `attempt` counts its runs from 0."""

    round: int
    prompt: str
    session: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"round {self.round}, session {self.prompt}/{self.session}, attempt {self.attempt}"


class Key(NamedTuple):
    """One row of a session."""

    round: int
    prompt: str
    session: int
    attempt: int
    trajectory: int

    def __str__(self) -> str:
        return f"round {self.round}, row {self.prompt}/{self.session}/{self.trajectory}, attempt {self.attempt}"

    @property
    def of_session(self) -> SessionKey:
        """The session that emitted it."""
        return SessionKey(*self[:4])


class NewRow(NamedTuple):
    """A row to put: its counts, its tensors and other fields, its tags. Its number in the session is its trajectory.

    An `array.array` of numbers stands for a vector and is read as a tensor: short rows are put several times as fast.
    """

    prompt_tokens: int
    response_tokens: int
    loss_tokens: int
    fields: Fields
    is_padding: bool = False
    tags: Mapping[str, Tag] = MappingProxyType({})


class NewSession(NamedTuple):
    """A session to put, with all its rows if it is finished and with a cause if it failed."""

    key: SessionKey
    rows: Sequence[NewRow] = ()
    state: State = "finished"
    cause: str = ""
    score: float | None = None


class RowEntry(NamedTuple):
    """What a listing says of a row: everything but its fields' values. A tuple, since a listing makes very many."""

    key: Key
    prompt_tokens: int
    response_tokens: int
    loss_tokens: int
    is_padding: bool
    tags: Mapping[str, Tag]
    field_names: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEntry:
    """What a listing says of a session; only a finished one has rows, only a failed one a cause."""

    key: SessionKey
    state: State
    cause: str = ""
    score: float | None = None
    rows: tuple[RowEntry, ...] = ()


class Store(Protocol):
    """A place for the rows of a run's rounds. A backend derives from it; `put` and `with` are the same for all."""

    def put(
        self,
        session: SessionKey,
        rows: Sequence[NewRow] = (),
        *,
        state: State = "finished",
        cause: str = "",
        score: float | None = None,
    ) -> None:
        """Record a session in one transaction: as running, as finished with all its rows, or as failed with a cause.

        Running may become finished or failed; nothing else may be put twice.
        """
        self.put_all([NewSession(session, rows, state, cause, score)])

    @abstractmethod
    def put_all(self, sessions: Sequence[NewSession]) -> None:
        """Record several sessions, as `put` does each; they may share one transaction, and one write to the disk.

        Each is whole or not at all. Where one is refused, those before it may be there or not, those after it are not.
        """
        ...

    def put_listing(self, listing: "Listing") -> None:
        """Record the sessions of a listing that has its rows' vectors, as `put_all` does."""
        self.put_all(listing.new_sessions())

    @abstractmethod
    def list(
        self,
        *,
        round: int | None = None,
        prompt: str | None = None,
        session: int | None = None,
        state: State | None = None,
    ) -> Sequence[SessionEntry]:
        """Sessions that match, in the order of their keys, with their rows' tags and counts but no tensors."""
        ...

    @abstractmethod
    def get(self, keys: Sequence[Key], fields: Sequence[str]) -> Sequence[dict[str, object]]:
        """These fields of these rows, in the order asked for."""
        ...

    def get_joined(self, keys: Sequence[Key], fields: Sequence[str]) -> "dict[str, Ragged]":
        """These fields of these rows, each one vector a row, joined field by field in the order asked for."""
        from raggedright.ragged import join_vectors  # needs torch

        found = self.get(keys, fields)
        return {name: join_vectors(keys, name, [row[name] for row in found]) for name in fields}

    @abstractmethod
    def update(self, values: Mapping[Key, Fields]) -> None:
        """Add fields to rows that are there (log-probs, values, advantages), all of them or none.

        A field that a row has already is replaced by one of the same type and dtype, so that a pass can be repeated.
        """
        ...

    @abstractmethod
    def delete(self, round: int) -> None:
        """Forget all sessions of a round and of those before it; nothing can be put there any more. Can be repeated."""
        ...

    @abstractmethod
    def wait(self, round: int, sessions: Collection[tuple[str, int]], *, timeout: float) -> Sequence[SessionEntry]:
        """The last attempt of each of these (prompt, session) pairs, once all are finished or failed.

        A StoreError that names those that are not, when `timeout` seconds have passed.
        """
        ...

    @abstractmethod
    def close(self) -> None:
        """Let go of the store; what was put stays."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
