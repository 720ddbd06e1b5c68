"""Tables of sessions: columns that say what the sessions say, however they were joined."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedright.errors import RowsError
from raggedright.sessions import (
    ROW_COLUMNS,
    Session,
    SessionError,
    SessionKey,
    SessionTable,
    Trajectory,
    check_session,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    return Trajectory(
        input_ids=np.arange(prompt + response),
        response_mask=np.array(draw(st.lists(st.integers(0, 1), min_size=response, max_size=response)), dtype=np.int64),
        rollout_log_probs=np.zeros(response, dtype=np.float32),
        role=draw(TEXTS),
        reward=draw(st.none() | st.floats(-1, 1)),
        weight_version=draw(st.integers(-1, 9)),
        extra={name: np.zeros(response) for name in draw(st.sets(st.sampled_from(["teacher", "b"])))},
    )


@st.composite
def rounds(draw: st.DrawFn) -> list[Session]:
    names = draw(st.sets(st.tuples(TEXTS, st.integers(0, 3)), max_size=12))
    sessions = []
    for prompt, number in sorted(names):
        key = SessionKey(3, prompt, number, draw(st.integers(0, 2)))
        if draw(st.booleans()):
            metrics = draw(st.dictionaries(st.sampled_from(["a", "b"]), st.floats(-1, 1)))
            of_session = draw(st.lists(trajectories(), max_size=3))
            sessions.append(Session(key=key, score=draw(st.floats(-5, 5)), metrics=metrics, trajectories=of_session))
        else:
            sessions.append(Session(key=key, cause=draw(TEXTS) + "!"))
    return sessions


def said(table: SessionTable) -> list[object]:
    """All that a table says, one plain value per session."""
    lines: list[object] = []
    for i in range(len(table)):
        at = np.flatnonzero(table.session_of_row == i)
        rows = [{name: table.row_columns[name][j] for name in ROW_COLUMNS} for j in at]
        metrics = {name: column[i] for name, column in table.metrics.items() if not np.isnan(column[i])}
        lines.append(repr((table.session_key(i), table.score[i], table.cause[i], metrics, rows)))
    return lines


@given(rounds())
def test_a_table_says_what_its_sessions_say(sessions: list[Session]):
    table = SessionTable.of(3, sessions)
    assert [table.session_key(i) for i in range(len(table))] == [session.key for session in sessions]
    assert table.causes == {s.key[1:3]: s.cause for s in sessions if s.cause}
    assert [*table.failed] == [bool(s.cause) for s in sessions]
    real = [(s, t) for s in sessions for t in s.trajectories]
    rows = table.rows
    assert rows.loss_tokens.tolist() == [t.loss_tokens for _, t in real]
    assert rows.prompt_tokens.tolist() == [t.prompt_tokens for _, t in real]
    assert [*zip(rows.prompt, rows.session, strict=True)] == [s.key[1:3] for s, _ in real]
    assert table.extra_fields == {name for _, t in real for name in t.extra}
    for name in table.metrics:
        values = [s.metrics[name] for s in sessions if name in s.metrics]
        assert table.mean_metrics("session")[f"session/{name}/mean"] == pytest.approx(np.mean(values), abs=1e-15)


@given(rounds(), st.integers(1, 4), st.randoms())
def test_tables_of_parts_join_to_the_table_of_all(sessions: list[Session], parts: int, random):
    shuffled = [*sessions]
    random.shuffle(shuffled)
    tables = [SessionTable.of(3, shuffled[part::parts]) for part in range(parts)]
    joined = SessionTable.join([pickle.loads(pickle.dumps(table)) for table in tables])
    assert said(joined) == said(SessionTable.of(3, sessions))


@given(rounds(), st.data())
def test_a_part_of_a_table_says_the_same_of_its_sessions(sessions: list[Session], data: st.DataObject):
    table = SessionTable.of(3, sessions)
    at = data.draw(st.permutations(range(len(sessions))))[: data.draw(st.integers(0, len(sessions)))]
    assert said(table.take(np.array(at, dtype=np.int64))) == [said(table)[i] for i in at]


@given(rounds())
def test_failed_sessions_count_as_zero_or_not_at_all(sessions: list[Session]):
    table = SessionTable.of(3, sessions)
    finished = [s for s in sessions if not s.cause]
    assert table.scores("exclude").score.tolist() == [s.score for s in finished]
    assert table.scores("zero").score.tolist() == [0.0 if s.cause else s.score for s in sessions]


def test_one_session_twice_is_refused_when_rows_are_made():
    session = Session(key=SessionKey(0, "p", 0), score=1.0, trajectories=[_one_token()])
    with pytest.raises(RowsError, match="p/0/0"):
        SessionTable.of(0, [session, session]).rows.tokens  # noqa: B018


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_ids", np.array([0.0, 1.0])),
        ("input_ids", np.array([0.0, np.nan])),
        ("input_ids", np.array([True, False])),
        ("response_mask", np.array([2])),
        ("response_mask", np.array([-1])),
        ("response_mask", np.array([0.5])),
        ("response_mask", np.array([np.nan])),
        ("rollout_log_probs", np.array([np.nan], dtype=np.float32)),
        ("rollout_log_probs", np.array([-np.inf])),
        ("generations", 10**400),
        ("generations", True),
        ("generations", 1.0),
        ("cut_generations", -1),
        ("weight_version", "x"),
        ("weight_version", -2),
        ("weight_version", 2**63),
        ("role", None),
        ("finish_reason", None),
    ],
)
def test_a_trajectory_with_a_value_that_cannot_be_recorded_is_refused_with_its_row_and_field(field: str, value: object):
    wrong = replace(_one_token(), **{field: value})  # pyright: ignore[reportArgumentType]
    session = Session(key=SessionKey(4, "p", 2, 1), score=1.0, trajectories=[_one_token(), wrong])
    with pytest.raises(SessionError, match=f"^round 4, row p/2/1, attempt 1: {field} "):
        check_session(session)


@pytest.mark.parametrize("name", ["input_ids", "response_mask", "rollout_log_probs", "__metadata__"])
def test_an_extra_field_cannot_replace_a_token_field(name: str):
    wrong = replace(_one_token(), extra={name: np.zeros(1, dtype=np.int64)})
    session = Session(key=SessionKey(4, "p", 2), score=1.0, trajectories=[wrong])
    with pytest.raises(SessionError, match=f"round 4, row p/2/0, attempt 0: .*{name}"):
        check_session(session)


def test_masks_and_ids_may_have_any_fitting_type():
    for mask in (np.array([True]), np.array([1], dtype=np.uint8), np.array([0.0])):
        fits = replace(_one_token(), input_ids=np.array([3, 4], dtype=np.uint16), response_mask=mask)
        check_session(Session(key=SessionKey(4, "p", 2), score=1.0, trajectories=[fits]))


def _one_token() -> Trajectory:
    ones = np.ones(1, dtype=np.int64)
    return Trajectory(input_ids=np.arange(2), response_mask=ones, rollout_log_probs=np.zeros(1, dtype=np.float32))
