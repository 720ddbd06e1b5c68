"""A mixture of experts on seeds that nothing was tuned on, and the gap between rollout and training that replay closes.

    python verification/verify_moe.py    # three runs, about ten minutes on two cores; finished ones are not run again

Writes docs/verification-experts.md (the tables) and docs/verification-experts.svg from the runs' events and models.
"""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from curves import draw
from raggedright.rollout.local import LocalEngine
from raggedright.rollout.protocol import Generation, Request, Sampling
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
    "run", "score, first round", "score, last 10 rounds", "exact match, last 10", "rows a round",
    "busiest expert, last 10", "idlest expert, last 10", "dead experts, last 10", "learnt",
)  # fmt: skip
GAP_HEAD = ("model of", "tokens", "mean gap, replay", "mean gap, none", "99 %, replay", "99 %, none", "other experts")


def verify() -> bool:
    """Run them, write the tables and the picture; whether each one learnt."""
    runs = {job.name: Learning.of(run(job, RUNS)) for job in JOBS}
    rows = []
    for name, learning in runs.items():
        loads = [f"{mean(curve(learning.events, load)[-FEW:]):.3g}" for load in LOADS]
        rows.append((name, *learning.cells, learning.rows_cell, *loads, learning.learnt_cell))
    gaps = [(job.name.split(", ")[1], *measure_gap(job.folder(RUNS)).cells) for job in JOBS]
    table, gap_table = markdown(HEAD, rows), markdown(GAP_HEAD, gaps)
    panels = [learning.panel(name) for name, learning in runs.items()]
    print(table, gap_table, sep="\n\n")
    text = TEXT.format(table=table, gaps=gap_table, start=START, end=END, rounds=len(panels[0].curves["score"]))
    (DOCS / "verification-experts.md").write_text(text)
    title = "Score and exact match by round: 8 experts, 2 a token, dp 2, router replay and balance loss"
    (DOCS / "verification-experts.svg").write_text(draw(panels, columns=3, title=title))
    print(f"written: {DOCS / 'verification-experts.md'}, {DOCS / 'verification-experts.svg'}")
    return all(learning.has_learnt for learning in runs.values())


@dataclass(frozen=True, slots=True)
class Gap:
    """How far log-probs of training are from those of the rollout, and the share of choices that differ."""

    with_replay: Tensor
    without: Tensor
    other_experts: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Of a table."""
        ways = (self.with_replay, self.without)
        means, tails = [f"{way.mean():.5f}" for way in ways], [f"{way.quantile(0.99):.4f}" for way in ways]
        return f"{len(self.without):,}", *means, *tails, f"{self.other_experts:.2%}"


def measure_gap(folder: Path) -> Gap:
    """Sample in bfloat16 with the run's model from its last prompts, and compare with a pass in float32."""
    rollout, training = (_model(folder, dtype) for dtype in (torch.bfloat16, torch.float32))
    training.load_state_dict(rollout.state_dict())  # the rounded weights on both sides
    requests = [Request(ids=ids, sampling=Sampling(max_tokens=24), noise=bytes([i % 256, i // 256]))
                for i, ids in enumerate(_prompts(folder))]  # fmt: skip
    answers = asyncio.run(_generate(LocalEngine(rollout, routers=_routers(rollout)), requests))
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
    """The prompts of the rows that the run has kept."""
    with SqliteStore(folder / "rows.db", read_only=True) as store:
        entries = [row for session in store.list() for row in session.rows]
        fields = store.get([entry.key for entry in entries], ("input_ids",))
    ids = [row["input_ids"] for row in fields]
    return [
        row[: entry.prompt_tokens].tolist() for entry, row in zip(entries, ids, strict=True) if isinstance(row, Tensor)
    ]


async def _generate(engine: LocalEngine, requests: list[Request]) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


TEXT = """\
# Verification of experts

`make verify-moe` trains each of these from scratch and writes this page. The config is `configs/experts.toml`: a tiny
Qwen3-MoE of 2 layers with 8 experts, 2 of them a token, on the compaction task, dp 2, batch_size 45,
mini_batch_size 15, rollout.n 8, {rounds} rounds, router replay on, balance_coef 0.01. It was not tuned on these seeds.
A run has learnt if its first round scores below {start} and its last ten score at least {end} on average.

![Score and exact match of every run](verification-experts.svg)

{table}

An expert's load is its share of the choices of a step, 1 being a fair one; the busiest and the idlest are those of all
layers. Dead experts are those that no token of a step goes to.

What replay is worth: the trained models, rounded to bfloat16, sample in bfloat16 from the prompts of their last round,
and the same weights compute the log-probs of these tokens in float32, with the recorded experts and with those that
float32 chooses. A gap is the absolute difference of a token's log-probs; other experts are the share of the recorded
choices that float32 would not make.

{gaps}
"""


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(0 if verify() else 1)
