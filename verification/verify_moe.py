"""Train a mixture-of-experts model on seeds that were not used for tuning, and measure the effect of router replay.

    python verification/verify_moe.py    # three runs, about ten minutes on two cores; finished runs are not repeated

Writes docs/verification-experts.md and docs/verification-experts.svg from the events and models of the runs.
"""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from curves import draw
from raggedright.rollout.engine import EngineContext, Generation, Request, Sampling
from raggedright.rollout.local_engine import LocalEngine
from raggedright.rows import Rows
from raggedright.store.sqlite import SqliteStore
from raggedright.tensors.collate import Collator
from raggedright.tensors.forward import forward_log_probs
from raggedright.tensors.routing import Routers, fill_up, find_routers
from verify import DOCS, END, FEW, RUNS, START, Job, Learning, curve, markdown, mean, run

SEEDS = (101, 102, 103)
JOBS = tuple(Job(f"experts, seed {seed}", config="experts", options=("--seed", str(seed))) for seed in SEEDS)
LOADS = ("actor/experts/load_max", "actor/experts/load_min", "actor/experts/dead")
HEAD = (
    "run", "score, first round", "score, last 10 rounds", "exact match, last 10", "rows per round",
    "most used expert, last 10", "least used expert, last 10", "dead experts, last 10", "learned",
)  # fmt: skip
GAP_HEAD = (
    "model", "tokens", "mean gap, replay", "mean gap, no replay", "99 %, replay", "99 %, no replay", "other experts",
)  # fmt: skip


def verify() -> bool:
    """Run the jobs, write the tables and the picture, and return whether every run learned."""
    runs = {job.name: Learning.of(run(job, RUNS)) for job in JOBS}
    rows = []
    for name, learning in runs.items():
        loads = [f"{mean(curve(learning.events, load)[-FEW:]):.3g}" for load in LOADS]
        rows.append((name, *learning.cells, learning.rows_cell, *loads, learning.learned_cell))
    gaps = [(job.name.split(", ")[1], *measure_gap(job.folder(RUNS)).cells) for job in JOBS]
    table, gap_table = markdown(HEAD, rows), markdown(GAP_HEAD, gaps)
    panels = [learning.panel(name) for name, learning in runs.items()]
    print(table, gap_table, sep="\n\n")
    text = TEXT.format(table=table, gaps=gap_table, start=START, end=END, rounds=len(panels[0].curves["score"]))
    (DOCS / "verification-experts.md").write_text(text)
    title = "Score and exact match by round: 8 experts, 2 per token, dp 2, router replay and balance loss"
    (DOCS / "verification-experts.svg").write_text(draw(panels, columns=3, title=title))
    print(f"written: {DOCS / 'verification-experts.md'}, {DOCS / 'verification-experts.svg'}")
    return all(learning.has_learned for learning in runs.values())


@dataclass(frozen=True, slots=True)
class Gap:
    """Differences between log-probs of training and rollout, and the share of routing choices that differ."""

    with_replay: Tensor
    without: Tensor
    other_experts: float

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table row."""
        ways = (self.with_replay, self.without)
        means, tails = [f"{way.mean():.5f}" for way in ways], [f"{way.quantile(0.99):.4f}" for way in ways]
        return f"{len(self.without):,}", *means, *tails, f"{self.other_experts:.2%}"


def measure_gap(folder: Path) -> Gap:
    """Sample in bfloat16 from the last prompts of a run, with its model, and compare with a float32 forward pass."""
    rollout, training = (_model(folder, dtype) for dtype in (torch.bfloat16, torch.float32))
    training.load_state_dict(rollout.state_dict())  # both models have the rounded weights
    requests = [Request(ids=ids, sampling=Sampling(max_tokens=24), noise=bytes([i % 256, i // 256]))
                for i, ids in enumerate(_prompts(folder))]  # fmt: skip
    engine = LocalEngine(EngineContext(model=rollout, routers=_routers(rollout)))
    answers = asyncio.run(_generate(engine, requests))
    ids = [torch.tensor([*request.ids, *answer.ids]) for request, answer in zip(requests, answers, strict=True)]
    sizes = [len(answer.ids) for answer in answers]
    rows = Rows.from_columns(
        prompt=[str(i) for i in range(len(ids))],
        session=[0] * len(ids),
        trajectory=[0] * len(ids),
        prompt_tokens=[len(request.ids) for request in requests],
        response_tokens=sizes,
    )
    fields = [
        {
            "input_ids": row,
            "response_mask": torch.ones(size, dtype=torch.long),
            "routed_experts": fill_up(torch.from_numpy(answer.routed_experts), len(row)),
        }
        for row, size, answer in zip(ids, sizes, answers, strict=True)
    ]
    micro = Collator(how="padded", token_id=0)(rows, fields, weight=rows.response_tokens * 0.0, step_loss_tokens=1)
    sampled = torch.tensor([log_prob for answer in answers for log_prob in answer.log_probs])
    with torch.no_grad():
        with _routers(training).replaying(micro.routing):
            with_replay = (forward_log_probs(training, micro).log_probs - sampled).abs()
        with _routers(training).recording() as experts:
            without = (forward_log_probs(training, micro).log_probs - sampled).abs()
    assert micro.routing is not None
    recorded, natural = micro.routing.flatten(0, 1), experts().long()
    kept = (recorded[..., :, None] == natural[..., None, :]).any(-1)
    return Gap(with_replay, without, 1 - float(kept[(recorded >= 0).all(-1)].double().mean()))


def _model(folder: Path, dtype: torch.dtype) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype).eval()


def _routers(model: nn.Module) -> Routers:
    routers = find_routers(model)
    assert routers is not None
    return routers


def _prompts(folder: Path) -> list[list[int]]:
    """The prompts of the rows that are still in the store of the run."""
    with SqliteStore(folder / "rows.db", read_only=True) as store:
        tables = [store.sessions(round) for round in store.rounds()]
        keys = [key for table in tables for key in table.row_keys(np.arange(len(table.rows)))]
        rows = store.read(keys, ("input_ids", "response_mask"))
    return [row["input_ids"][: len(row["input_ids"]) - len(row["response_mask"])].tolist() for row in rows]


async def _generate(engine: LocalEngine, requests: list[Request]) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


TEXT = """\
# Verification of mixture-of-experts models

`make verify-moe` trains each of these runs from scratch and writes this page. The config is `configs/experts.toml`: a
tiny Qwen3-MoE with 2 layers and 8 experts, 2 of them per token, on the compaction task, dp 2, batch_size 45,
mini_batch_size 15, rollout.n 8, {rounds} rounds, router replay on, balance_coef 0.01. It was not tuned on these seeds.

A run has learned if its first round scores below {start} and its last ten rounds score at least {end} on average.

![Score and exact match of every run](verification-experts.svg)

{table}

The load of an expert is its share of the routing choices of a step; 1 is an equal share. The most and the least used
expert are taken over all layers. Dead experts receive no token of a step.

The second table shows the effect of router replay. The trained models, rounded to bfloat16, sample in bfloat16 from the
prompts of their last round. The same weights then compute the log-probs of these tokens in float32, once with the
recorded experts and once with the experts that float32 chooses. The gap is the absolute difference of a token's
log-probs. "Other experts" is the share of recorded choices that float32 would not make.

{gaps}
"""


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(0 if verify() else 1)
