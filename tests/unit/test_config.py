"""A run's config: all faults at once, in sentences, before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from raggedright.config import Config, dump_config, load_config
from raggedright.config.load import keys, make_config
from raggedright.config.resume import changes
from raggedright.errors import ConfigError

ROOT = Path(__file__).parents[2]
LEAST = {
    "model": {"made": {"model_type": "qwen3"}, "symbols": "01"},
    "prompts": {"source": "tasks.jsonl"},
    "agent": {"name": "compaction"},
    "train": {"rounds": 2, "batch_size": 4, "mini_batch_size": 2},
}


def config_with(**sections: dict[str, object]) -> Config:
    values = {name: {**LEAST.get(name, {}), **sections.get(name, {})} for name in {*LEAST, *sections}}
    return make_config(values, source="test")


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.toml")), ids=lambda path: path.name)
def test_every_shipped_config_is_read(path: Path) -> None:
    assert load_config(path).train.rounds > 0


def test_the_resolved_config_reads_back_as_it_was(tmp_path: Path) -> None:
    config = config_with(optimizer={"betas": [0.9, 0.99], "grad_clip": 0.5}, agent={"options": {"depth": 3}})
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml") == config


def test_the_command_line_wins_over_the_file_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config_with()))
    config = load_config(path, {"train": {"rounds": "7"}, "seed": "3"})
    assert (config.train.rounds, config.train.batch_size, config.seed) == (7, 4, 3)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(
            train={"rounds": 0, "align": "lmc"},
            rollout={"n": "many", "temprature": 1.0},
            optimizer={"learning_rate": 1e-3},
            parallel={"threds": 2},
        )
    text = str(caught.value)
    assert "test has 6 faults" in text
    for words in (
        "train.rounds is 0: it takes 1 or more",
        "train.align is 'lmc': it takes 'steps' or 'lcm'",
        "rollout.n is 'many': it takes a whole number",
        "parallel.threds: there is no such key; did you mean parallel.threads?",
    ):
        assert words in text
    assert "rollout.temprature: there is no such key; did you mean rollout.temperature?" in text
    assert "optimizer.learning_rate: there is no such key" in text


def test_an_unknown_key_outside_its_section_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match=r"mini_batch_size: there is no such key; did you mean train.mini_batch_size"):
        make_config({**LEAST, "mini_batch_size": 3}, source="test")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"advantages": "gae"}}, "gae and there is no critic"),
        ({"critic": {"mini_batch_size": 2}}, "has no use for values"),
        ({"critic": {"warmup_rounds": 1}}, "critic.warmup_rounds is 1"),
        ({"algorithm": {"advantages": "gae"}, "critic": {"mini_batch_size": 2, "warmup_rounds": 2}}, "never trains"),
        ({"store": {"backend": "memory"}, "parallel": {"dp": 2}}, "use sqlite"),
        ({"parallel": {"shard": "fsdp2"}}, "nothing to shard over"),
        ({"train": {"micro_batch_tokens": 8, "micro_batch_rows": 2}}, "give one of them"),
        ({"train": {"loss_agg": "seq-mean-token-sum-norm"}}, "loss_norm_tokens"),
        ({"rollout": {"max_tokens": 8, "max_row_tokens": 8}}, "no room for a prompt"),
        ({"rollout": {"max_row_tokens": 9_000}}, "may fit no micro-batch"),
        ({"model": {"path": "here"}}, "either path"),
        ({"model": {"symbols": ""}}, "give its symbols"),
        ({"model": {"made": {"hidden_size": 4}}}, "no model_type"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(sections: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_with(**sections)


def test_a_file_that_is_not_toml_or_not_there_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(ConfigError, match=r"bad.toml: not a TOML file: .*line 1"):
        load_config(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "none.toml")


def test_nothing_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "9")
    assert config_with().seed == 0


def test_every_key_has_a_line_of_help() -> None:
    assert [name for name, section, own in keys() if not section.model_fields[own].description] == []


def test_while_the_critic_warms_up_the_plan_is_for_the_critic_alone() -> None:
    config = config_with(algorithm={"advantages": "gae"}, critic={"mini_batch_size": 2, "warmup_rounds": 1})
    assert [config.layout(round).actor_trains for round in (1, 2)] == [False, True]


def test_cutting_the_sampling_distribution_is_warned_of() -> None:
    assert config_with().warnings() == []
    (warning,) = config_with(rollout={"top_p": 0.9}).warnings()
    assert "rollout.top_p is 0.9" in warning


@pytest.mark.parametrize("module", ["config", "report.run_page", "cli"])
def test_config_report_and_command_are_imported_without_torch(module):
    code = f"import sys, raggedright.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(("policy", "attempts"), [("exclude", 1), ("zero", 1), ("retry", 6)])
def test_only_the_policy_retry_runs_a_failed_session_again(policy, attempts):
    assert config_with(rollout={"on_failure": policy, "retries": 5}).rollout.attempts == attempts


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is a folder; give a TOML file"):
        load_config(tmp_path)


def test_a_fault_of_an_option_is_not_the_files(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config_with()))
    with pytest.raises(ConfigError, match=r"config\.toml with the options given has a fault"):
        load_config(path, {"train": {"rounds": "-7"}})


def test_of_tables_that_differ_only_the_keys_that_do_are_shown() -> None:
    made = config_with().model.made
    assert made is not None
    other = config_with(model={"made": {**made, "hidden_size": 48}, "symbols": config_with().model.symbols})
    with pytest.raises(ConfigError, match=r"otherwise: model\.made\.hidden_size None -> 48; give"):
        changes(config_with(), other)
