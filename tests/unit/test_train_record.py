"""What a round writes down is what a report reads of it."""

from pathlib import Path

import numpy as np
import torch

from raggedright import Layout, close_ledger, make_plan
from raggedright.report.events import EventLog, Failure, read_events
from raggedright.sessions import Session, SessionKey, SessionTable, Trajectory
from raggedright.train.record import round_event
from raggedright.train.train_round import RoundResult
from unit.made_runs import made_round


def made_result() -> RoundResult:
    """Two sessions of a row each, and one that failed."""
    sessions = [
        Session(key=SessionKey(1, "a", 0), score=1.0, trajectories=[tokens(2)]),
        Session(key=SessionKey(1, "b", 0), score=0.0, trajectories=[tokens(3)]),
        Session(key=SessionKey(1, "b", 1), cause="timed out"),
    ]
    table = SessionTable.of(1, sessions)
    plan = make_plan(table.rows, Layout(dp_size=1, batch_size=2, mini_batch_size=1))
    advantages = torch.zeros(5)
    return RoundResult(
        [], table, table, plan, close_ledger(plan, table.causes), advantages, {"actor/lr": 0.5}, {"update": 0.1}
    )


def tokens(count: int) -> Trajectory:
    mask = np.ones(count, dtype=np.int64)
    return Trajectory(input_ids=np.arange(count + 1), response_mask=mask, rollout_log_probs=np.zeros(count))


def test_the_event_of_a_round_is_read_as_it_was_written(tmp_path: Path):
    written = round_event(1, made_result(), num_reused=1)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(written)
    (read,) = read_events(tmp_path / "events.jsonl").rounds
    assert read == written
    assert written.model_fields_set - {"event"} == made_round(np.random.default_rng(0), 1, 1).keys()
    assert (read.rows, read.sessions, read.optimizer_steps, read.ledger.reused_sessions) == (2, 3, 2, 1)
    assert read.ledger.sessions == {"trained": 2, "failed (timed out)": 1}
    assert read.failed == (Failure(prompt="b", session=1, cause="timed out"),)
