"""A run's config: all faults at once, in sentences, before anything starts."""

import math
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from pages.config_keys import takes
from raggedright.cli import main
from raggedright.config import Config, dump_config, load_config
from raggedright.config.key_rules import RULES, resume_changes
from raggedright.config.load import keys, make_config, parse_config
from raggedright.errors import ConfigError

ROOT = Path(__file__).parents[2]
LEAST = {
    "model": {"made": {"model_type": "qwen3"}, "symbols": "01"},
    "prompts": {"source": "tasks.jsonl"},
    "agent": {"name": "compaction"},
    "train": {"rounds": 2, "batch_size": 4, "mini_batch_size": 2},
}


def config_values(**sections: object) -> dict[str, object]:
    least = {
        name: {**LEAST[name], **given} for name, given in sections.items() if name in LEAST and isinstance(given, dict)
    }
    return {**LEAST, **sections, **least}


def config_with(**sections: dict[str, object]) -> Config:
    return make_config(config_values(**sections), source="test")


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
        "rollout.n is 'many': it takes an integer",
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
        ({"critic": {"mini_batch_size": 2}}, "does not use values"),
        ({"critic": {"warmup_rounds": 1}}, "critic.warmup_rounds is 1"),
        ({"algorithm": {"advantages": "gae"}, "critic": {"mini_batch_size": 2, "warmup_rounds": 2}}, "never trains"),
        ({"store": {"backend": "memory"}, "parallel": {"dp": 2}}, "use sqlite"),
        ({"parallel": {"shard": "fsdp2"}}, "nothing to shard over"),
        ({"train": {"micro_batch_tokens": 8, "micro_batch_rows": 2}}, "micro_batch_rows is 2"),
        ({"train": {"loss_agg": "seq-mean-token-sum-norm"}}, "loss_norm_tokens"),
        ({"rollout": {"max_tokens": 8, "max_row_tokens": 8}}, "no room for a prompt"),
        ({"rollout": {"max_row_tokens": 9_000}}, "may fit no micro-batch"),
        ({"rollout": {"n": 1}}, "rollout.n is 1 and algorithm.advantages grpo.*reinforce[+]{2} or gae"),
        ({"rollout": {"n": 1}, "algorithm": {"std": False}}, "rollout.n is 1 and algorithm.advantages grpo"),
        ({"rollout": {"n": 1}, "algorithm": {"advantages": "rloo"}}, "rollout.n is 1 and algorithm.advantages rloo"),
        ({"rollout": {"n": 1}, "algorithm": {"advantages": "reinforce++-baseline"}}, "every advantage would be zero"),
        (
            {"rollout": {"n": 1}, "algorithm": {"advantages": "reinforce++"}, "train": {"batch_size": 1}},
            "rollout.n and train.batch_size are 1",
        ),
        (
            {"rollout": {"dynamic_sampling": True}, "algorithm": {"advantages": "reinforce++"}},
            "rollout.dynamic_sampling is true and algorithm.advantages reinforce",
        ),
        ({"model": {"path": "here"}}, "both path and made are set"),
        ({"model": {"symbols": ""}}, "set its symbols"),
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


def test_a_number_of_too_many_digits_is_refused_by_its_line_or_key_and_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"out = 'here'\nseed = {'9' * 5000}\n")
    with pytest.raises(ConfigError, match=r"config\.toml, line 2: a number has more than 4,300 digits"):
        load_config(path)
    path.write_text(dump_config(config_with()))
    with pytest.raises(ConfigError, match=r"seed is '9+… \(5,002 characters\): it takes an integer") as caught:
        load_config(path, {"seed": "9" * 5000})
    assert "9" * 200 not in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        ["check", "--seed"],
        ["check", "--dp"],
        ["plan", "rows.jsonl", "--seed"],
        ["plan", "rows.jsonl", "--dp"],
        ["train", "config.toml", "--max-restarts"],
    ],
)
def test_a_number_of_too_many_digits_on_the_command_line_is_not_repeated(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "9" * 5000])
    error = capsys.readouterr().err
    assert f"argument {command[-1]}: '999" in error
    assert "9" * 200 not in error


def test_nothing_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "9")
    assert config_with().seed == 0


