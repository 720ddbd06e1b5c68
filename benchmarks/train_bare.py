"""A bare loop as the lower bound: the verification round in plain torch and nothing else, on the same model and tasks.

    python benchmarks/train_bare.py MODEL_FOLDER WARM_ROUNDS

Sessions are tuples in lists; no store, plan, ledger, metrics, agents or event loop; nothing can fail or be resumed.
Sessions are assigned to ranks by number and are not balanced.
"""

import os
import random
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from raggedright.agents.digits import cut, tasks
from train_gate import Gate
from trl_prompts import LEARNING_RATE, PROMPTS, SESSIONS, STEPS

Row = tuple[int, list[int], list[int]]  # its session, the context, the reply
ROWS_PER_PASS = 227  # rows of nine tokens in a budget of 2,048 tokens


class Bare:
    """A rank's model, optimizer and tokenizer."""

    def __init__(self, folder: str, dp_rank: int, dp_size: int) -> None:
        self.dp_rank, self.dp_size = dp_rank, dp_size
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.eos, self.ids = tokenizer.eos_token_id, tokenizer.get_vocab()
        self.symbols = {i: symbol for symbol, i in self.ids.items()}
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), fused=True)
        self.generator = torch.Generator().manual_seed(dp_rank)

    @torch.no_grad()
    def reply(self, contexts: list[list[int]]) -> list[list[int]]:
        """Two tokens for each context."""
        longest = max(map(len, contexts))
        ids = torch.tensor([[self.eos] * (longest - len(c)) + c for c in contexts])
        mask = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in contexts])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        first = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=self.generator)
        out = self.model(
            input_ids=first,
            attention_mask=torch.cat([mask, torch.ones_like(first)], dim=1),
            position_ids=positions[:, -1:] + 1,
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        second = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=self.generator)
        return torch.cat([first, second], dim=1).tolist()

    def rollout(self, round: int) -> tuple[list[Row], Tensor]:
        """This rank's rows, and the reward of every session of the round."""
        rewards = torch.zeros(PROMPTS * SESSIONS)
        rows: list[Row] = []
        active = []
        for number in range(self.dp_rank, PROMPTS * SESSIONS, self.dp_size):
            digits = [str(d) for d in tasks(round * PROMPTS + number // SESSIONS, 0)["digits"]]  # type: ignore[attr-defined]
            chunks = cut(digits, random.Random(round * 10_000 + number), max_chunks=4)
            active.append((number, "-", chunks, max(digits)))
        while active:
            contexts = [[self.ids[c] for c in f"{memory}:{''.join(chunks[0])}="] for _, memory, chunks, _ in active]
            going = []
            for (number, _, chunks, best), context, reply in zip(active, contexts, self.reply(contexts), strict=True):
                rows.append((number, context, reply))
                memory = self.symbols[reply[0]]
                if not memory.isdigit() or reply[1] != self.eos:
                    continue
                if len(chunks) > 1:
                    going.append((number, memory, chunks[1:], best))
                else:
                    rewards[number] = 0.1 + 0.9 * (memory == best)
            active = going
        if self.dp_size > 1:
            dist.all_reduce(rewards)
        return rows, rewards

    def log_probs(self, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """Log-probs of the replies' tokens [rows, 2], and the entropy there."""
        longest = max(len(context) for _, context, _ in rows) + 2
        ids = torch.tensor([c + r + [self.eos] * (longest - len(c) - 2) for _, c, r in rows])
        start = torch.tensor([len(c) - 1 for _, c, _ in rows])
        mask = (torch.arange(longest) < (start + 3)[:, None]).long()
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        at = start[:, None] + torch.arange(2)
        all_log_probs = logits[torch.arange(len(rows))[:, None], at].log_softmax(-1)
        chosen = all_log_probs.gather(-1, torch.tensor([r for _, _, r in rows])[..., None])[..., 0]
        return chosen, -(all_log_probs.exp() * all_log_probs).sum(-1)

    def passes(self, rows: list[Row]) -> list[list[Row]]:
        return [rows[i : i + ROWS_PER_PASS] for i in range(0, len(rows), ROWS_PER_PASS)]

    def train(self, rows: list[Row], rewards: Tensor) -> None:
        """Old log-probs, then three steps of fifteen prompts each."""
        groups = rewards.view(PROMPTS, SESSIONS)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
        rows.sort(key=lambda row: len(row[1]))
        with torch.no_grad():
            old = [self.log_probs(part)[0] for part in self.passes(rows)]
        old_of = dict(zip(map(id, rows), torch.cat(old), strict=True))
        for step in range(STEPS):
            mine = [row for row in rows if row[0] // SESSIONS % STEPS == step]
            tokens = torch.tensor([2.0 * len(mine)])
            if self.dp_size > 1:
                dist.all_reduce(tokens)
            for part in self.passes(mine):
                log_probs, entropy = self.log_probs(part)
                ratio = (log_probs - torch.stack([old_of[id(row)] for row in part])).exp()
                advantage = advantages[[row[0] for row in part]][:, None]
                loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
                ((loss - 0.1 * entropy).sum() / tokens).backward()
            self.step()

    def step(self) -> None:
        """Gradients summed over ranks, clipped, AdamW."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.dp_size > 1:
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    warm, dp_size, dp_rank = int(sys.argv[2]), int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dp_size))
    if dp_size > 1:
        dist.init_process_group("gloo")
    gate = Gate(warm) if dp_rank == 0 else None
    bare = Bare(sys.argv[1], dp_rank, dp_size)
    left, round = warm, 0
    while True:
        round += 1
        rows, rewards = bare.rollout(round)
        bare.train(rows, rewards)
        count = torch.tensor([len(rows)])
        if dp_size > 1:
            dist.all_reduce(count)
        left -= 1
        following = gate.passed(rows=float(count)) if gate is not None else 0
        if left == 0:
            num_rounds = torch.tensor([following])
            if dp_size > 1:
                dist.broadcast(num_rounds, src=0)
            left = int(num_rounds)


if __name__ == "__main__":
    main()
