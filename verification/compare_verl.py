# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Compare verl with and without the plug-in on the same batches: `make compare-verl` writes docs/verl-comparison.md.

Every batch is stored in a real TransferQueue and goes through the steps of both trainers (tests/verl/both_ways.py).
The correct value is computed row by row. Every deviation of verl is also covered by a test.
"""

import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

warnings.simplefilter("ignore")

import cpu_ranks  # noqa: E402, F401 before verl asks for a device
import numpy as np  # noqa: E402
import torch  # noqa: E402
from both_ways import MODES, Trained, gradient_errors, imbalance, train_with  # noqa: E402
from ranks_in_turn import Model, update  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

from raggedright import Layout, Rows, make_plan  # noqa: E402
from raggedright.verl import weighted_losses  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "verl-comparison.md"
BOTH = ("sync", "raggedright_sync")
Sessions = list[tuple[str, int, list[tuple[int, int]], float]]


class Line(NamedTuple):
    """One line of the table: what is compared, verl's value, ours, and the correct value."""

    what: str
    verl: float
    ours: float
    right: float


def sessions_of(rows_of_session: Sequence[int], *, sessions: int = 2, seed: int = 0, mean: float = 9.0) -> Sessions:
    """Sessions with these numbers of rows, `sessions` per prompt, with lengths similar to the turns of agents."""
    generator = np.random.default_rng(seed)
    made: Sessions = []
    for i, count in enumerate(rows_of_session):
        responses = np.minimum(1 + generator.lognormal(math.log(mean), 0.6, size=count), 39).astype(int)
        lengths = [(int(generator.integers(2, 6)), int(response)) for response in responses]
        made.append((f"p{i // sessions}", i % sessions, lengths, float(i % 2)))
    return made


def sizes(batch_size: int, mini_batch_size: int, n: int = 2, **settings: object) -> dict[str, object]:
    """verl's config keys for the sizes, in prompts."""
    return {
        "data.train_batch_size": batch_size,
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini_batch_size,
        "actor_rollout_ref.rollout.n": n,
        **settings,
    }


def norm_keys(sessions: Sessions, mode: str) -> dict[str, object]:
    """The mode, and as constant of the norm mode what verl divides an unsplit batch by: its longest response."""
    longest = max(response for _, _, lengths, _ in sessions for _, response in lengths)
    return {"actor_rollout_ref.actor.loss_agg_mode": mode, "data.max_response_length": longest}


TWENTY = sessions_of([4, 1, 3, 2, 2, 4, 1, 3])


def compare_gradients(folder: Path) -> Iterator[Line]:
    """20 rows for a mini-batch of 32, on 4 ranks: verl adds 12 padding rows and divides by 32."""
    for role in ("actor", "critic"):
        for mode in MODES:
            keys = sizes(16, 16, **norm_keys(TWENTY, mode))
            errors = [
                max(gradient_errors(train_with(trainer, TWENTY, folder, dp_size=4, role=role, **keys), mode, role=role))
                for trainer in BOTH
            ]
            yield Line(f"gradient error, {role}, {mode}, 20 real rows of 32", errors[0], errors[1], 0.0)
    whole = sessions_of([4] * 8)
    keys = sizes(16, 16, **norm_keys(whole, MODES[-1]))
    errors = [
        max(gradient_errors(train_with(trainer, whole, folder, dp_size=4, **keys), MODES[-1], max_tokens=50))
        for trainer in BOTH
    ]
    yield Line(f"gradient error, actor, {MODES[-1]}, 32 real rows of 32, split into micro-batches", *errors, 0.0)