def test_every_key_has_a_line_of_help() -> None:
    assert [key for key, field in keys().items() if not field.description] == []


def test_while_the_critic_warms_up_the_plan_is_for_the_critic_alone() -> None:
    config = config_with(algorithm={"advantages": "gae"}, critic={"mini_batch_size": 2, "warmup_rounds": 1})
    assert [config.layout(round).actor_trains for round in (1, 2)] == [False, True]


VALUES = (True, "text", 4.5, 4.0, 3, [1], {"a": 1}, date(2026, 1, 1))
OF_TYPE = {
    "an integer": (int,), "a number": (int, float), "`true`, `false`": (bool,), "text": (str,), "a path": (str,),
    "a table": (dict,), "2 numbers": (), "a list of text": (list,), "text or a list of text": (str,),
}  # fmt: skip


@pytest.mark.parametrize("key", keys())
def test_a_value_of_another_type_is_refused_by_key_value_and_type(key) -> None:
    """`mini_batch_size = true` was 1, and `batch_size = "45"` was 45."""
    allowed = OF_TYPE.get(takes(keys()[key]), ())  # a choice takes none of these values
    wrong = [value for value in VALUES if type(value) not in allowed]
    assert len(wrong) >= 5
    for value in wrong:
        section, _, name = key.partition(".")
        changed = config_values(**{section: {name: value} if name else value})
        with pytest.raises(ConfigError, match="test has a fault") as caught:
            make_config(changed, source="test")
        assert f"{key} is {value!r}: it takes " in str(caught.value)


def test_a_section_that_is_no_table_and_a_list_of_another_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="train is 3: it takes a table"):
        make_config({**LEAST, "train": 3}, source="test")
    for betas in ([0.9], [0.9, 0.99, 0.999]):
        with pytest.raises(ConfigError, match=r"optimizer\.betas is \[0\.9.*: it takes .* numbers"):
            config_with(optimizer={"betas": betas})
    with pytest.raises(ConfigError, match=r"optimizer\.betas\.1 is '0\.9': it takes a number"):
        config_with(optimizer={"betas": [0.9, "0.9"]})


def test_an_integer_may_stand_for_a_number_and_none_for_no_value() -> None:
    config = config_with(optimizer={"lr": 1, "grad_clip": None}, rollout={"max_row_tokens": None})
    assert (type(config.optimizer.lr), config.optimizer.lr, config.optimizer.grad_clip) == (float, 1.0, None)


@pytest.mark.parametrize("section", ["optimizer", "critic"])
@pytest.mark.parametrize("norm", [math.inf, None])
def test_a_run_whose_gradient_is_not_clipped_is_written_down_as_such(section: str, norm: float | None) -> None:
    sections: dict[str, dict[str, object]] = {"optimizer": {}, "critic": {"mini_batch_size": 1}}
    sections[section]["grad_clip"] = norm
    config = config_with(algorithm={"advantages": "gae"}, **sections)
    written = parse_config(dump_config(config), source="test")
    assert getattr(written, section).grad_clip is None
    assert written == config


@pytest.mark.parametrize(
    ("section", "text", "value"),
    [
        ("train", {"batch_size": "45"}, 45),
        ("train", {"micro_batch_rows": "3"}, 3),
        ("optimizer", {"lr": "1e-3"}, 1e-3),
        ("optimizer", {"lr": "1"}, 1.0),
        ("algorithm", {"dual_clip": "3"}, 3.0),
        ("model", {"activation_checkpointing": "true"}, True),
        ("critic", {"path": "45"}, "45"),
        ("optimizer", {"betas": [0.5, 1]}, (0.5, 1.0)),
    ],
)
def test_the_text_of_options_is_parsed_as_the_type_of_its_key(tmp_path: Path, section, text, value) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config_with()))
    ((name, _),) = text.items()
    parsed = getattr(getattr(load_config(path, {section: text}), section), name)
    assert (type(parsed), parsed) == (type(value), value)


@pytest.mark.parametrize(("text", "words"), [("0", "0: it takes 1 or more"), ("4.5", "'4.5': it takes an integer")])
def test_an_option_that_does_not_fit_is_refused_as_the_file_is(tmp_path: Path, text, words) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config_with()))
    with pytest.raises(ConfigError, match=f"train.batch_size is {words}"):
        load_config(path, {"train": {"batch_size": text}})


