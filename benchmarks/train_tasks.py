"""The tasks of the benchmark: its configs, and agents with a given number and length of rows."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from raggedright.agents.agent_session import Session, Task
from trl_prompts import COMPLETION, LEARNING_RATE, SYMBOLS, prompt_text

ROOT = Path(__file__).resolve().parent.parent


def tasks(index: int, seed: int) -> dict[str, object]:
    """A task with the prompt of this index."""
    return {"text": prompt_text(index)}


async def once(task: Task, session: Session) -> float:
    """One trajectory of up to three tokens, and a random reward."""
    await session.trajectory(str(task.data["text"])).generate(max_tokens=COMPLETION)
    return session.random.random()


class Many:
    """An agent with `rows` rows per session of `tokens` tokens each, that generates two tokens in each."""

    def __init__(self, *, rows: int, tokens: int) -> None:
        self._rows, self._tokens = rows, tokens

    async def __call__(self, task: Task, session: Session) -> float:
        """Generate one row after the other."""
        for _ in range(self._rows):
            ids = [session.random.randrange(len(SYMBOLS)) for _ in range(self._tokens - 2)]
            await session.trajectory(ids).generate(max_tokens=2)
        return session.random.random()


def write_config(folder: Path, policy: Path | None, /, **changes: Mapping[str, object]) -> Path:
    """Write the verification run's config, with another model and changed sections, into a new run folder."""
    config = tomllib.loads((ROOT / "configs/compaction.toml").read_text())
    config["out"] = str(folder)
    config["eval"] = {"every": 0}
    config["train"]["rounds"] = 100_000
    config["optimizer"]["lr"] = LEARNING_RATE
    if policy is not None:
        config["model"] = {"path": str(policy)}
    for section, values in changes.items():
        config[section] = config.get(section, {}) | dict(values)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    return folder
