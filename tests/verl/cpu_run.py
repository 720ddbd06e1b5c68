"""A run of verl's own entry point on a CPU: its model and prompts, its command line, and its logged metrics.

The verification run: two ranks, 45 prompts per round in mini-batches of 15, 8 sessions per prompt, GRPO. From random
weights, a run needs fifty rounds to learn the format of a reply; here the model is taught the format beforehand, and a
dozen rounds show that it learns the right digit.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

from raggedright.agents.digits import DIGITS, SYMBOLS, tasks
from raggedright.train.load_models import make_tokenizer

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
TURN_END = "<|im_end|>"  # verl requires it of every Qwen tokenizer
DP, BATCH_SIZE, MINI_BATCH_SIZE, SESSIONS = 2, 45, 15, 8


def make_model(folder: Path, seed: int) -> None:
    """A Qwen3 of two layers over single characters, as in configs/compaction.toml, that answers with some digit."""
    tokenizer = make_tokenizer(SYMBOLS, [TURN_END])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "qwen3",
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=64,
            initializer_range=0.1,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    teach_form(model, tokenizer, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def teach_form(model: nn.Module, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Supervised steps on replies of a random digit and the end of text."""
    torch.set_num_threads(1)  # on a busy machine, more threads take minutes longer
    draw, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        texts = ["{}:{}{}{}={}".format(draw.choice("-" + DIGITS), *draw.choices(DIGITS, k=4)) for _ in range(64)]
        ids = torch.tensor([[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts])
        logits = model(input_ids=ids).logits[:, -3:-1]
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -2:].flatten()).backward()
        optimizer.step()


def make_prompts(file: Path, num_prompts: int, seed: int) -> None:
    """The digit tasks in verl's format: the agent's data is in `extra_info`."""
    rows = [tasks(index, seed) for index in range(num_prompts)]
    table = {
        "prompt": [[{"role": "user", "content": "the largest digit"}]] * num_prompts,
        "data_source": ["digits"] * num_prompts,
        "extra_info": [{"index": index, **row} for index, row in enumerate(rows)],
    }
    pq.write_table(pa.table(table), file)


def run_verl(folder: Path, *, rounds: int, settings: Mapping[str, object], timeout: float) -> list[dict[str, float]]:
    """Run verl with the plug-in, with all its files in `folder`; returns its metrics, round by round."""
    make_model(folder / "model", seed=0)
    make_prompts(folder / "prompts.parquet", BATCH_SIZE * rounds, seed=0)
    log, metrics = folder / "log", folder / "metrics.jsonl"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(folder, rounds, settings), env=environment(metrics), stdout=file, stderr=file, cwd=folder
        )
        try:
            code = process.wait(timeout)
        finally:
            process.terminate()  # Ray's processes end with their driver
            process.wait()
    assert code == 0, log.read_text(errors="replace")[-4000:]
    return [json.loads(line)["data"] for line in metrics.read_text().splitlines()]


def read_rows(folder: Path, number: int) -> list[dict]:
    """The rows of a round as verl wrote them; `uid` is the key: prompt, session and trajectory."""
    return [json.loads(line) for line in (folder / "rollouts" / f"{number}.jsonl").read_text().splitlines()]


def environment(metrics: Path) -> dict[str, str]:
    """The variables of a run; verl loads the external modules in all of its processes, in this order."""
    return os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,raggedright.verl",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "PYTHONPATH": os.pathsep.join((str(HERE), str(SOURCES))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # everything binds to the loopback
        "RAY_prestart_worker_first_driver": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
    }


def command(folder: Path, rounds: int, settings: Mapping[str, object]) -> list[str]:
    """`python -m verl.trainer.main_ppo` with all settings of a run on a CPU."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    values: dict[str, object] = {
        "hydra.run.dir": folder / "hydra",
        "trainer.v1.trainer_mode": "raggedright_sync",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": DP,
        "trainer.total_training_steps": rounds,
        "trainer.logger": "[file]",
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.rollout_data_dir": folder / "rollouts",
        "+ray_kwargs.ray_init.address": "local",
        "+ray_kwargs.ray_init.num_gpus": DP,
        "ray_kwargs.ray_init.num_cpus": 12,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": BATCH_SIZE,
        "data.max_prompt_length": 16,
        "data.max_response_length": 2,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        "reward.num_workers": 1,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.strategy": "fsdp2",
        f"+{actor}.fsdp_config.mixed_precision.param_dtype": "fp32",
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.use_torch_compile": False,
        f"{actor}.ppo_mini_batch_size": MINI_BATCH_SIZE,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": 8192,
        f"{actor}.clip_ratio_high": 0.28,
        f"{actor}.optim.lr": 3e-3,
        f"{actor}.optim.betas": "[0.9,0.99]",
        f"{actor}.optim.weight_decay": 0.0,
        f"{rollout}.name": "raggedright_local",
        f"{rollout}.n": SESSIONS,
        f"{rollout}.tensor_model_parallel_size": DP,
        f"{rollout}.dtype": "float32",
        f"{rollout}.agent.num_workers": 2,
        f"{rollout}.agent.default_agent_loop": "compaction",
    } | dict(settings)
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in values.items())]


def main(folder: str, rounds: str, *settings: str) -> None:
    """Print the rows and steps of a run, round by round; `trainer.v1.trainer_mode=sync` is verl without the plug-in."""
    out = Path(folder).resolve()
    out.mkdir(parents=True)
    overrides = dict(setting.split("=", 1) for setting in settings)
    steps = 0
    for number, of_round in enumerate(run_verl(out, rounds=int(rounds), settings=overrides, timeout=1e5), start=1):
        taken = int(of_round["actor/engine/optimizer_steps_max"]) - steps
        steps += taken
        rows, real = (round(of_round[f"actor/engine/{name}"] * DP * taken) for name in ("rows", "loss_rows"))
        tokens = int(of_round["perf/total_num_tokens"])
        score = of_round["critic/score/mean"]
        print(f"round {number}: {real} rows + {rows - real} padding, {tokens} tokens, {taken} steps, score {score:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
