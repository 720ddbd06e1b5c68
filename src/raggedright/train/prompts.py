"""The tasks of a run: those that it trains on, and those of its evaluations.

Invariant: what this returns has enough tasks for every round and evaluation, so that none fails for want of them.
"""

from raggedright.agents.prompts import Tasks, load_tasks
from raggedright.config.schema import Config


def load_prompts(config: Config) -> tuple[Tasks, Tasks]:
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
    return tasks, eval_tasks
