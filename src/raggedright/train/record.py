"""What a run leaves behind and shows while it runs, all written by the first rank: events, TensorBoard, progress.

Invariants: a round is one line of events, whole or not there; after a resume the later line of a round is the one that
counts; nothing here alters what is learnt.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from raggedright.agents.recorder import OnDone
from raggedright.config.schema import Config
from raggedright.report.events import EventLog
from raggedright.report.run_events import COLUMNS
from raggedright.store.listing import Listing
from raggedright.train.progress import Figures, Progress
from raggedright.train.round import RoundResult
from raggedright.train.samples import sample_sessions
from raggedright.train.setup import Setup

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS_FILE, TENSORBOARD_FOLDER = "events.jsonl", "tensorboard"
MOST_FAILED = 20  # causes written down a round


class RunRecorder:
    """Writes a run down; on ranks other than the first it does nothing."""

    def __init__(self, setup: Setup, *, first_round: int = 1, found: Mapping[int, int] | None = None) -> None:
        self.setup, self.config, self.found = setup, setup.config, found or {}
        self.began = perf_counter()
        self.rounds_done = first_round - 1
        if not setup.world.is_first:
            return
        self.log = EventLog(self.config.out / EVENTS_FILE)
        self.board = _board(self.config.out, first_round) if self.config.logging.tensorboard else None
        self.progress = Progress(self.config.train.rounds, done=self.rounds_done)
        num_found = self.found.get(first_round, 0)
        if words := found_words(self.config, first_round, num_found):
            self.progress.say(words)
        self.log.write(
            "start",
            time=_now(),
            version=version("raggedright"),
            config=self.config.model_dump(mode="json"),
            layout=self.config.layout(self.config.train.rounds),
            num_parameters=sum(p.numel() for p in setup.actor.model.parameters()),
            resumed_from=self.rounds_done,
            sessions_found=num_found,
            world={"dp": setup.world.dp_size, "device": setup.world.device.type},
        )

    def session_done(self, round: int) -> OnDone | None:
        """What is to be told of sessions of this rank that end."""
        if not self.setup.world.is_first:
            return None
        train, dp_size = self.config.train, self.setup.world.dp_size
        total = ceil(train.batch_size * self.config.rollout.n / dp_size)
        done = self.found.get(round, 0) // dp_size

        def count(ended: Listing) -> None:
            nonlocal done
            done = min(done + len(ended), total)
            self.progress.sessions(round, done, total)

        return count

    def round(self, round: int, result: RoundResult) -> None:
        """A round that has trained."""
        self.rounds_done = round
        if not self.setup.world.is_first:
            return
        self.log.write("round", round=round, **_summary(result, self.found.get(round, 0)))
        if self._is_sampled(round):
            rows = result.sealed.rows
            columns = {name: getattr(rows, name) for name in COLUMNS}
            self.log.write("rows", round=round, columns=columns, layout=result.plan.layout)
            sessions = sample_sessions(self.setup, result, self.config.logging.sample_sessions)
            self.log.write("samples", round=round, sessions=sessions)
        self._scalars(result.metrics | {f"seconds/{part}": s for part, s in result.seconds.items()}, round)
        self.progress.round(round, _figures(result))

    def evaluation(self, round: int, metrics: Mapping[str, float]) -> None:
        """An evaluation after a round."""
        if self.setup.world.is_first:
            self.log.write("eval", round=round, metrics=metrics)
            self._scalars(metrics, round)
            self.progress.evaluation(round, metrics)

    def end(self, reason: str) -> None:
        """The run's end: finished, interrupted or failed."""
        if self.setup.world.is_first:
            seconds = perf_counter() - self.began
            self.log.write("end", time=_now(), rounds=self.rounds_done, reason=reason, seconds=seconds)
            self.log.close()
            self.progress.close()
            if self.board is not None:
                self.board.close()

    def _scalars(self, metrics: Mapping[str, float], round: int) -> None:
        if self.board is not None:  # as one event: one a number takes longer than all else that is written
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

            values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
            writer = self.board.file_writer
            assert writer is not None
            writer.add_summary(Summary(value=values), round)

    def _is_sampled(self, round: int) -> bool:
        every = self.config.logging.sample_every or max(1, self.config.train.rounds // 10)
        return round in (1, self.config.train.rounds) or round % every == 0


def _figures(result: RoundResult) -> Figures:
    sealed, metrics = result.sealed, result.metrics
    first = next((f"{prompt}/{session}: {cause}" for (prompt, session), cause in sealed.failed.items()), "")
    return Figures(
        score=metrics["critic/score/mean"],
        rows=len(sealed.rows),
        padding_rows=result.plan.num_padding_rows,
        failed=len(sealed.failed),
        tokens_per_second=metrics["perf/tokens_per_second"],
        first_failure=first,
    )


def _summary(result: RoundResult, num_reused: int) -> dict[str, object]:
    """A round's line but for its number; sessions are re-used where the store had them when the run went on."""
    sealed, plan = result.sealed, result.plan
    steps = [step for role in plan.trained_roles for step in plan.steps(role)]
    failed = [{"prompt": p, "session": s, "cause": cause} for (p, s), cause in sealed.failed.items()]
    return {
        "metrics": result.metrics,
        "rows": len(sealed.rows),
        "padding_rows": plan.num_padding_rows,
        "sessions": len(sealed.sessions),
        "optimizer_steps": sum(not step.skipped for step in steps),
        "skipped_steps": sum(step.skipped for step in steps),
        "ledger": {**result.ledger.to_dict(), "reused_sessions": num_reused},
        "failed": failed[:MOST_FAILED],
        "seconds": result.seconds,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def found_words(config: Config, first_round: int, num_found: int) -> str:
    """What a run that goes on has found, and what comes next; nothing for one that begins."""
    if first_round == 1 and not num_found:
        return ""
    num_sessions = config.train.batch_size * config.rollout.n
    checkpoint = f"the checkpoint of round {first_round - 1}" if first_round > 1 else "no checkpoint"
    left = max(0, config.train.rounds - first_round + 1)
    if not left:
        done = f"all {config.train.rounds:,} rounds are done; raise train.rounds for more"
        return f"{config.out}: found {checkpoint}, and {done}"
    return (
        f"resuming {config.out}: found {checkpoint} and {num_found:,} of {num_sessions:,} sessions of round "
        f"{first_round}; {left:,} of {config.train.rounds:,} rounds to go"
    )


def _board(run_folder: Path, first_round: int) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    return SummaryWriter(str(run_folder / TENSORBOARD_FOLDER), purge_step=first_round)
