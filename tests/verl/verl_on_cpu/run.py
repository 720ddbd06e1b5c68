"""A run of verl's own entry point on a CPU: the model and the prompts it reads, and its command line.

The verification run: two ranks, 45 prompts a round in mini-batches of 15, 8 sessions a prompt, GRPO.
"""

import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from raggedright.agents.digits import SYMBOLS, tasks
from raggedright.train.models import make_tokenizer

SOURCES = Path(__file__).parents[3] / "src"
TURN_END = "<|im_end|>"  # verl asks it of every Qwen tokenizer
BATCH_SIZE, MINI_BATCH_SIZE, SESSIONS = 45, 15, 8


def make_model(folder: Path, seed: int) -> None:
    """A Qwen3 of two layers over single characters, as in configs/compaction.toml."""
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
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompts(file: Path, num_prompts: int, seed: int) -> None:
    """The digits' tasks as verl reads them: what an agent needs is in `extra_info`."""
    rows = [tasks(index, seed) for index in range(num_prompts)]
    table = {
        "prompt": [[{"role": "user", "content": "".join(row["digits"])}] for row in rows],
        "data_source": ["digits"] * num_prompts,
        "extra_info": [{"index": index, **row} for index, row in enumerate(rows)],
    }
    pq.write_table(pa.table(table), file)


def environment(*modules: str) -> dict[str, str]:
    """The variables of a run, with the external modules that verl loads in all its processes."""
    paths = [str(Path(__file__).parents[1]), str(SOURCES)]
    return os.environ | {
        "VERL_USE_EXTERNAL_MODULES": ",".join(["verl_on_cpu", *modules]),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def command(folder: Path, *, mode: str, rounds: int, dp: int = 2, settings: dict[str, object] | None = None) -> list[str]:
    """`python -m verl.trainer.main_ppo` with everything that a run on a CPU sets."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    values: dict[str, object] = {
        "hydra.run.dir": folder / "hydra",
        "trainer.v1.trainer_mode": mode,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": dp,
        "trainer.total_training_steps": rounds,
        "trainer.logger": "[file]",
        "trainer.project_name": "on_cpu",
        "trainer.experiment_name": mode,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "checkpoints",
        "+ray_kwargs.ray_init.address": "local",
        "+ray_kwargs.ray_init.num_gpus": dp,
        "ray_kwargs.ray_init.num_cpus": 16,
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
        f"{actor}.entropy_coeff": 0.1,
        f"{actor}.clip_ratio_high": 0.28,
        f"{actor}.optim.lr": 3e-3,
        f"{actor}.optim.betas": "[0.9,0.99]",
        f"{actor}.optim.weight_decay": 0.0,
        f"{rollout}.name": "raggedright_local",
        f"{rollout}.n": SESSIONS,
        f"{rollout}.tensor_model_parallel_size": dp,
        f"{rollout}.dtype": "float32",
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.agent.default_agent_loop": "compaction",
    } | (settings or {})
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in values.items())]
