"""TRL's GRPOTrainer on the same rows of a real model, under the gate, in a separate environment.

    .venv-trl/bin/python benchmarks/real_trl.py MODEL_FOLDER SHAPE WARM_ROUNDS MICRO_BATCH_ROWS [--checkpointing]

Two optimizer steps per generation, so that TRL computes old log-probs as we do; float32, no saving, no reports.
"""

import random
import sys
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from real_rows import LEARNING_RATE, PROMPTS, SESSIONS, SHAPES, STEPS, completion_ids, prompt_ids
from train_gate import Gate


class Rounds(TrainerCallback):
    """Passes the gate after the last optimizer step of a round."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_step_end(self, args, state, control, **more):
        if state.global_step % STEPS == 0:
            self.gate.passed()


def main() -> None:
    folder, shape, warm, micro_rows = sys.argv[1], SHAPES[sys.argv[2]], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(2)
    gate = Gate(warm)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draw = random.Random(0)

    def reward(prompts, completions, **more):
        return [draw.random() for _ in completions]

    def rollout(prompts, trainer):
        indexes = [int(prompt) for prompt in prompts]
        sessions = [position % SESSIONS for position in range(len(indexes))]
        completions = [completion_ids(i, k, shape) for i, k in zip(indexes, sessions, strict=True)]
        return {
            "prompt_ids": [prompt_ids(i, shape) for i in indexes],
            "completion_ids": completions,
            "logprobs": [[-10.0] * len(ids) for ids in completions],
        }

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing="--checkpointing" in sys.argv,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            max_steps=1_000_000,
            per_device_train_batch_size=micro_rows,
            gradient_accumulation_steps=PROMPTS * SESSIONS // STEPS // micro_rows,
            steps_per_generation=PROMPTS * SESSIONS // micro_rows,
            num_generations=SESSIONS,
            max_completion_length=shape.completion,
            temperature=1.0,
            beta=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            rollout_func=rollout,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(500)]}),
            processing_class=tokenizer,
            callbacks=[Rounds(gate)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