def compare_padding(folder: Path) -> Iterator[Line]:
    """Padding, steps and balance for row counts that are not divisible."""
    cases = {
        "298 rows, dp 2, mini-batch 32 x 4 of 96 prompts": (
            sessions_of([3] * 98 + [4], sessions=4),
            2,
            sizes(96, 32, 4),
        ),
        "257 rows, dp 8, mini-batch 128 x 2 of 256 prompts": (sessions_of([2] * 128 + [1]), 8, sizes(256, 128)),
        "48 rows, dp 2, mini-batch 2 x 2 of 8 prompts": (sessions_of([3] * 16), 2, sizes(8, 2)),
    }
    for name, (sessions, dp_size, keys) in cases.items():
        verl, ours = (train_with(trainer, sessions, folder, dp_size=dp_size, **keys) for trainer in BOTH)
        num_rows = sum(len(lengths) for _, _, lengths, _ in sessions)
        batch_size, mini_batch_size, *_ = map(int, map(str, keys.values()))
        steps = math.ceil(batch_size / mini_batch_size)
        least = -num_rows % (dp_size * steps)
        yield Line(f"padding rows, {name}", verl.padding[0], ours.padding[0], least)
        yield Line(f"padding tokens, {name}", verl.padding[1], ours.padding[1], 2 * least)
        yield Line(f"optimizer steps, {name}", verl.num_mini_batch, ours.num_mini_batch, steps)
        yield Line(f"fewest real rows in a step, {name}", fewest(verl), fewest(ours), num_rows // steps)
        yield Line(
            f"slowest rank of each mini-batch divided by the mean, {name}", imbalance(verl), imbalance(ours), 1.0
        )


def compare_padding_alone(folder: Path) -> Iterator[Line]:
    """Three rows, and a critic with a larger mini-batch than the actor: verl's actor has steps with only padding."""
    keys = sizes(4, 1, **{"critic.enable": True, "critic.ppo_mini_batch_size": 4})
    trained = [train_with(trainer, sessions_of([2, 1]), folder, dp_size=2, **keys) for trainer in BOTH]
    yield Line("optimizer steps with only padding, 3 rows", *(alone(one) for one in trained), 0)
    # With the plug-in there is no such step.
    yield Line("weight change in such a step relative to the step before (AdamW)", moved(), 0.0, 0.0)


def compare_metrics(folder: Path) -> Iterator[Line]:
    """Means over real rows and tokens."""
    one = sessions_of([1], sessions=1)
    keys = sizes(2, 2)
    trained = [train_with(trainer, one, folder, dp_size=4, **keys) for trainer in BOTH]
    (row,) = trained[1].real().values()
    right = math.exp(-float(row["old_log_probs"][row["response_mask"].bool()].mean()))
    yield Line(
        "rollout_corr/training_ppl, 1 real row of 4", *(t.metrics["rollout_corr/training_ppl"] for t in trained), right
    )
    keys = sizes(16, 16, **{"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "low_var_kl"})
    trained = [train_with(trainer, TWENTY, folder, dp_size=4, **keys) for trainer in BOTH]
    kl = "actor/reward_kl_penalty"
    yield Line(
        f"{kl}, which drives the KL controller, 20 real rows of 32", *(t.metrics[kl] for t in trained), right_kl(folder)
    )
    trained = [train_with(trainer, TWENTY, folder, dp_size=4, **sizes(16, 16)) for trainer in BOTH]
    for name in ("actor/pg_clipfrac", "actor/ppo_kl"):
        yield Line(
            f"{name}, 20 rows in micro-batches",
            *(loss_metrics(t)[name] for t in trained),
            exact_metrics(trained[1])[name],
        )


def compare_advantages(folder: Path) -> Iterator[Line]:
    """Rewards 1, 0, 0, 0 and ten rows in session 0."""
    lengths = [[(3, 5)] * 10, [(3, 5)], [(3, 5)], [(3, 5)]]
    sessions: Sessions = [("p0", i, rows, float(i == 0)) for i, rows in enumerate(lengths)]
    rights = {"rloo": 1.0, "grpo_vectorized": 0.75 / 0.5, "gpg": 4 * 0.75, "reinforce_plus_plus_baseline": 0.75 / 0.5}
    for estimator, right in rights.items():
        keys = sizes(2, 2, 4, **{"algorithm.adv_estimator": estimator})
        values = [advantage(train_with(trainer, sessions, folder, dp_size=1, **keys)) for trainer in BOTH]
        yield Line(f"advantage of session 0, {estimator}, which has ten rows", *values, right)
    shares = []
    for trainer in BOTH:
        keys = sizes(2, 2, 4, **({"trainer.v1.raggedright.loss_agg": "session-mean"} if trainer != "sync" else {}))
        trained = train_with(trainer, sessions, folder, dp_size=1, **keys)
        weights = {
            key: float(row.get(weighted_losses.ACTOR_WEIGHT, torch.ones(1))) * int(row["response_mask"].sum())
            for key, row in trained.real().items()
        }
        shares.append(sum(w for key, w in weights.items() if key.rsplit("_", 2)[1] == "0") / sum(weights.values()))
    yield Line("session 0's share of the gradient (session-mean)", *shares, 0.25)


def compare_planning(folder: Path) -> Iterator[Line]:
    """Seconds to assign rows to 64 ranks; there is no correct value."""
    del folder
    for num_rows in (4_096, 32_768):
        generator = np.random.default_rng(0)
        lengths = np.clip(generator.lognormal(math.log(2_000), 1.0, size=num_rows), 16, 16_000).astype(np.int64)
        start = time.perf_counter()
        get_seqlen_balanced_partitions(calculate_workload(torch.from_numpy(lengths)), k_partitions=64, equal_size=True)
        middle = time.perf_counter()
        rows = Rows.from_columns(
            prompt=[f"p{i // 8}" for i in range(num_rows)], session=np.arange(num_rows) % 8, trajectory=[0] * num_rows,
            prompt_tokens=[8] * num_rows, response_tokens=lengths,
        )  # fmt: skip
        layout = Layout(
            cut="equal-rows", dp_size=64, batch_size=num_rows // 8, mini_batch_size=num_rows // 32, rollout_n=8
        )
        make_plan(rows, layout)
        yield Line(
            f"planning seconds, {num_rows:,} rows, dp 64", middle - start, time.perf_counter() - middle, math.nan
        )


def fewest(trained: Trained) -> int:
    """The smallest number of real rows in a mini-batch."""
    real = trained.real()
    return min(sum(key in real for key in keys) for keys in trained.mini_batches())


def alone(trained: Trained) -> int:
    """Mini-batches without a real row."""
    real = trained.real()
    return sum(not any(key in real for key in keys) for keys in trained.mini_batches())


def moved() -> float:
    """How far AdamW moves the weights in a step with zero gradient, relative to the step before."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    norms = []
    for scale in (1.0, 0.0):
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        for p in model.parameters():
            p.grad = scale * torch.ones_like(p)
        optimizer.step()
        norms.append(float((torch.cat([p.detach().flatten() for p in model.parameters()]) - before).norm()))
    return norms[1] / norms[0]


def loss_metrics(trained: Trained) -> dict[str, float]:
    """Metrics of the update, aggregated as in verl's workers."""
    config = omega_conf_to_dataclass(trained.trainer.config.actor_rollout_ref.actor)
    ours = weighted_losses.ACTOR_WEIGHT in trained.ranks[0][0]
    loss = partial(weighted_losses.weighted_policy_loss if ours else ppo_loss, config)
    _, metrics = update(
        Model(), trained.ranks, loss, num_mini_batch=trained.num_mini_batch, info=trained.info, max_tokens=130
    )
    return metrics


def exact_metrics(trained: Trained) -> dict[str, float]:
    """Token means over the real rows, computed explicitly."""
    model, clipped, kl = Model(), [], []
    for row in trained.real().values():
        made = model(torch.nested.as_nested_tensor([row["input_ids"]], layout=torch.jagged))["log_probs"].values()
        mask, count = row["response_mask"].bool(), len(row["responses"])
        log_ratio = (made[-count - 1 : -1] - row["old_log_probs"])[mask].detach()
        ratio, advantages = log_ratio.exp(), row["advantages"][mask]
        clipped.append(-advantages * ratio.clamp(0.8, 1.2) > -advantages * ratio)
        kl.append(-log_ratio)
    return {"actor/pg_clipfrac": float(torch.cat(clipped).double().mean()), "actor/ppo_kl": float(torch.cat(kl).mean())}


def right_kl(folder: Path) -> float:
    """The KL of the same rows without padding: one rank, and mini-batches of one row."""
    keys = sizes(1, 1, 1, **{"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "low_var_kl"})
    return train_with("sync", TWENTY, folder, dp_size=1, **keys).metrics["actor/reward_kl_penalty"]


def advantage(trained: Trained) -> float:
    """The advantage of the tokens of session 0."""
    key, row = next((key, row) for key, row in sorted(trained.real().items()) if key.rsplit("_", 2)[1] == "0")
    del key
    return float(row["advantages"][0])


COMPARISONS: tuple[Callable[[Path], Iterator[Line]], ...] = (
    compare_gradients, compare_padding, compare_padding_alone, compare_metrics, compare_advantages, compare_planning,
)  # fmt: skip


@contextmanager
def started() -> Iterator[None]:
    """Run Ray and TransferQueue during the comparison."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    ray.init(address="local", num_cpus=6, include_dashboard=False, object_store_memory=256 * 2**20, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    try:
        yield
    finally:
        tq.close()
        ray.shutdown()


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table."""
    head = ["| the same batch | verl 0.9.1 | with the plug-in | correct |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *(f"| {line.what} | {' | '.join(map(_show, line[1:]))} |" for line in lines)])


def _show(value: float) -> str:
    if math.isnan(value):
        return "-"
    if value and abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:,.3f}".rstrip("0").rstrip(".")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, started():
        lines = [line for compare in COMPARISONS for line in compare(Path(folder))]
    page = f"""# verl with and without the plug-in

`make compare-verl` wrote this page on {time.strftime("%Y-%m-%d")} with verl 0.9.1 and TransferQueue 0.1.11 on a CPU.
Each batch is stored in TransferQueue and goes through `_balance_batch` and `_compute_advantage` of verl's `sync`
trainer and of `raggedright_sync`. The update is verl's own, with the ranks one after another. The column "correct" is
computed row by row. Gradients with the plug-in differ from it by the rounding of weights to float32.

{table(lines)}
"""
    PAGE.write_text(page)
    sys.stdout.write(page)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
