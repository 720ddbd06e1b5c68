"""A plan as plain data, for JSON. Every `rows` counts or lists real rows only."""

from collections.abc import Mapping

from raggedright.ledger import close_ledger
from raggedright.plan.cut import Step
from raggedright.plan.measure import measure_imbalance, tokens_of
from raggedright.plan.plan import Plan


def plan_to_dict(plan: Plan, seconds: float) -> Mapping[str, object]:
    """The whole plan: totals, imbalance, ledger, and each role's steps down to the weight of each row."""
    imbalance = measure_imbalance(plan)
    return {
        "rows": int((~plan.rows.is_padding).sum()) - len(plan.dropped),
        "padding_rows": plan.num_padding_rows,
        "padding_tokens": plan.num_padding_rows * plan.layout.min_row_tokens,
        "dropped_rows": len(plan.dropped),
        "align": plan.layout.align,
        "multiple": plan.multiple,
        "seconds": round(seconds, 6),
        "digest": plan.digest(),
        "imbalance": {"rank": imbalance.rank, "slot": imbalance.slot},
        "ledger": close_ledger(plan).to_dict(),
        "roles": {role: {"steps": [_step(plan, step) for step in steps]} for role, steps in plan.roles.items()},
    }


def _step(plan: Plan, step: Step) -> Mapping[str, object]:
    num_rows, tokens = len(plan.rows), tokens_of(plan, step)
    return {
        "epoch": step.epoch,
        "rows": int((step.row < num_rows).sum()),
        "padding_rows": int((step.row >= num_rows).sum()),
        "skipped": step.skipped,
        "ranks": [
            {"micro_batches": [_micro_batch(plan, step, dp_rank, j, int(t)) for j, t in enumerate(of_rank)]}
            for dp_rank, of_rank in enumerate(tokens)
        ],
    }


def _micro_batch(plan: Plan, step: Step, dp_rank: int, slot: int, tokens: int) -> Mapping[str, object]:
    num_rows, keys = len(plan.rows), plan.rows.key
    row, weight = step.micro_batch(dp_rank, slot), step.micro_batch_weight(dp_rank, slot)
    pairs = zip(row.tolist(), weight.tolist(), strict=True)
    return {
        "tokens": tokens,
        "padding_rows": int((row >= num_rows).sum()),
        "rows": [{"key": keys[i], "weight": w} for i, w in pairs if i < num_rows],
    }
