"""The rows that a rank reads for a round, and the padding rows after them."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from parallel.whole_runs import EXPERTS, IMAGES, write_run
from raggedright.config import load_config
from raggedright.errors import ConfigError, RowsError
from raggedright.plan.planner import make_plan
from raggedright.sessions import RowKey, Session, SessionTable
from raggedright.store.memory import MemoryStore
from raggedright.train.passes import read_batch
from raggedright.train.setup import Setup, set_up
from raggedright.train.train_round import gather_round, sample_round
from raggedright.train.world import World
from recorded import recorded_sessions

CPU = torch.device("cpu")


def run_first(setup: Setup) -> SessionTable:
    """The sessions of round 1, those that the store has left as they are."""
    sampled = sample_round(setup, 1)
    assert sampled is not None
    return sampled.rank_sessions


@pytest.mark.parametrize("changes", [{}, IMAGES], ids=["text", "images"])
def test_ranks_without_a_row_have_padding_rows_too(tmp_path: Path, changes: dict):
    """A round may have fewer rows than ranks, and those without one run as many micro-batches as the others."""
    one: dict[str, dict[str, object]] = {"train": {"batch_size": 1, "mini_batch_size": 1}, "rollout": {"n": 2}}
    config = load_config(write_run(tmp_path / "run", changes, one) / "config.toml")
    setup = set_up(config, World(0, 1, CPU))
    table = gather_round(setup.world, run_first(setup), num_sessions=2)
    num_ranks = len(table.rows) + 2
    plan = make_plan(table.rows, replace(setup.layout(1), dp_size=num_ranks))
    (step, *_) = plan.steps("actor")
    for dp_rank in range(num_ranks):
        batch = read_batch(replace(setup, world=World(dp_rank, num_ranks, CPU)), table, plan)
        names = {name for row in batch.fields for name in row}
        assert {"input_ids", "response_mask"} < names
        assert ("multi_modal_inputs" in names) == bool(changes)
        (micro,) = [micro for _, micro in batch.micro_batches(step, dp_rank)]
        assert ("pixel_values" in micro.inputs) == bool(changes)
        assert bool(micro.weights.loss.any()) == (sum(micro.response_tokens) >= setup.collator.min_row_tokens)
    setup.close()


@pytest.mark.parametrize(("changes", "match"), [(IMAGES, "has images"), (EXPERTS, "has experts.*or experts.replay")])
def test_a_tree_of_more_than_text_is_refused_before_a_session_runs(tmp_path: Path, changes: dict, match: str):
    tree: dict[str, dict[str, object]] = {"train": {"collate": "tree"}}
    config = load_config(write_run(tmp_path / "run", changes, tree) / "config.toml")
    with pytest.raises(ConfigError, match=f"train.collate is tree and the model {match}"):
        set_up(config, World(0, 1, CPU))


def test_a_row_that_the_plan_dropped_is_not_looked_at(tmp_path: Path):
    """It trains nothing, so it ends nothing."""
    config = load_config(write_run(tmp_path / "run") / "config.toml")
    setup = set_up(config, World(0, 1, CPU))
    sessions = recorded_after(setup)
    most = max(len(row.input_ids) for session in sessions for row in session.trajectories) - 1
    for longer_than, fails in ((most, False), (0, True)):
        other = SpoiltStore(longer_than)
        other.append(sessions)
        table = other.sessions(1)
        plan = make_plan(table.rows, replace(setup.layout(1), over_long="drop", micro_batch_tokens=most))
        assert len(plan.dropped)
        with pytest.raises(RowsError, match="rollout_log_probs is nan") if fails else nullcontext():
            read_batch(replace(setup, store=other), table, plan)
    setup.close()


@pytest.mark.parametrize("how", ["packed", "padded"])
def test_a_run_with_images_leaves_room_for_the_image_of_a_text_only_micro_batch(tmp_path: Path, how: str):
    """At a cap of 100, micro-batches of text had 103 tokens packed and 200 padded."""
    capped: dict[str, dict[str, object]] = {"train": {"collate": how, "micro_batch_tokens": 100}}
    config = load_config(write_run(tmp_path / "run", IMAGES, capped) / "config.toml")
    setup = set_up(config, World(0, 1, CPU))
    assert setup.collator.min_row_tokens == setup.layout(1).min_row_tokens == 3
    assert setup.layout(1).micro_batch_tokens == {"packed": 97, "padded": 82}[how]
    setup.close()
    tight: dict[str, dict[str, object]] = {"rollout": {"max_row_tokens": 98, "max_tokens": 4}}
    config = load_config(write_run(tmp_path / "tight", IMAGES, capped, tight) / "config.toml")
    with pytest.raises(
        ConfigError, match=r"micro_batch_tokens is 100, of which \d+ are for the image.*a row may have 98"
    ):
        set_up(config, World(0, 1, CPU))


def recorded_after(setup: Setup) -> list[Session]:
    run_first(setup)
    return recorded_sessions(setup.store, 1)


class SpoiltStore(MemoryStore):
    """Returns log-probs that are not numbers for rows of more than so many tokens."""

    def __init__(self, longer_than: int) -> None:
        super().__init__()
        self._longer_than = longer_than

    def read(self, keys: Sequence[RowKey], fields: Collection[str] | None = None) -> list[dict[str, NDArray]]:
        rows = super().read(keys, fields)
        for row in rows:
            if len(row["input_ids"]) > self._longer_than:
                row["rollout_log_probs"] = np.full_like(row["rollout_log_probs"], np.nan)
        return rows


def test_fields_that_an_agent_attaches_come_to_the_loss_by_name(tmp_path: Path):
    """Rows without the field have zeros, and so have padding rows."""
    config = load_config(write_run(tmp_path / "run") / "config.toml")
    setup = set_up(config, World(0, 1, CPU))
    sessions = recorded_after(setup)
    other = MemoryStore()
    other.append([taught(session) if session.key.session else session for session in sessions])
    table = other.sessions(1)
    plan = make_plan(table.rows, replace(setup.layout(1), dp_size=2))
    for dp_rank in range(2):
        batch = read_batch(replace(setup, store=other, world=World(dp_rank, 2, CPU)), table, plan)
        for step in plan.steps("actor"):
            for position, micro in batch.micro_batches(step, dp_rank, ("teacher_log_probs",)):
                for p, values in zip(position.tolist(), micro.per_row(micro.fields["teacher_log_probs"]), strict=True):
                    has_it = p < len(plan.rows) and table.rows.session[p] > 0
                    expected = torch.arange(len(values)) + 1.0 if has_it else torch.zeros(len(values))
                    assert torch.equal(values.double(), expected.double())
    setup.close()


def taught(session: Session) -> Session:
    """The session with a field of the agent's own in every row."""
    fields = [{"teacher_log_probs": np.arange(row.response_tokens) + 1.0} for row in session.trajectories]
    rows = zip(session.trajectories, fields, strict=True)
    return replace(session, trajectories=[replace(row, extra=extra) for row, extra in rows])
