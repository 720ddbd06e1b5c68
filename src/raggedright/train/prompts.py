"""The tasks of a run: those that it trains on, and those of its evaluations.

Invariant: what this returns has enough tasks for every round and evaluation, so that none fails for want of them.
With dynamic sampling a round may sample several times its batch, though never more tasks than the source has.
"""

from dataclasses import dataclass

from raggedright.agents.prompts import Tasks, load_tasks
from raggedright.agents.session import Task
from raggedright.config.schema import Config


@dataclass(slots=True)
class PromptSequence:
    """The tasks to train on, in order, and how many of them the rounds so far have drawn; a checkpoint has this."""

    tasks: Tasks
    config: Config
    num_drawn: int = 0

    @property
    def most(self) -> int:
        """The most tasks that one round may draw."""
        batch_size, rollout = self.config.train.batch_size, self.config.rollout
        most = batch_size * (rollout.max_sampled_batches if rollout.dynamic_sampling else 1)
        return min(most, self.tasks.num_different or most)

    def next(self, round: int, count: int, *, after: int) -> list[Task]:
        """`count` tasks of a round that has already drawn `after` others."""
        batch_size = self.config.train.batch_size
        if not self.config.rollout.dynamic_sampling:
            return self.tasks.of_round(round, batch_size)
        return self.tasks.draw(self.num_drawn + after, count, batch_size=batch_size, most=self.most)


def load_prompts(config: Config) -> tuple[PromptSequence, Tasks]:
    """Both, drawn with seeds of their own."""
    source, eval_source = config.prompts.source, config.prompts.eval_source
    tasks = load_tasks(source, seed=config.seed)
    tasks.check_enough(config.train.batch_size, "train.batch_size")
    if eval_source is None:
        eval_tasks = load_tasks(source, seed=config.seed + 1)
    else:
        eval_tasks = load_tasks(eval_source, seed=config.seed + 1, key="prompts.eval_source")
    if config.eval.every:
        eval_tasks.check_enough(config.eval.prompts, "eval.prompts")
    return PromptSequence(tasks, config), eval_tasks
