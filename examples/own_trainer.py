"""Your own training loop with raggedright between its rollout and its loss: GRPO in plain PyTorch.

    torchrun --nproc-per-node 2 examples/own_trainer.py

Sessions of a synthetic agent emit one to three trajectories each, or fail. Every rank plays its share of the sessions,
all ranks plan the same batch, each runs its micro-batches, and gradients are summed: the weights are the same for any
number of ranks. Replace `make_model` and `play` with your own.
"""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import raggedright.tensors as rt
from raggedright import Layout, Rows, Scores, Step, broadcast_to_rows, close_ledger, make_plan, session_advantages

NUM_TOKENS = 16
COLLATOR = rt.Collator(how="packed", token_id=0)
PROMPTS, SESSIONS, MINI_BATCH = 6, 8, 2  # a round: 6 prompts x 8 sessions, 2 prompts per optimizer step
STEPS_PER_ROUND = -(-PROMPTS // MINI_BATCH)  # three for any number of rows, so the length of the schedule is known


@dataclass(frozen=True, slots=True)
class Played:
    """The result of one session: its trajectories and its reward, or why it failed."""

    prompt: str
    session: int
    trajectories: list[dict[str, Tensor]]
    reward: float = 0.0
    failure: str = ""


def make_model() -> nn.Module:
    """A tiny model, the same on every rank; in float64, so that runs with one and two ranks can be compared exactly."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen3", vocab_size=NUM_TOKENS, num_hidden_layers=1, head_dim=16, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


@torch.no_grad()
def play(model: nn.Module, round: int, prompt: int, session: int) -> Played:
    """One session of a synthetic agent that is rewarded for even tokens; its randomness does not depend on the rank."""
    random = np.random.default_rng([round, prompt, session])
    if random.random() < 0.05:
        return Played(f"p{prompt}", session, [], failure="the tool timed out")
    trajectories, replies = [], []
    for _ in range(random.integers(1, 4)):
        ids, log_probs = random.integers(NUM_TOKENS, size=random.integers(2, 9)).tolist(), []
        reply_tokens = int(random.integers(1, 7))
        for _ in range(reply_tokens):
            token_log_probs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(random.choice(NUM_TOKENS, p=token_log_probs.exp().numpy())))
            log_probs.append(token_log_probs[ids[-1]])
        replies += ids[-reply_tokens:]
        mask = torch.ones(reply_tokens, dtype=torch.long)  # 0 for tokens that the policy did not generate
        row = {"input_ids": torch.tensor(ids), "response_mask": mask, "old_log_probs": torch.stack(log_probs)}
        trajectories.append(row)
    return Played(f"p{prompt}", session, trajectories, reward=sum(token % 2 == 0 for token in replies) / len(replies))


def play_round(model: nn.Module, round: int) -> list[Played]:
    """The sessions of the round, each played by one rank, in the same order on all ranks."""
    dp_rank, dp_size = dist.get_rank(), dist.get_world_size()
    sessions = [(prompt, session) for prompt in range(PROMPTS) for session in range(SESSIONS)]
    shares: list[list[Played]] = [[] for _ in range(dp_size)]
    dist.all_gather_object(shares, [play(model, round, *session) for session in sessions[dp_rank::dp_size]])
    return sorted((played for share in shares for played in share), key=lambda played: (played.prompt, played.session))


def make_batch(sessions: list[Played]) -> rt.TensorBatch:
    """The plan of the round and its tensors: real rows, then padding rows."""
    finished = [played for played in sessions if not played.failure]
    named = [(played, number, row) for played in finished for number, row in enumerate(played.trajectories)]
    tokens, response_tokens = ([len(row[name]) for *_, row in named] for name in ("input_ids", "response_mask"))
    rows = Rows.from_columns(
        prompt=[played.prompt for played, _, _ in named],
        session=[played.session for played, _, _ in named],
        trajectory=[number for _, number, _ in named],
        prompt_tokens=np.subtract(tokens, response_tokens),
        response_tokens=response_tokens,
        loss_tokens=[int(row["response_mask"].sum()) for *_, row in named],
    )
    prompt, session, score = zip(*[(played.prompt, played.session, played.reward) for played in finished], strict=True)
    scores = Scores.from_columns(prompt=prompt, session=session, score=score)  # one per session, for any number of rows
    advantages = broadcast_to_rows(session_advantages(scores, "grpo"), scores, rows)
    fields = [
        {**row, "advantages": torch.full(row["response_mask"].shape, advantage)}
        for (*_, row), advantage in zip(named, advantages.tolist(), strict=True)
    ]
    layout = Layout(
        dp_size=dist.get_world_size(), batch_size=PROMPTS, mini_batch_size=MINI_BATCH, rollout_n=SESSIONS,
        micro_batch_tokens=64, loss_agg="session-mean",
    )  # fmt: skip
    plan = make_plan(rows, layout)  # the same on every rank: plan.digest() can be compared
    return rt.TensorBatch.of(plan, fields, rt.infer_schema(rows, fields), COLLATOR)


def take_step(model: nn.Module, optimizer: torch.optim.AdamW, batch: rt.TensorBatch, step: Step) -> dict[str, Tensor]:
    """One optimizer step. Losses and metrics are terms of a sum: nothing is divided by micro-batches or ranks."""
    shares: dict[str, Tensor] = {}
    optimizer.zero_grad()
    for _, micro in batch.micro_batches(step, dist.get_rank(), ("old_log_probs", "advantages")):
        log_probs, _ = rt.forward_log_probs(model, micro)
        loss = rt.policy_loss(log_probs, micro.fields["old_log_probs"], micro.fields["advantages"], micro.weights)
        loss.loss.backward()
        shares = {name: shares.get(name, 0) + share for name, share in loss.metrics.items()}
    rt.sum_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return rt.sum_metrics(shares)


def train(rounds: int) -> nn.Module:
    """Train a model on the ranks of the process group."""
    model, metrics = make_model(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=rounds * STEPS_PER_ROUND)
    for round in range(rounds):
        sessions = play_round(model, round)
        batch = make_batch(sessions)
        for step in batch.plan.steps("actor"):
            if not step.skipped:  # a skipped step has no loss token on any rank
                metrics = take_step(model, optimizer, batch, step)
            schedule.step()
        failed = {(played.prompt, played.session): played.failure for played in sessions if played.failure}
        ledger = close_ledger(batch.plan, failed)  # an error unless every row was planned exactly once
        score = np.mean([played.reward for played in sessions if not played.failure])
        if dist.get_rank() == 0:
            print(f"round {round}: score {score:.3f}, ppo_kl {metrics['actor/ppo_kl']:.4f}\n{ledger}", flush=True)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny model with your own loop; start it with torchrun.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", help="where to save the weights")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trained = train(args.rounds)
    if args.out and dist.get_rank() == 0:
        torch.save(trained.state_dict(), args.out)
    dist.destroy_process_group()
