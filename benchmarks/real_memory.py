"""Peak memory of one row with a large vocabulary, above weights, gradients and optimizer; prints MiB.

    python benchmarks/real_memory.py chunks|whole [--tokens 4096] [--vocabulary 152000]

The update of one row of a made Qwen3 (two layers of width 256) as the trainer takes it, with logits in chunks or whole.
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raggedright import Layout, Rows, make_plan
from raggedright.config.sections import Optimizer
from raggedright.tensors import Collator, TensorBatch, entropy_loss, forward_log_probs, infer_schema, policy_loss
from raggedright.tensors.forward import TokenOutputs, forward_outputs, whole_outputs
from raggedright.train.update import Learner
from raggedright.train.world import World
from train_gate import peak_mib, reset_peak

PROMPT_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logits", choices=("chunks", "whole"))
    parser.add_argument("--tokens", type=int, default=4_096)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    args = parser.parse_args()
    torch.set_num_threads(2)
    before = peak_mib()
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=args.vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    learner = Learner("actor", model, Optimizer(), World(0, 1, torch.device("cpu")))
    batch = one_row(args.tokens, args.vocabulary)
    (step,) = batch.plan.steps("actor")
    peaks = []
    for _ in range(2):  # the first makes the optimizer's state
        reset_peak()
        for _, micro in batch.micro_batches(step, 0, ("old_log_probs", "advantages")):
            if args.logits == "chunks":
                outputs = forward_log_probs(model, micro)
            else:
                outputs = TokenOutputs(*whole_outputs(forward_outputs(model, micro), micro.labels, 1.0, []))
            old, advantages = micro.fields["old_log_probs"], micro.fields["advantages"]
            loss = policy_loss(outputs.log_probs, old, advantages, micro.weights).loss
            (loss - 0.01 * entropy_loss(outputs.entropy, micro.weights).loss).backward()
            del outputs, loss
        peaks.append(peak_mib())
        learner.step(1.0)
    kept = 4 * sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    print(f"{peaks[1] - before - kept:.0f}")


def one_row(tokens: int, vocabulary: int) -> TensorBatch:
    """One row of random tokens, planned for one rank."""
    response = tokens - PROMPT_TOKENS
    rows = Rows.from_columns(
        prompt=["p"], session=[0], trajectory=[0], prompt_tokens=[PROMPT_TOKENS], response_tokens=[response]
    )
    fields = [
        {
            "input_ids": torch.randint(vocabulary, (tokens,)),
            "response_mask": torch.ones(response, dtype=torch.long),
            "old_log_probs": torch.full((response,), -12.0),
            "advantages": torch.ones(response),
        }
    ]
    plan = make_plan(rows, Layout(dp_size=1, batch_size=1, mini_batch_size=1, rollout_n=1))
    return TensorBatch.of(plan, fields, infer_schema(rows, fields), Collator(how="packed", token_id=0))


if __name__ == "__main__":
    main()
