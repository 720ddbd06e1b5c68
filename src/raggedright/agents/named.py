"""What a config calls "module:attribute": a function or class of the user's, found by its name."""

import importlib
import os
import sys
from difflib import get_close_matches

from raggedright.errors import ConfigError


def find_named(name: str, *, key: str) -> object:
    """The attribute of a module, which may be a file in the current folder; `key` is the config's, for the error."""
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigError(f"{key} is {name!r}; it takes 'module:attribute', such as 'my_agent:play'")
    module = _import(module_name, name, key)
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, [each for each in dir(found) if not each.startswith("_")], n=1)
            hint = f"; is it {near[0]}?" if near else ""
            raise ConfigError(f"{key} is {name!r} and {module_name} has no {part}{hint}")
        found = getattr(found, part)
    return found


def _import(module_name: str, name: str, key: str) -> object:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # a command's own folder is not on the path, and users' modules are there
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key} is {name!r} and importing {module_name} fails: {error}; install it") from error
        raise ConfigError(
            f"{key} is {name!r} and there is no module {error.name}; run in its folder (not {folder}), or install it"
        ) from None
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(
            f"{key} is {name!r} and importing {module_name} fails: {type(error).__name__}: {error}; fix the module"
        ) from error
