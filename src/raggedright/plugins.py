"""Plug-ins that a config names: the short name of one that is shipped, or "module:attribute" for the user's code.

All kinds of plug-ins are loaded here, so that a wrong name, an unknown option and a missing option get the same kind of
ConfigError, which names the config key.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar, cast

from raggedright.errors import ConfigError

T = TypeVar("T")


def find_plugin(name: str, shipped: Mapping[str, str], *, key: str) -> object:
    """The attribute that a short name of `shipped` or a "module:attribute" refers to."""
    if ":" not in name and name not in shipped:
        names = f"shipped are {', '.join(shipped)}; others are 'module:attribute'"
        raise ConfigError(f"{key} is {name!r}, which does not exist; {_suggestion(name, shipped) or names}")
    return find_attribute(shipped.get(name, name), key=key)


def find_attribute(name: str, *, key: str) -> object:
    """The attribute of a module, which may be a file in the current folder; `key` is the config key, for errors."""
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise ConfigError(f"{key} is {name!r}; it takes 'module:attribute', such as 'my_agent:play'")
    value: object = _import(module_name, name, key)
    for part in path.split("."):
        if not hasattr(value, part):
            hint = _suggestion(part, [each for each in dir(value) if not each.startswith("_")])
            raise ConfigError(f"{key} is {name!r} and {module_name} has no {part}{hint and '; '}{hint}")
        value = getattr(value, part)
    return value


def find_factory(
    name: str, shipped: Mapping[str, str], options: Mapping[str, object], *, key: str, options_key: str
) -> Callable[..., object]:
    """The class or function of that name, if it can be called with one argument, the context, and these options."""
    factory = find_plugin(name, shipped, key=key)
    if not callable(factory):
        kind = type(factory).__name__
        raise ConfigError(f"{key} is {name!r}, a {kind} that cannot be called; it takes a class or a function")
    check_options(factory, 1, name=name, options=options, key=options_key)
    try:
        inspect.signature(factory).bind(None, **options)
    except TypeError as error:
        raise ConfigError(f"{key} is {name!r}: {error}; it is called with one argument and {options_key}") from None
    return factory


def check_protocol(plugin: object, protocol: type[T], *, name: str, key: str) -> T:
    """What a factory made, if it has everything that the protocol names."""
    members = [member for member in vars(protocol) if not member.startswith("_")]
    if missing := [member for member in members if not hasattr(plugin, member)]:
        raise ConfigError(
            f"{key} is {name!r}, which made a {type(plugin).__name__} without {', '.join(missing)}; "
            f"give it the members of {protocol.__module__}.{protocol.__name__}"
        )
    return cast(T, plugin)


def call_with_options(
    factory: Callable[..., T], *arguments: object, name: str, options: Mapping[str, object], key: str
) -> T:
    """Call a class or function with the options of a config; `key` is the key of these options."""
    check_options(factory, len(arguments), name=name, options=options, key=key)
    return factory(*arguments, **options)


def check_options(
    factory: Callable[..., object], num_arguments: int, *, name: str, options: Mapping[str, object], key: str
) -> None:
    """A ConfigError for an option that the factory does not take after its arguments, or that it needs."""
    parameters = [*inspect.signature(factory).parameters.values()][num_arguments:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in options:
        if option not in names and not takes_any:
            hint = _suggestion(option, names) or f"it takes {', '.join(names) or 'none'}"
            raise ConfigError(f"{key}.{option} is unknown to {name}; {hint}")
    if missing := [p.name for p in named if p.default is p.empty and p.name not in options]:
        raise ConfigError(f"{key}.{missing[0]} is missing; {name} needs {', '.join(missing)}")


def _suggestion(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, [*names], n=1)
    return f"is it {near[0]}?" if near else ""


def _import(module_name: str, name: str, key: str) -> object:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # a console script does not have the current folder on its path
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key} is {name!r} and importing {module_name} fails: {error}; install it") from error
        raise ConfigError(
            f"{key} is {name!r} and there is no module {error.name}; run in its folder (not {folder}), or install it"
        ) from None
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"{key} is {name!r} and importing {module_name} fails: {type(error).__name__}: {error}; fix the module"
        ) from error
