"""What a round writes down is what a report reads of it."""

from pathlib import Path

import numpy as np
import torch

from raggedright import Layout, Rows, close_ledger, make_plan
from raggedright.report.event_fields import Fields
from raggedright.report.run_events import Failure, RoundEvent
from raggedright.store.listing import listing_of
from raggedright.store.protocol import SessionEntry, SessionKey
from raggedright.train.record import RunRecorder, _board, _summary
from raggedright.train.round import RoundResult
from raggedright.train.sealed import SealedRound
from unit.made_runs import made_round


class Watched(dict[str, object]):
    """Remembers which keys were asked for."""

    def __init__(self, values: dict[str, object]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: object = None) -> object:
        self.asked.add(key)
        return super().get(key, default)


def made_result() -> RoundResult:
    """Two sessions of a row each, and one that failed."""
    rows = Rows.from_columns(
        prompt=["a", "b"], session=[0, 0], trajectory=[0, 0], prompt_tokens=[1, 1], response_tokens=[2, 3]
    )
    sessions = [
        SessionEntry(key=SessionKey(1, "a", 0, 0), state="finished", cause="", score=1.0, rows=()),
        SessionEntry(key=SessionKey(1, "b", 0, 0), state="finished", cause="", score=0.0, rows=()),
        SessionEntry(key=SessionKey(1, "b", 1, 0), state="failed", cause="timed out", score=None, rows=()),
    ]
    sealed = SealedRound(1, listing_of(sessions), rows)
    plan = make_plan(rows, Layout(dp_size=1, batch_size=2, mini_batch_size=1))
    advantages = torch.zeros(5)
    return RoundResult(sealed, plan, close_ledger(plan, sealed.failed), advantages, {"actor/lr": 0.5}, {"update": 0.1})


def test_every_key_of_a_rounds_event_is_read_and_every_key_that_is_read_is_written():
    written = _summary(made_result(), num_reused=1)
    assert isinstance(written["ledger"], dict)
    assert isinstance(written["failed"], list)
    ledger, (failed,) = Watched(written["ledger"]), map(Watched, written["failed"])
    event = Watched({"round": 1, **written, "ledger": ledger, "failed": [failed]})
    read = RoundEvent.of(Fields.of("line 1", event))
    assert event.asked == event.keys() == made_round(np.random.default_rng(0), 1, 1).keys()
    assert ledger.asked == ledger.keys() - {"padding_rows"}  # which the round has as well
    assert failed.asked == failed.keys()
    assert (read.rows, read.sessions, read.optimizer_steps, read.reused_sessions) == (2, 3, 2, 1)
    assert read.session_outcomes == {"trained": 2, "failed (timed out)": 1}
    assert read.failed == (Failure("b", 1, "timed out"),)


def test_every_number_of_a_round_is_in_tensorboard_at_its_round(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = RunRecorder.__new__(RunRecorder)
    recorder.board = _board(tmp_path, 1)
    for round in (1, 2):
        recorder._scalars({"critic/score/mean": round / 4, "perf/rows": 7, "actor/loss": float("nan")}, round)
    recorder.board.close()
    (folder,) = tmp_path.iterdir()
    found = EventAccumulator(str(folder)).Reload()
    assert {*found.Tags()["scalars"]} == {"critic/score/mean", "perf/rows", "actor/loss"}
    assert [(event.step, event.value) for event in found.Scalars("critic/score/mean")] == [(1, 0.25), (2, 0.5)]
    assert [event.value for event in found.Scalars("perf/rows")] == [7, 7]
