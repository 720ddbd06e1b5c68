"""Start the ranks of a run: one in this process, several processes on this machine, or on Ray."""

from raggedright.agents.load import load_agent
from raggedright.config.schema import Config
from raggedright.errors import ConfigError, install_hint
from raggedright.train.local_ranks import run_ranks
from raggedright.train.prompts import load_prompts
from raggedright.train.rank import run_rank
from raggedright.train.stop import STOP_FILE
from raggedright.train.trackers import check_trackers


def launch(config: Config, *, apart: bool = False) -> None:
    """Run all ranks of the run whose folder holds its config, to their end.

    With `apart`, the driver of a run on Ray is a process of its own, so that this one outlives Ray.
    """
    load_agent(config.agent.name, config.agent.options)  # what is wrong with them is told before any rank starts
    load_prompts(config)
    check_trackers(config)
    stop = config.out / STOP_FILE
    stop.unlink(missing_ok=True)  # asked for before there was a run to stop
    try:
        _launch(config, apart=apart)
    finally:
        stop.unlink(missing_ok=True)


def _launch(config: Config, *, apart: bool) -> None:
    if config.parallel.launcher == "ray":
        try:
            from raggedright.train.ray_driver import run_driver
            from raggedright.train.ray_launch import launch_on_ray
        except ImportError as error:
            raise ConfigError(f"parallel.launcher is ray and needs {error.name}; {install_hint('train,ray')}") from None
        (run_driver if apart else launch_on_ray)(config)
        return
    if config.parallel.dp == 1 and not config.parallel.max_restarts:
        run_rank(config.out)
        return
    run_ranks(config)
