"""For any plan, gradient and metrics equal those of the rows run one by one: real models, ranks one after another."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from transformers import PreTrainedModel

from raggedright.check import compare
from raggedright.check.cases import Able, Case, choices, covering_cases
from raggedright.check.check_inputs import BUILTIN, CRITICS, load_model
from raggedright.check.compare import batch_of, load_case, run_case
from raggedright.check.plain_losses import reference_step
from raggedright.tensors.losses import TokenWeights
from raggedright.tensors.tree import PrefixTrees

OPTIONS = choices([*BUILTIN, *CRITICS], [1, 2, 3, 4], ["float64", "float32"])
ABLE = Able(
    critic=[*BUILTIN, "mistral"],
    only_critic=["mistral"],
    experts=["qwen3-moe"],
    trees=["qwen3"],
    recompute=[*BUILTIN, "mistral"],
)
CASES = list(dict.fromkeys(case for seed in range(4) for case in covering_cases(OPTIONS, ABLE, seed=seed)))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(getattr(case, name)) for name in OPTIONS))
def test_no_plan_changes_gradient_or_metrics(case: Case):
    result = run_case(case)
    assert result.passed, result


def test_the_cases_cover_every_pair_of_choices_that_means_something():
    pairs = {pair for case in covering_cases(OPTIONS, ABLE, seed=0) for pair in _pairs(case)}
    for a, b in combinations(OPTIONS, 2):
        for x, y in product(OPTIONS[a], OPTIONS[b]):
            assert (a, x, b, y) in pairs or _is_nonsense({a: x, b: y}), (a, x, b, y)


def _is_nonsense(pair: dict[str, object]) -> bool:
    """What no model or loss has."""
    loss, model = pair.get("loss"), pair.get("model")
    routed = pair.get("experts", "natural") != "natural"
    of_policy = pair.keys() & {"kl", "entropy", "ratios", "dual_clip", "experts"}
    return (
        (loss == "value" and bool(of_policy))
        or (model == "mistral" and (bool(of_policy) or loss is not None))
        or (pair.get("dual_clip") is True and loss == "reinforce")
        or (pair.get("collate") == "tree" and (model not in (None, "qwen3") or routed))
        or (routed and model not in (None, "qwen3-moe"))
        or (pair.get("passes") == "recomputed" and pair.get("dtype") == "float64")
    )


def _pairs(case: Case) -> set[tuple]:
    values = [(name, getattr(case, name)) for name in OPTIONS]
    return {(*first, *second) for i, first in enumerate(values) for second in values[i + 1 :]}


def test_some_cases_have_much_padding_and_some_none():
    loaded = [(case, *load_case(case)) for case in CASES[:20]]
    padding = {batch_of(case, made_up, model).plan.num_padding_rows for case, model, made_up in loaded}
    assert 0 in padding
    assert max(padding) >= 10


def test_a_tree_whose_branches_see_each_other_is_caught(monkeypatch):
    case = Case(collate="tree", cut="one")
    assert run_case(case).passed
    sees = PrefixTrees.sees
    monkeypatch.setattr(PrefixTrees, "sees", lambda trees: torch.ones_like(sees(trees)).tril())
    assert not run_case(case).passed


def test_a_pack_whose_positions_run_on_is_caught(monkeypatch):
    """It is one long sequence to the model: wrong by nats, without a word."""
    forward = compare.forward_log_probs

    def run_on(model, micro, **options):
        positions = torch.arange(micro.inputs["input_ids"].shape[1])[None]
        return forward(model, replace(micro, inputs={**micro.inputs, "position_ids": positions}), **options)

    monkeypatch.setattr(compare, "forward_log_probs", run_on)
    assert run_case(Case(cut="one")).rel_error > 0.1


def test_a_batch_denominator_is_caught(monkeypatch):
    """verl 0.9.1 divides by rows that include padding: 20 real and 12 padding rows, gradient off by 0.375."""
    right = TokenWeights.from_mask

    def wrong(mask, response_tokens, *, loss, mean):
        return right(mask, response_tokens, loss=[weight * 20 / 32 for weight in loss], mean=mean)

    monkeypatch.setattr(TokenWeights, "from_mask", wrong)
    assert run_case(Case(align="lcm", loss_agg="seq-mean-token-mean")).rel_error == pytest.approx(0.375)


def test_metrics_over_padding_are_caught(monkeypatch):
    right = TokenWeights.from_mask

    def wrong(mask, response_tokens, *, loss, mean):
        return right(mask, response_tokens, loss=loss, mean=[weight / 2 for weight in mean])

    monkeypatch.setattr(TokenWeights, "from_mask", wrong)
    result = run_case(Case())
    assert result.rel_error < 1e-10
    assert not result.passed


def test_a_metric_without_a_plain_reference_is_told(monkeypatch):
    right = compare.entropy_loss

    def more(entropy, weights):
        sums = right(entropy, weights)
        return sums._replace(metrics={**sums.metrics, "actor/new": sums.loss.detach()})

    monkeypatch.setattr(compare, "entropy_loss", more)
    with pytest.raises(AssertionError, match="actor/new: only in the plan"):
        run_case(Case())


@pytest.mark.parametrize("unknown", [{"loss": "new"}, {"loss_agg": "new"}, {"kl": "new"}])
def test_a_loss_without_a_plain_reference_is_told(unknown):
    case = Case()
    model, made_up = load_case(case)
    with pytest.raises(KeyError, match="new"):
        reference_step(model, made_up, [0, 1], replace(case, **unknown))


def test_a_balance_loss_from_the_fractions_of_each_micro_batch_is_caught(monkeypatch):
    """The usual form, a product of two means over whatever is in a micro-batch."""
    right = compare.balance_loss

    def wrong(logits, micro, counts, routers):
        own = counts if micro.routing is None else compare.count_experts([micro.routing[micro.real]], routers)
        return right(logits, micro, own * counts.sum() / own.sum().clamp(min=1), routers)

    case = Case(model="qwen3-moe", experts="balanced", cut="rows")
    assert run_case(case).rel_error < 1e-10
    monkeypatch.setattr(compare, "balance_loss", wrong)
    assert run_case(case).rel_error > 1e-3


def check(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "raggedright", "check", *args], capture_output=True, text=True, timeout=300
    )


def test_a_model_directory_of_ones_own_is_checked_and_json_says_what_was_found(tmp_path):
    model = load_model("qwen3", "float32")
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(tmp_path)
    done = check("--model", str(tmp_path), "--dp", "2,3", "--dtype", "float64", "--most", "6", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["cases"]) == 6
    assert {case["model"] for case in found["cases"]} == {str(tmp_path)}
    names = {*OPTIONS, "critic", "padding_rows", "rel_error", "metric_drift", "tolerance"}
    assert all(names <= case.keys() for case in found["cases"])
    assert found["max_rel_error"] == max(case["rel_error"] for case in found["cases"]) <= 1e-10
    assert found["max_metric_drift"] <= 1e-10


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (("--model", "no-such-model"), 1, "--model no-such-model: not one of qwen3, qwen3-moe, qwen3-vl, mistral"),
        (("--dp", "0"), 2, "argument --dp: '0'"),
        (("--dtype", "int8"), 2, "invalid choice: 'int8'"),
    ],
)
def test_wrong_arguments_are_one_sentence(args, code, sentence):
    done = check(*args)
    assert done.returncode == code
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
