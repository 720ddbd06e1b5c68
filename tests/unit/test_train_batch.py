"""The rows that a rank reads for a round, and the padding rows beside them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel.whole_runs import EXPERTS, IMAGES, write_run
from raggedright.config import load_config
from raggedright.errors import ConfigError, RowsError
from raggedright.plan.plan import make_plan
from raggedright.train.round import read_batch, run_sessions
from raggedright.train.sealed import seal_round
from raggedright.train.setup import set_up
from raggedright.train.world import World

CPU = torch.device("cpu")


@pytest.mark.parametrize("changes", [{}, IMAGES], ids=["text", "images"])
def test_ranks_without_a_row_have_padding_rows_too(tmp_path: Path, changes: dict):
    """A round may have fewer rows than ranks, and those without one run as many micro-batches as the others."""
    one: dict[str, dict[str, object]] = {"train": {"batch_size": 1, "mini_batch_size": 1}, "rollout": {"n": 1}}
    config = load_config(write_run(tmp_path / "run", changes, one) / "config.toml")
    setup = set_up(config, World(0, 1, CPU))
    sealed = seal_round(setup.world, round=1, own=run_sessions(setup, 1), num_sessions=1)
    num_ranks = len(sealed.rows) + 2
    plan = make_plan(sealed.rows, replace(config.layout(1), dp_size=num_ranks))
    (step, *_) = plan.steps("actor")
    for dp_rank in range(num_ranks):
        batch = read_batch(replace(setup, world=World(dp_rank, num_ranks, CPU)), sealed, plan)
        names = {name for row in batch.fields for name in row}
        assert {"input_ids", "response_mask"} < names
        assert ("multi_modal_inputs" in names) == bool(changes)
        (micro,) = [micro for _, micro in batch.micro_batches(step, dp_rank)]
        assert ("pixel_values" in micro.inputs) == bool(changes)
        assert bool(micro.weights.loss.any()) == (sum(micro.response_tokens) > 1)
    setup.close()


@pytest.mark.parametrize(("changes", "match"), [(IMAGES, "has images"), (EXPERTS, "has experts.*or experts.replay")])
def test_a_tree_of_more_than_text_is_refused_before_a_session_runs(tmp_path: Path, changes: dict, match: str):
    tree: dict[str, dict[str, object]] = {"train": {"collate": "tree"}}
    config = load_config(write_run(tmp_path / "run", changes, tree) / "config.toml")
    with pytest.raises(ConfigError, match=f"train.collate is tree and the model {match}"):
        set_up(config, World(0, 1, CPU))


def test_rows_that_came_with_the_list_are_those_of_the_store(tmp_path: Path):
    """Short rows travel with the sealed round; after a resume, and where they are long, they are read."""
    config = load_config(write_run(tmp_path / "run") / "config.toml")
    setup = set_up(config, World(0, 1, CPU))
    sealed = seal_round(setup.world, round=1, own=run_sessions(setup, 1), num_sessions=24)
    assert sealed.sessions.vectors is not None
    again = run_sessions(setup, 1)  # all of them are in the store
    read = seal_round(setup.world, round=1, own=again, num_sessions=24)
    assert read.sessions.vectors is None
    plan = make_plan(sealed.rows, replace(config.layout(1), dp_size=2))
    for dp_rank in range(2):
        here = replace(setup, world=World(dp_rank, 2, CPU))
        batches = [read_batch(here, each, plan) for each in (sealed, read)]
        for step in plan.steps("actor"):
            pairs = zip(*(batch.micro_batches(step, dp_rank, ("rollout_log_probs",)) for batch in batches), strict=True)
            for (_, one), (_, other) in pairs:
                assert one.labels.equal(other.labels)
                assert one.inputs["input_ids"].equal(other.inputs["input_ids"])
                assert one.weights.loss.equal(other.weights.loss)
                assert one.fields["rollout_log_probs"].equal(other.fields["rollout_log_probs"])
    setup.close()


def test_a_row_that_the_plan_dropped_is_not_looked_at(tmp_path: Path):
    """Whether it came with the list or stayed in the store: it trains nothing, so it ends nothing."""
    config = load_config(write_run(tmp_path / "run") / "config.toml")
    setup = set_up(config, World(0, 1, CPU))
    sealed = seal_round(setup.world, round=1, own=run_sessions(setup, 1), num_sessions=24)
    carried = sealed.sessions.vectors
    assert carried is not None
    most = int(sealed.rows.tokens.max()) - 1
    plan = make_plan(sealed.rows, replace(config.layout(1), over_long="drop", micro_batch_tokens=most))
    column = carried["rollout_log_probs"]
    column.flat[int(column.starts[plan.dropped[0]])] = torch.nan
    batch = read_batch(setup, sealed, plan)
    assert sum(len(position) for step in plan.steps("actor") for position, _ in batch.micro_batches(step, 0)) > 0
    kept = int(plan.steps("actor")[0].row[0])
    column.flat[int(column.starts[kept])] = torch.nan
    with pytest.raises(RowsError, match=f"row {sealed.rows.key[kept]}: field rollout_log_probs is nan"):
        read_batch(setup, sealed, plan)
    setup.close()
