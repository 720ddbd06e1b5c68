"""Tasks of the package reasoning-gym, and the scores of its own verifiers.

    [prompts]
    source = "reasoning_gym"
    options = { dataset = "chain_sum", max_terms = 3 }   # the dataset's name and options

    [agent]
    name = "chat"
    options = { reward = "reasoning_gym" }

Task i depends on (seed, i) and the options only. It has reasoning-gym's fields question, answer and metadata, and
`reasoning_gym` with the options, so that the verifier is the one of the dataset that made the task.

Invariant: no question of an evaluation is ever trained on, in any run and with any seed. A hash of the question's text
says whether it is held out: one in HELD_OUT is. Seeds alone do not guarantee this: small tasks repeat by chance, and
most datasets make task i of seed s from s + i, so neighbouring seeds have nearly the same tasks. For the same reason
the seed of a dataset is a hash here.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from typing import TYPE_CHECKING

from raggedright.agents.agent_session import Task
from raggedright.errors import ConfigError, RaggedRightError, install_hint

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

NAME = "reasoning_gym"
HELD_OUT = 8  # one in so many questions is for evaluations only
TRIES = 128  # tasks that are made until one is in the right part
FROM_THE_RUN = ("seed", "size")


class VerifierError(RaggedRightError):
    """A verifier failed on an answer."""


class GymTasks:
    """Makes task `index` of a seed; `held_out` chooses between the tasks of evaluations and of training."""

    def __init__(self, options: Mapping[str, object], *, held_out: bool, key: str, options_key: str) -> None:
        if find_spec("reasoning_gym") is None:
            raise ConfigError(f"{key} is {NAME}, which is not installed; {install_hint('tasks')}")
        self._options, self._held_out, self._key = dict(options), held_out, options_key
        _check_options(self._options, options_key)
        try:
            _dataset(json.dumps(self._options), 0)
        except Exception as error:  # a dataset checks its options with assertions, and may raise anything
            raise ConfigError(
                f"{options_key} does not fit reasoning_gym's {self._options['dataset']}: {_cause(error)}; change it"
            ) from error

    def __call__(self, index: int, seed: int) -> dict[str, object]:
        """The first of TRIES tasks, all of them this index's own, that is in the right part."""
        for number in range(index * TRIES, (index + 1) * TRIES):
            entry = self._entry(number, seed)
            if is_held_out(str(entry["question"])) == self._held_out:
                return {**entry, NAME: self._options}
        part = "an evaluation" if self._held_out else "training"
        raise ConfigError(
            f"{self._key}: none of {TRIES} tasks of reasoning_gym's {self._options['dataset']} has a question for "
            f"{part} (one in {HELD_OUT} different questions is for evaluations); choose options with more questions"
        )

    def _entry(self, number: int, seed: int) -> dict[str, object]:
        # Datasets are made for their default size, because some make all their tasks at once. Then comes another seed.
        size = _default_size(str(self._options["dataset"]))
        chunk, place = divmod(number, size)
        digest = sha256(f"{seed}/{chunk}".encode()).digest()
        try:
            return _dataset(json.dumps(self._options), int.from_bytes(digest[:8], "big") >> 33)[place]
        except Exception as error:
            raise ConfigError(
                f"{self._key}: reasoning_gym's {self._options['dataset']} fails to make task {number // TRIES:,} "
                f"({_cause(error)}); change the options"
            ) from error


def is_held_out(question: str) -> bool:
    """Whether a question is for evaluations only."""
    return sha256(question.encode()).digest()[0] % HELD_OUT == 0


def verify(task: Task, answer: str | None) -> float:
    """The score of an answer by the verifier of the dataset that the task is from; a VerifierError if that fails."""
    metadata = task.data.get("metadata")
    source = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    options = task.data.get(NAME, {"dataset": source})
    if not isinstance(options, Mapping) or not options.get("dataset") or "answer" not in task.data:
        raise ValueError(
            f"task {task.uid} is not of reasoning_gym: its fields are {', '.join(task.data)}; set prompts.source to "
            f"{NAME}, or agent.options.reward to 'module:function'"
        )
    dataset = _dataset(json.dumps(dict(options)), 0)
    try:
        return float(dataset.score_answer(answer, dict(task.data)))
    except Exception as error:  # some verifiers raise on text that they cannot parse, and a model may write anything
        raise VerifierError(
            f"task {task.uid}: reasoning_gym's {options['dataset']} cannot score {answer!r:.60}"
        ) from error


def _check_options(options: Mapping[str, object], key: str) -> None:
    """A ConfigError for a dataset or an option that does not exist."""
    from reasoning_gym.factory import DATASETS

    name = options.get("dataset")
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=3) if isinstance(name, str) else []
        hint = f"is it {' or '.join(near)}?" if near else f"it has {len(DATASETS)}, such as chain_sum"
        missing = "is missing" if name is None else f"is {name!r:.60}, which reasoning_gym does not have"
        raise ConfigError(f"{key}.dataset {missing}; {hint}")
    names = [field.name for field in fields(DATASETS[str(name)][1]) if field.name not in FROM_THE_RUN]
    for option in options:
        if option in FROM_THE_RUN:
            raise ConfigError(f"{key}.{option} is set; leave it out: tasks follow from the run's seed, without an end")
        if option not in names and option != "dataset":
            near = get_close_matches(option, names, n=1)
            hint = f"is it {near[0]}?" if near else f"it takes {', '.join(names)}"
            raise ConfigError(f"{key}.{option} is unknown to reasoning_gym's {name}; {hint}")


@lru_cache(maxsize=64)
def _dataset(options: str, seed: int) -> "ProceduralDataset":
    """A dataset of reasoning-gym; its options are JSON, so that they can be compared."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import create_dataset

    arguments = json.loads(options)
    name = arguments.pop("dataset")
    if name == "composite":  # a mixture: its datasets are tables with name, weight and config
        arguments["datasets"] = [DatasetSpec(**{"config": {}, **each}) for each in arguments.get("datasets", ())]
    return create_dataset(name, **arguments, seed=seed)


@lru_cache
def _default_size(name: str) -> int:
    from reasoning_gym.factory import DATASETS

    sizes = [field.default for field in fields(DATASETS[name][1]) if field.name == "size"]
    return sizes[0] if sizes and sizes[0] is not MISSING else 500


def _cause(error: Exception) -> str:
    """The type and the first 200 characters of an error's text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}".removesuffix(": ")
