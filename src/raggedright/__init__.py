"""raggedright: ragged rollouts in, right batches out.

    rows = Rows.from_jsonl("rows.jsonl")
    plan = make_plan(rows, Layout(dp_size=2, batch_size=45, mini_batch_size=15, rollout_n=8))

    for micro in plan.micro_batches(rank=0):
        print(micro.step, micro.keys, micro.weights, micro.num_padding)

Importing this needs only numpy.
"""

from raggedright.advantages import Scores, broadcast_to_rows, session_advantages
from raggedright.errors import ConfigError, RaggedRightError, RowsError
from raggedright.ledger import Ledger, LedgerError, Outcome, close_ledger
from raggedright.plan.assign import token_weights
from raggedright.plan.cut import Step
from raggedright.plan.layout import Layout
from raggedright.plan.measure import Imbalance, measure_imbalance
from raggedright.plan.planner import Plan, PlannedMicroBatch, make_plan
from raggedright.rows import Rows

__all__ = [
    "ConfigError",
    "Imbalance",
    "Layout",
    "Ledger",
    "LedgerError",
    "Outcome",
    "Plan",
    "PlannedMicroBatch",
    "RaggedRightError",
    "Rows",
    "RowsError",
    "Scores",
    "Step",
    "broadcast_to_rows",
    "close_ledger",
    "make_plan",
    "measure_imbalance",
    "session_advantages",
    "token_weights",
]
