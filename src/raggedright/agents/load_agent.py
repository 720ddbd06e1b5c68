"""The agent that a config names: a shipped one by its short name, or any "module:attribute".

An async function is the agent; a class is called with the options, and its instance is the agent.
"""

import inspect
from collections.abc import Mapping
from typing import cast

from raggedright.agents.agent_session import Agent
from raggedright.errors import ConfigError
from raggedright.plugins import call_with_options, find_plugin

SHIPPED = {
    "chat": "raggedright.agents.chat:Chat",
    "compacting_chat": "raggedright.agents.compacting_chat:CompactingChat",
    "compaction": "raggedright.agents.digits:compact",
    "delegation": "raggedright.agents.digits:delegate",
    "tiles": "raggedright.agents.tiles:Tiles",
}


def load_agent(name: str, options: Mapping[str, object]) -> Agent:
    """The agent of that name; options are for one that is a class."""
    agent = find_plugin(name, SHIPPED, key="agent.name")
    if inspect.isclass(agent):
        agent = call_with_options(agent, name=name, options=options, key="agent.options")
    elif options:
        raise ConfigError(f"agent.options are given and {name} is not a class; leave out {', '.join(options)}")
    if not callable(agent):
        kind = type(agent).__name__
        raise ConfigError(f"agent.name is {name!r}, a {kind} that cannot be called; give it an async __call__")
    # A wrapped function may return an awaitable without being async itself; that shows when it runs.
    function = agent if inspect.isfunction(agent) else type(agent).__call__
    is_plain = inspect.isfunction(function) and not hasattr(function, "__wrapped__")
    if is_plain and not inspect.iscoroutinefunction(function):
        raise ConfigError(f"agent.name is {name!r}, which is not async; write it as `async def`")
    return cast(Agent, agent)
