"""Dynamic sampling: how many prompts come next, and which of them are trained on."""

import pytest

from raggedright.agents.agent_session import Task
from raggedright.sessions import Session, SessionKey, SessionTable
from raggedright.train.round_prompts import SampledPrompts

MOST = 16


def add_wave(sampled: SampledPrompts, names: str, on_failure: str = "exclude") -> None:
    """Prompts by how they end: s(ignal), e(qual scores), f(ailed), o(ne session finished)."""
    sessions = []
    for name in names:
        uid = f"{name}{len(sampled.tasks)}"
        sampled.tasks.append(Task(uid=uid, data={}))
        scores = {"s": (0.0, 1.0), "e": (1.0, 1.0), "f": (None, None), "o": (None, 1.0)}[name]
        for session, score in enumerate(scores):
            cause = "raised" if score is None else ""
            sessions.append(Session(key=SessionKey(1, uid, session), score=score, cause=cause))
    sampled.add_scores(SessionTable.of(1, sessions), on_failure)


@pytest.mark.parametrize(
    ("waves", "size"),
    [
        ([], 4),
        (["ssss"], 0),
        (["ssee"], 4),  # two are missing and half had signal
        (["ssse"], 2),  # one is missing and three of four had signal
        (["eeee"], 4),  # a batch at most
        (["eeff", "eeee", "eees"], 4),
        (["eeee", "eeee", "eeee", "eees"], 0),  # the limit
        (["eeee", "eeee", "eeee", "e"], 3),  # what the limit leaves
        (["sseo", "ss"], 0),
    ],
)
def test_a_wave_has_as_many_prompts_as_the_share_with_signal_asks_for(waves: list[str], size: int):
    sampled = SampledPrompts(batch_size=4)
    for wave in waves:
        add_wave(sampled, wave)
    assert sampled.next_wave(MOST) == size


@pytest.mark.parametrize(
    ("waves", "left_out"),
    [
        (["ssss"], {}),
        (["sesf", "ssos"], {"e1": "no signal", "f3": "no signal", "o6": "no signal", "s7": "batch full"}),
        (["sees", "efee"], {"e4": "no signal", "f5": "no signal", "e6": "no signal", "e7": "no signal"}),
        (["ffff", "feff", "eeef"], {f"f{i}": "no signal" for i in (0, 1, 2, 3, 4, 6, 7, 11)}),
    ],
)
def test_a_batch_has_prompts_with_signal_first_then_finished_ones_each_in_their_order(
    waves: list[str], left_out: dict[str, str]
):
    sampled = SampledPrompts(batch_size=4)
    for wave in waves:
        add_wave(sampled, wave)
    assert sampled.skipped_prompts() == left_out


def test_a_failed_session_that_scores_zero_gives_signal():
    sampled = SampledPrompts(batch_size=1)
    add_wave(sampled, "o", on_failure="zero")
    assert sampled.next_wave(MOST) == 0
