"""Rules about single keys: which have no effect because of another key's value, and which a resumed run must keep.

A key that was set in the file or on the command line and has no effect is one warning. A key that was not set, or set
to no value, and has no effect is left out of the resolved config, so that training again from it does not warn.

A resumed run must keep a key if the finished rounds would have had other weights, tasks or groups with another value.
The keys that only decide how rows are cut and where ranks run may change, because the objective stays the same.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from raggedright.config.sections import Critic, Lora
from raggedright.errors import ConfigError

if TYPE_CHECKING:
    from raggedright.config.schema import Config

KEPT_ON_RESUME = (
    "seed", "model.path", "model.made", "model.symbols", "model.dtype", "prompts.source",
    "prompts.options", "agent.name", "agent.options",
    "rollout.n", "rollout.dynamic_sampling", "rollout.max_sampled_batches", "train.batch_size", "critic.path",
    *(f"lora.{name}" for name in Lora.model_fields),
)  # fmt: skip


class Rule(NamedTuple):
    """These keys have an effect only where the value of `decided_by` passes; `remedy` is how to make it pass."""

    keys: tuple[str, ...]
    decided_by: str
    passes: Callable[[object], bool]
    remedy: str


def _one_of(keys: str, decided_by: str, *values: str) -> Rule:
    return Rule(tuple(keys.split()), decided_by, lambda value: value in values, f"set it to {' or '.join(values)}")


def _is_set(value: object) -> bool:
    return value is not None


_OF_CRITIC = tuple(f"critic.{name}" for name in Critic.model_fields if name not in ("mini_batch_size", "warmup_rounds"))
_OF_LORA = tuple(f"lora.{name}" for name in Lora.model_fields if name != "rank")
RULES = (  # the first rule that a key breaks is reported
    Rule(("model.symbols",), "model.made", _is_set, "set it instead of model.path"),
    _one_of("model.compute_dtype", "model.dtype", "float32", "float64"),
    Rule(_OF_LORA, "lora.rank", _is_set, "set it to train an adapter"),
    Rule(("prompts.eval_source", "prompts.eval_options", "eval.prompts"), "eval.every", bool, "set it to 1 or more"),
    _one_of("rollout.retries", "rollout.on_failure", "retry"),
    Rule(("rollout.max_sampled_batches",), "rollout.dynamic_sampling", bool, "set it to true"),
    _one_of("train.loss_norm_tokens", "train.loss_agg", "seq-mean-token-sum-norm"),
    Rule(("train.over_long",), "train.micro_batch_rows", lambda rows: rows is None, "set train.micro_batch_tokens"),
    _one_of("algorithm.std", "algorithm.advantages", "grpo"),
    _one_of("algorithm.gamma algorithm.lam algorithm.whiten", "algorithm.advantages", "gae"),
    _one_of("algorithm.clip_low algorithm.clip_high algorithm.dual_clip", "algorithm.policy_loss", "ppo", "gspo"),
    _one_of("reference.coef reference.estimator", "reference.kl", "loss", "reward"),
    Rule(_OF_CRITIC, "critic.mini_batch_size", _is_set, "set it to train a critic"),
    _one_of("critic.final", "critic.decay", "linear", "cosine"),
    _one_of("optimizer.final", "optimizer.decay", "linear", "cosine"),
    _one_of(
        "parallel.cpus_per_rank parallel.gpus_per_rank parallel.placement parallel.start_timeout",
        "parallel.launcher",
        "ray",
    ),
    _one_of("store.storage_units store.timeout", "store.backend", "transfer_queue"),
    Rule(("logging.sample_every",), "logging.sample_sessions", bool, "set it to 1 or more"),
)


def without_effect(config: "Config", *, explicit: bool) -> Iterator[tuple[str, str]]:
    """Each key without effect, set explicitly or not, and the sentence that says why."""
    seen = set()
    for rule in RULES:
        deciding = config.store_backend if rule.decided_by == "store.backend" else _value(config, rule.decided_by)
        for key in () if rule.passes(deciding) else rule.keys:
            section, name = key.split(".")
            value = _value(config, key)
            is_explicit = name in getattr(config, section).model_fields_set and value is not None
            if key not in seen and is_explicit == explicit:
                seen.add(key)
                why = f"{rule.decided_by} is {'not set' if deciding is None else deciding}"
                yield key, f"{key} is {value} and has no effect: {why}; {rule.remedy}, or remove {key}"


def _value(config: "Config", key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def resume_changes(old: "Config", new: "Config") -> list[str]:
    """The keys that differ, as `key old -> new`; a ConfigError if a resumed run must keep one of them."""
    before, after = _values_by_key(old), _values_by_key(new)
    changed = {key: _change(key, before[key], after[key]) for key in before if before[key] != after[key]}
    kept = [key for key in changed if key in KEPT_ON_RESUME]
    if old.has_critic != new.has_critic:
        kept.append("critic.mini_batch_size")
    if kept:
        raise ConfigError(
            f"{new.out} contains a run with other settings: {'; '.join(changed[key] for key in kept)}; "
            "give those keys their old values, another --out, or --fresh to start again"
        )
    return [change for key, change in changed.items() if key != "out"]


def _values_by_key(config: "Config") -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            values[name] = value
    return values


def _change(key: str, before: object, after: object) -> str:
    """`key old -> new`; for two tables, one such change per entry that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return "; ".join(_change(f"{key}.{name}", before.get(name), after.get(name)) for name in names)
    return f"{key} {_shown(before)} -> {_shown(after)}"


def _shown(value: object) -> str:
    return "a table" if isinstance(value, dict) and value else repr(value)