@pytest.mark.parametrize(
    ("section", "key", "text", "twice"),
    [
        ("model", "made", '{"model_type": "qwen3", "model_type": "llama"}', "model_type"),
        ("agent", "options", '{"tool": {"tries": 1, "tries": 2}}', "tries"),
    ],
)
def test_an_option_with_a_json_key_twice_is_refused(tmp_path: Path, section, key, text, twice) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config_with()))
    with pytest.raises(ConfigError, match=f"{section}.{key}: the key '{twice}' is given 2 times in one object"):
        load_config(path, {section: {key: text}})


INERT = [
    ("model.symbols", "01", {"model": {"path": "here", "made": None}}, "model.made is not set"),
    ("model.compute_dtype", "bfloat16", {"model": {"dtype": "bfloat16"}}, "model.dtype is bfloat16"),
    ("prompts.eval_source", "more.jsonl", {}, "eval.every is 0"),
    ("prompts.eval_options", {"split": "test"}, {}, "eval.every is 0"),
    ("eval.prompts", 8, {}, "eval.every is 0"),
    ("rollout.retries", 3, {"rollout": {"on_failure": "zero"}}, "rollout.on_failure is zero"),
    ("rollout.max_sampled_batches", 3, {}, "rollout.dynamic_sampling is False"),
    ("train.loss_norm_tokens", 99, {}, "train.loss_agg is token-mean"),
    ("train.over_long", "drop", {"train": {"micro_batch_rows": 2}}, "train.micro_batch_rows is 2"),
    ("algorithm.std", False, {"algorithm": {"advantages": "rloo"}}, "algorithm.advantages is rloo"),
    ("algorithm.gamma", 0.9, {}, "algorithm.advantages is grpo"),
    ("algorithm.lam", 0.9, {}, "algorithm.advantages is grpo"),
    ("algorithm.whiten", False, {}, "algorithm.advantages is grpo"),
    ("algorithm.clip_low", 0.1, {"algorithm": {"policy_loss": "reinforce"}}, "algorithm.policy_loss is reinforce"),
    ("algorithm.clip_high", 0.1, {"algorithm": {"policy_loss": "reinforce"}}, "algorithm.policy_loss is reinforce"),
    ("algorithm.dual_clip", 3.0, {"algorithm": {"policy_loss": "reinforce"}}, "algorithm.policy_loss is reinforce"),
    ("reference.coef", 0.1, {}, "reference.kl is none"),
    ("reference.estimator", "k1", {}, "reference.kl is none"),
    ("optimizer.final", 0.0, {}, "optimizer.decay is none"),
    ("critic.lr", 1e-5, {}, "critic.mini_batch_size is not set"),
    ("critic.betas", [0.9, 0.99], {}, "critic.mini_batch_size is not set"),
    ("critic.eps", 1e-5, {}, "critic.mini_batch_size is not set"),
    ("critic.weight_decay", 0.1, {}, "critic.mini_batch_size is not set"),
    ("critic.grad_clip", 2.0, {}, "critic.mini_batch_size is not set"),
    ("critic.warmup", 0.1, {}, "critic.mini_batch_size is not set"),
    ("critic.decay", "linear", {}, "critic.mini_batch_size is not set"),
    ("critic.final", 0.2, {}, "critic.mini_batch_size is not set"),
    ("critic.path", "here", {}, "critic.mini_batch_size is not set"),
    ("lora.alpha", 16, {}, "lora.rank is not set"),
    ("lora.dropout", 0, {}, "lora.rank is not set"),
    ("lora.target_modules", ["q_proj"], {}, "lora.rank is not set"),
    ("lora.exclude_modules", ["q_proj"], {}, "lora.rank is not set"),
    ("lora.target_parameters", ["down_proj"], {}, "lora.rank is not set"),
    ("lora.use_rslora", True, {}, "lora.rank is not set"),
    ("lora.init_lora_weights", "gaussian", {}, "lora.rank is not set"),
    ("critic.value_clip", 0.2, {}, "critic.mini_batch_size is not set"),
    ("parallel.cpus_per_rank", 2, {}, "parallel.launcher is local"),
    ("parallel.gpus_per_rank", 1, {}, "parallel.launcher is local"),
    ("parallel.placement", "spread", {}, "parallel.launcher is local"),
    ("parallel.start_timeout", 60, {}, "parallel.launcher is local"),
    ("store.storage_units", 4, {}, "store.backend is sqlite"),
    ("store.timeout", 10, {}, "store.backend is sqlite"),
    ("logging.sample_every", 5, {"logging": {"sample_sessions": 0}}, "logging.sample_sessions is 0"),
]


