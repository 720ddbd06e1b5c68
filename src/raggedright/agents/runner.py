"""Runs a round's sessions to their end and puts each into the store: finished with its rows, or failed with a cause.

An agent can fail its own session only. Whatever it raises, returns or leaves undone becomes the cause of that session's
failure; the other sessions record the same bits as without it. Three errors are not an agent's and end the run: the
store's, the engine's, and the user's Ctrl-C. A failed session runs again under the next attempt, as often as the
settings say; what its failure means for its group is the trainer's business.

All sessions share one event loop in the calling thread; puts happen in that loop, in one place (`recorder`).

The surprise: a time-out does not wait for the agent. It is cancelled and gets a short grace; one that swallows the
cancellation is left behind, its session closed, and never runs again once the round is over.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from raggedright.agents.recorder import OnDone, SessionRecorder
from raggedright.agents.round import RoundRun
from raggedright.agents.session import Agent, Session, Task
from raggedright.agents.settings import RolloutSettings
from raggedright.agents.vision import Vision
from raggedright.errors import RaggedRightError
from raggedright.rollout.engine import Engine
from raggedright.sessions import SessionKey, SessionTable
from raggedright.store.protocol import Store

__all__ = ["RolloutSettings", "Runner"]


class Runner:
    """Runs an agent on tasks, with an engine; `run` can be called again and again. `vision` is for images."""

    def __init__(
        self,
        *,
        agent: Agent,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        settings: RolloutSettings,
        vision: Vision | None = None,
    ) -> None:
        self._agent, self._engine, self._tokenizer, self._settings = agent, engine, tokenizer, settings
        self._vision = vision
        self._round: RoundRun | None = None

    def run(
        self,
        store: Store,
        *,
        round: int,
        sessions: Sequence[tuple[Task, int]],
        greedy: bool = False,
        resume: bool = False,
        on_done: OnDone | None = None,
    ) -> SessionTable:
        """Run all of these (task, session number) pairs until each is finished or failed in the store; their table.

        With `resume`, those that the store has as finished, or as failed for good, are left as they are.
        `on_done` gets the number of sessions whose last attempt was just recorded. In the main thread an agent that
        blocks the loop is interrupted when its time is over; in other threads it is not (see `watchdog`).
        """
        _refuse_running_loop()
        settings = self._settings
        if greedy:
            settings = replace(settings, sampling=replace(settings.sampling, temperature=0.0))
        pairs = {(task.uid, number): (task, number) for task, number in sessions}
        if len(pairs) < len(sessions):
            twice = next(pair for pair in pairs if sum((t.uid, n) == pair for t, n in sessions) > 1)
            raise RaggedRightError(
                f"round {round}: session {twice[0]}/{twice[1]} is given twice; number them 0, 1, ..."
            )
        table = store.sessions(round)
        next_attempt, reused = dict.fromkeys(pairs, 0), []
        for i, pair in enumerate(zip(table.prompt.tolist(), table.session.tolist(), strict=True)):
            if pair in pairs:
                next_attempt[pair] = int(table.attempt[i]) + 1
                if resume and (not table.failed[i] or next_attempt[pair] >= settings.attempts):
                    del next_attempt[pair], pairs[pair]
                    reused.append(i)
        keys = [SessionKey(round, *pair, attempt) for pair, attempt in next_attempt.items()]
        recorder = SessionRecorder(store, round, keys, on_done)
        new_session = partial(
            Session,
            tokenizer=self._tokenizer,
            settings=settings,
            context_tokens=self._engine.context_tokens,
            vision=self._vision,
        )
        self._round = RoundRun(self._agent, self._engine, settings, recorder, new_session)
        try:
            self._round.run([(task, key) for (task, _), key in zip(pairs.values(), keys, strict=True)])
        finally:
            self._round = None
        return SessionTable.join([table.take(np.array(reused, dtype=np.int64)), *recorder.final])

    def cancel(self, *, record: bool = True) -> None:
        """End the run that is under way, if any: sessions that have not ended become failed (cancelled).

        Without `record` the store hears nothing of them, so that they can be run later as if they never had been.
        From a signal handler or from another thread; `run` returns soon after.
        """
        if (current := self._round) is not None:
            current.cancel(record=record)


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RaggedRightError("Runner.run drives an event loop of its own; call it outside of async code")
