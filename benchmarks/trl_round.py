"""TRL's GRPOTrainer under the gate, in a separate environment: 360 completions and three optimizer steps per round.

    .venv-trl/bin/python benchmarks/trl_round.py MODEL_FOLDER WARM_ROUNDS

The same model, prompts, completion length and optimizer as ours, in float32, without gradient checkpointing, saving or
reports: the additional cost of its defaults is not counted.
"""

import random
import sys
import tempfile

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from train_gate import Gate
from trl_prompts import COMPLETION, LEARNING_RATE, PROMPTS, SESSIONS, STEPS, prompt_text


class Rounds(TrainerCallback):
    """Passes the gate after every third optimizer step."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.tokens = gate, 0.0

    def on_step_end(self, args, state, control, **more):
        if state.global_step % STEPS == 0:
            self.gate.passed(rows=float(PROMPTS * SESSIONS), tokens=self.tokens)
            self.tokens = 0.0


def main() -> None:
    folder, warm = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(2)
    gate = Gate(warm)
    rounds = Rounds(gate)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draw = random.Random(0)

    def reward(prompts, completions, completion_ids, **more):
        rounds.tokens += sum(map(len, completion_ids))
        return [draw.random() for _ in completions]

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            max_grad_norm=1.0,
            max_steps=1_000_000,
            per_device_train_batch_size=PROMPTS * SESSIONS // STEPS,
            steps_per_generation=STEPS,
            gradient_accumulation_steps=1,
            num_generations=SESSIONS,
            max_completion_length=COMPLETION,
            temperature=1.0,
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [prompt_text(i) for i in range(PROMPTS * 50)]}),
            processing_class=tokenizer,
            callbacks=[rounds],
        )
        trainer.train()


if __name__ == "__main__":
    main()
