"""The agent that a config names: a shipped one by its short name, or any "module:attribute".

An async function is the agent; a class is made with the options, and its instance is.
"""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import cast

from raggedright.agents.named import find_named
from raggedright.agents.session import Agent
from raggedright.errors import ConfigError

SHIPPED = {
    "chat": "raggedright.agents.chat:Chat",
    "compaction": "raggedright.agents.compaction:compact",
    "delegation": "raggedright.agents.delegation:delegate",
    "tiles": "raggedright.agents.tiles:Tiles",
}


def load_agent(name: str, options: Mapping[str, object]) -> Agent:
    """The agent of that name; options are for one that is a class."""
    if ":" not in name and name not in SHIPPED:
        near = get_close_matches(name, SHIPPED, n=1)
        hint = f"is it {near[0]}?" if near else f"shipped are {', '.join(SHIPPED)}; others are 'module:attribute'"
        raise ConfigError(f"agent.name is {name!r}, which is no agent; {hint}")
    found = find_named(SHIPPED.get(name, name), key="agent.name")
    if inspect.isclass(found):
        return _make(name, found, options)
    if options:
        raise ConfigError(f"agent.options are given and {name} is no class; leave out {', '.join(map(str, options))}")
    return _checked(name, found)


def _make(name: str, cls: type, options: Mapping[str, object]) -> Agent:
    taken = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        for option in options:
            if option not in taken:
                near = get_close_matches(option, taken, n=1)
                hint = f"is it {near[0]}?" if near else f"it takes {', '.join(taken) or 'none'}"
                raise ConfigError(f"agent.options.{option} is unknown to {name}; {hint}")
    needed = (
        p.name for p in taken.values() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )
    if missing := [option for option in needed if option not in options]:
        raise ConfigError(f"agent.options.{missing[0]} is missing; {name} needs {', '.join(missing)}")
    return _checked(name, cls(**options))


def _checked(name: str, agent: object) -> Agent:
    if not callable(agent):
        kind = type(agent).__name__
        raise ConfigError(f"agent.name is {name!r}, a {kind} that cannot be called; give it an async __call__")
    # A wrapped function may return an awaitable without being async itself; that shows when it runs.
    function = agent if inspect.isfunction(agent) else type(agent).__call__
    if (
        inspect.isfunction(function)
        and not inspect.iscoroutinefunction(function)
        and not hasattr(function, "__wrapped__")
    ):
        raise ConfigError(f"agent.name is {name!r}, which is not async; write it as `async def`")
    return cast(Agent, agent)
