"""Going on with a run under another config: what may differ, and what would make it another run.

The rule: a key is fixed if the rounds that are done would have had other weights, tasks or groups with another value.
How rows are cut and where ranks run is not such: the same objective comes out.
"""

from collections.abc import Iterator

from raggedright.config.schema import Config
from raggedright.errors import ConfigError

# What the weights, the data or the groups of the run depend on from its first round on.
FIXED = (
    "seed",
    "model.path",
    "model.made",
    "model.symbols",
    "model.dtype",
    "prompts.source",
    "agent.name",
    "agent.options",
    "rollout.n",
    "rollout.dynamic_sampling",
    "rollout.max_sampled_batches",
    "train.batch_size",
    "critic.path",
)


def changes(old: Config, new: Config) -> list[str]:
    """Keys that differ, as `key old -> new`; a ConfigError where one may not."""
    found = {key: (before, after) for key, before, after in _differences(old, new)}
    refused = [_words(key, *values) for key, values in found.items() if key in FIXED]
    if old.has_critic != new.has_critic:
        refused.append(_words("critic.mini_batch_size", old.critic.mini_batch_size, new.critic.mini_batch_size))
    if refused:
        raise ConfigError(
            f"{new.out} holds a run that was started otherwise: {'; '.join(refused)}; "
            "give those keys their old values, another --out, or --fresh to start again"
        )
    return [_words(key, *values) for key, values in found.items() if key != "out"]


def _differences(old: Config, new: Config) -> Iterator[tuple[str, object, object]]:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for name in before:
        if isinstance(before[name], dict):
            for key in before[name]:
                if before[name][key] != after[name][key]:
                    yield f"{name}.{key}", before[name][key], after[name][key]
        elif before[name] != after[name]:
            yield name, before[name], after[name]


def _words(key: str, before: object, after: object) -> str:
    """What differs; of two tables, what is not the same in both."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return "; ".join(_words(f"{key}.{name}", before.get(name), after.get(name)) for name in names)
    return f"{key} {_shown(before)} -> {_shown(after)}"


def _shown(value: object) -> str:
    return "a table" if isinstance(value, dict) and value else repr(value)
