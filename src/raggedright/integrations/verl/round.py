# pyright: reportMissingImports=false
"""One update's rows in verl: the plan, the stored batch behind it, and the batch as each role sees it.

The whole batch (real rows, then padding rows) is what verl's loop holds, clears and measures. Each role trains on a
view of it: its own order, and only as many padding rows as its own cut needs.
"""

from dataclasses import dataclass

import numpy as np
from transfer_queue import KVBatchMeta

from raggedright.arrays import Ints
from raggedright.integrations.verl.align import Grid, by_rank, step_of_row, weigh
from raggedright.plan.plan import Plan, Role
from raggedright.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class VerlRound:
    """The plan of an update and its batch; positions in the plan are positions in `whole`."""

    plan: Plan
    whole: KVBatchMeta
    grids: dict[Role, Grid]

    @property
    def rows(self) -> Rows:
        """The real rows, which come first in the batch."""
        return self.plan.rows

    @property
    def real(self) -> KVBatchMeta:
        """The batch without padding rows."""
        return self.whole.select_keys(self.whole.keys[: len(self.rows)])

    def view(self, role: Role, extra_info: dict[str, object] | None = None) -> KVBatchMeta:
        """The batch of a role as verl dispatches it: equal parts by rank, and each part in equal mini-batches."""
        batch = self.whole.select_keys([self.whole.keys[i] for i in by_rank(self.plan.steps(role))])
        if extra_info is not None:
            batch.extra_info = dict(extra_info)
        return batch

    def weights(self, role: Role) -> np.ndarray:
        """Weight of each row of the whole batch in a role's steps; padding weighs zero."""
        weights = np.zeros(len(self.whole.keys))
        weights[: len(self.rows)] = weigh(
            self.rows, self.grids[role], step_of_row(self.plan.steps(role), len(self.rows))
        )
        return weights

    def trains(self, role: Role) -> bool:
        """Whether the role has a row to learn from."""
        return role in self.plan.roles and bool((self.rows.loss_tokens > 0).any())

    def scales(self, role: Role) -> tuple[float, float]:
        """Optimizer steps over loss tokens, and over rows that have any."""
        num_steps, loss_tokens = len(self.plan.steps(role)), self.rows.loss_tokens
        return num_steps / max(1, int(loss_tokens.sum())), num_steps / max(1, int((loss_tokens > 0).sum()))

    def partitions(self, role: Role) -> list[list[int]]:
        """Positions on each rank, all steps together."""
        order: Ints = by_rank(self.plan.steps(role))
        return order.reshape(self.plan.steps(role)[0].dp_size, -1).tolist()
