"""Each promise of DESIGN's plan, over random batches and layouts; `checks` recomputes what a plan says."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties import checks
from properties.strategies import ODD_BATCHES, batches, layouts, make_rows, odd_layouts, plans
from raggedright import Layout, Plan, Rows, make_plan
from raggedright.plan.layout import Collate


@given(plans())
def test_every_real_row_is_there_once_per_epoch_and_role(plan: Plan) -> None:
    checks.check_conservation(plan)


@given(plans())
def test_every_rank_has_the_same_number_of_micro_batches_and_none_is_empty(plan: Plan) -> None:
    checks.check_equal_counts(plan)


@given(plans())
def test_no_micro_batch_exceeds_the_cap_as_it_is_collated(plan: Plan) -> None:
    checks.check_cap(plan)


@given(batches(), st.integers(1, 3), st.integers(0, 100), st.sampled_from(get_args(Collate)))
def test_no_micro_batch_exceeds_the_cap_where_few_ranks_share_many_rows(
    rows: Rows, dp_size: int, more: int, collate: Collate
) -> None:
    budget = max(int(rows.tokens.max(initial=2)), 2) + more
    layout = Layout(dp_size=dp_size, batch_size=1, mini_batch_size=1, micro_batch_tokens=budget, collate=collate)
    checks.check_cap(make_plan(rows, layout))


@given(plans())
def test_weights_are_what_the_mode_declares_and_padding_weighs_zero(plan: Plan) -> None:
    checks.check_weights(plan)


@given(plans())
def test_forward_runs_on_the_ranks_of_the_first_epoch(plan: Plan) -> None:
    checks.check_forward_ranks(plan)


@given(plans(align="steps"))
def test_steps_are_fixed_by_config_hold_whole_prompts_and_pad_by_the_formula(plan: Plan) -> None:
    checks.check_steps(plan)


@given(plans(align="lcm"))
def test_lcm_pads_to_the_least_multiple_and_spreads_rows_evenly(plan: Plan) -> None:
    checks.check_lcm(plan)


@given(plans())
def test_a_step_on_padding_alone_or_without_loss_tokens_is_skipped_and_no_other(plan: Plan) -> None:
    for role in plan.trained_roles:
        for step in plan.steps(role):
            loss_tokens = sum(int(plan.rows.loss_tokens[i]) for i in checks.real_rows(plan, step))
            assert step.skipped == (loss_tokens == 0)


@given(plans(), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(plan: Plan, random) -> None:
    order = list(range(len(plan.rows)))
    random.shuffle(order)
    permuted = make_plan(plan.rows.take(np.array(order, dtype=np.int64)), plan.layout)
    assert checks.by_key(permuted) == checks.by_key(plan)
    assert permuted.digest() == plan.digest()


@given(plans())
def test_the_same_rows_give_the_same_plan(plan: Plan) -> None:
    again = make_plan(Rows.from_records(plan.rows.to_records()), plan.layout)
    assert checks.by_key(again) == checks.by_key(plan)
    assert again.digest() == plan.digest()


@given(st.data())
def test_padding_rows_in_the_input_change_nothing_about_the_others(data: st.DataObject) -> None:
    rows = data.draw(batches())
    layout = data.draw(layouts(rows))
    alone = make_plan(rows.take(~rows.is_padding), layout)
    assert checks.by_key(make_plan(rows, layout)) == checks.by_key(alone)


@given(plans())
def test_padding_rows_are_minimal_and_share_no_prompt_with_real_rows(plan: Plan) -> None:
    padded, num_rows = plan.padded_rows, len(plan.rows)
    assert len(padded) == num_rows + plan.num_padding_rows
    assert padded.key[:num_rows].tolist() == plan.rows.key.tolist()
    assert padded.is_padding[num_rows:].all()
    assert set(padded.tokens[num_rows:].tolist()) <= {plan.layout.min_row_tokens}
    assert not padded.loss_tokens[num_rows:].any()
    prompts = padded.prompt[num_rows:].tolist()
    assert len(set(prompts)) == len(prompts)
    assert not set(prompts) & set(plan.rows.prompt.tolist())
    assert plan.lengths.tolist() == [checks.length_of(plan, i) for i in range(len(padded))]


@pytest.mark.parametrize("batch", ODD_BATCHES)
def test_odd_batches_are_ordinary_cases(batch: str) -> None:
    rows = make_rows(ODD_BATCHES[batch])
    for layout in odd_layouts():
        checks.check_plan(make_plan(rows, layout))


@pytest.mark.slow
@settings(settings.get_profile("thorough"))
@given(plans())
def test_every_invariant_at_once_over_thousands_of_batches(plan: Plan) -> None:
    checks.check_plan(plan)