@pytest.mark.parametrize(("key", "value", "others", "why"), INERT, ids=[key for key, *_ in INERT])
def test_a_setting_without_effect_is_warned_of_when_it_is_set(key, value, others, why) -> None:
    section, name = key.split(".")
    assert not any(key in warning for warning in config_with(**others).warnings() if key != "model.symbols")
    warnings = config_with(**others | {section: {**others.get(section, {}), name: value}}).warnings()
    (warning,) = [warning for warning in warnings if warning.startswith(f"{key} is ")]
    assert f"has no effect: {why};" in warning
    assert "\n" not in warning


def test_a_setting_that_is_set_to_no_value_is_not_warned_of() -> None:
    assert config_with(model={"dtype": "bfloat16", "compute_dtype": None}).warnings() == []


@pytest.mark.parametrize("kl", ["loss", "reward"])
def test_a_kl_of_weight_zero_is_warned_of(kl: str) -> None:
    (warning,) = config_with(reference={"kl": kl, "coef": 0}).warnings()
    assert f"reference.kl is {kl} and reference.coef 0" in warning
    assert config_with(reference={"kl": kl}).warnings() == []


def test_options_of_a_tracker_that_is_not_used_are_refused_when_the_config_is_read() -> None:
    wandb = {"wandb": {"project": "digits"}}
    with pytest.raises(ConfigError, match=r"logging\.tracker_options\.wandb is set and logging\.trackers is \["):
        config_with(logging={"tracker_options": wandb})
    assert config_with(logging={"trackers": ["wandb"], "tracker_options": wandb}).warnings() == []


def test_every_rule_of_settings_without_effect_is_tried() -> None:
    assert {key for rule in RULES for key in rule.keys} == {key for key, *_ in INERT}


def test_a_setting_with_an_effect_is_not_warned_of() -> None:
    config = config_with(
        algorithm={"advantages": "gae", "gamma": 0.9, "dual_clip": 3.0},
        critic={"mini_batch_size": 2, "lr": 1e-5, "decay": "linear", "final": 0.0},
        reference={"kl": "loss", "coef": 0.1},
        parallel={"launcher": "ray", "cpus_per_rank": 2},
        store={"storage_units": 4},
    )
    assert config.warnings() == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.toml")), ids=lambda path: path.name)
def test_training_again_from_the_resolved_config_warns_of_nothing_new(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml") == config
    assert load_config(tmp_path / "config.toml").warnings() == config.warnings()


def test_the_command_warns_of_a_setting_without_effect_on_one_line() -> None:
    command = [sys.executable, "-m", "raggedright", "train", "configs/compaction.toml", "--dry-run"]
    options = ["--reference.coef", "0.5", "--train.batch_size", "4", "--train.mini_batch_size", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.startswith("warning: reference.coef is 0.5 and has no effect: reference.kl is none; ")
    assert done.stderr.count("\n") == 1


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
    with pytest.raises(ConfigError, match=r"settings: model\.made\.hidden_size None -> 48; give"):
        resume_changes(config_with(), other)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["train.rounds=3"], "'train.rounds=3' is not an option; set a key with --KEY VALUE"),
        (["--train.rounds", "3", "4"], "'4' is not an option"),
        (["--agent.options.tries", "3"], "agent.options.tries: there is no such key; did you mean agent.options?"),
        (["--seed", str(2**63)], f"seed is {2**63}: it takes less than {2**63}"),
    ],
)
def test_options_of_train_that_set_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["train", str(ROOT / "configs" / "compaction.toml"), "--dry-run", *options]) == 1
    assert words in capsys.readouterr().err
