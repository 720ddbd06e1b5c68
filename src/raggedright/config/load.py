"""From a TOML file and the options of a command line to a Config, or to one error with everything that is wrong."""

import json
import re
import sys
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from math import inf
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from raggedright.config.key_rules import without_effect
from raggedright.config.schema import Config
from raggedright.errors import ConfigError, RowsError
from raggedright.rows import without_duplicates

Values = Mapping[str, object]

MAX_SHOWN = 120  # characters of a value in an error

_EXPECTED = {  # by the beginning of pydantic's name for a fault
    "int_": "it takes an integer",
    "float_": "it takes a number",
    "bool_": "it takes true or false",
    "string_": "it takes text",
    "path_": "it takes a path",
    "dict_": "it takes a table; as an option, JSON such as '{{\"tries\": 3}}'",
    "list_": "it takes a list; as an option, JSON such as '[\"tensorboard\"]'",
    "model_": "it takes a table",
    "tuple_": "it takes a list of numbers; as an option, JSON such as '[0.9, 0.999]'",
    "too_long": "it takes {max_length} numbers",
    "greater_than_equal": "it takes {ge} or more",
    "greater_than": "it takes more than {gt}",
    "less_than_equal": "it takes {le} or less",
    "less_than": "it takes less than {lt}",
    "literal_error": "it takes {expected}",
}


def load_config(path: Path, overrides: Values | None = None) -> Config:
    """The config in a file, with the keys in `overrides` in place of the file's; one error has every fault.

    Types in the file must be those of the keys. Text in `overrides` comes from a command line and is parsed; null is
    no value, and lists and tables are JSON.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: it is a folder; give a TOML file, such as configs/compaction.toml")
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; a run needs a TOML file, such as configs/compaction.toml")
    data = path.read_bytes()
    try:
        values = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    except ValueError:  # of int()
        most = sys.get_int_max_str_digits()
        lines = enumerate(data.decode().splitlines(), 1)
        number = next(i for i, line in lines if re.search(rf"[\d_]{{{most}}}", line))
        raise ConfigError(
            f"{path}, line {number}: a number has more than {most:,} digits; give a smaller one"
        ) from None
    for name, value in (overrides or {}).items():
        if isinstance(value, Mapping) and name in SECTIONS:
            parsed = {key: _parse(f"{name}.{key}", each) for key, each in value.items()}
            old = values.get(name)
            values[name] = {**old, **parsed} if isinstance(old, Mapping) else parsed
        else:
            values[name] = _parse(name, value)
    return make_config(values, source=f"{path} with the options given" if overrides else str(path))


def parse_config(text: str, *, source: str) -> Config:
    """The config that `dump_config` wrote."""
    return make_config(tomllib.loads(text), source=source)


def make_config(values: Values, *, source: str) -> Config:
    """The config of these values; `source` names them in the error."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        faults = [line for fault in error.errors() for line in _fault_lines(fault)]
        count = f"{len(faults)} faults" if len(faults) > 1 else "a fault"
        raise ConfigError(f"{source} has {count}:\n" + "\n".join(f"  {fault}" for fault in faults)) from None


def dump_config(config: Config) -> str:
    """The resolved config as TOML that `load_config` reads back; keys without a value or an effect are left out.

    Characters that would have an effect on a terminal are written as escapes of TOML.
    """
    values = config.model_dump(mode="json", exclude_none=True)
    for section in ("optimizer", "critic"):
        values[section].setdefault("grad_clip", inf)  # None, which TOML does not have
    for key, _ in without_effect(config, explicit=False):
        section, name = key.split(".")
        values[section].pop(name, None)
    values = {name: value for name, value in values.items() if value != {}}
    return "".join(c if c.isprintable() or c == "\n" else f"\\U{ord(c):08X}" for c in tomli_w.dumps(values))


def with_absolute_paths(config: Config) -> Config:
    """The config with absolute paths, which stay valid if an agent changes the working folder of its process."""
    model = config.model
    if model.path is not None and Path(model.path).exists():
        model = model.model_copy(update={"path": str(Path(model.path).absolute())})
    return config.model_copy(update={"out": config.out.absolute(), "model": model})


def _sections() -> dict[str, type[BaseModel]]:
    types = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: each for name, each in types.items() if isinstance(each, type) and issubclass(each, BaseModel)}


SECTIONS = _sections()


def keys() -> dict[str, FieldInfo]:
    """Every key of the config by its dotted name, those outside of sections first."""
    top = {name: field for name, field in Config.model_fields.items() if name not in SECTIONS}
    return top | {f"{name}.{key}": field for name, each in SECTIONS.items() for key, field in each.model_fields.items()}


def kinds(annotation: object) -> list[object]:
    """The types of a key, and its choices, without None: `[int]`, `["steps", "lcm"]`, `[dict]`."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kinds(inside[0])
    if origin in (Union, UnionType):
        return list(dict.fromkeys(kind for each in inside for kind in kinds(each) if kind is not type(None)))
    return list(inside) if origin is Literal else [origin or annotation]


def _parse(key: str, value: object) -> object:
    """The value of an option; text that does not fit its key stays text, and is reported with all other faults."""
    field = keys().get(key)
    if not isinstance(value, str) or field is None:
        return value
    if value == "null":
        return None
    of_key = kinds(field.annotation)
    try:
        if any(kind in (dict, list, tuple) for kind in of_key):
            return json.loads(value, object_pairs_hook=without_duplicates)
        for kind in of_key:
            if kind in (int, float, bool):
                return TypeAdapter(kind).validate_python(value)
    except RowsError as error:
        raise ConfigError(f"{key}: {error}") from None
    except ValueError:  # pydantic's and json's too
        pass
    return value


def _fault_lines(fault: ErrorDetails) -> list[str]:
    """A fault as pydantic reports it, in our words; a fault of several keys may be several sentences."""
    key = ".".join(str(part) for part in fault["loc"] if not _is_union_member(part))
    match fault["type"]:
        case "extra_forbidden":
            return [f"{key}: there is no such key{_suggest(key)}"]
        case "missing" if isinstance(fault["loc"][-1], int):
            return [f"{key.rpartition('.')[0]} is {_shown(fault['input'])}: it takes more numbers"]
        case "missing":
            return [f"{key}: missing; it has no default"]
        case "value_error":
            lines = fault["msg"].removeprefix("Value error, ").splitlines()
            return [f"{key}: {line}" if key else line for line in lines]
        case kind:
            words = next((text for name, text in _EXPECTED.items() if kind.startswith(name)), None)
            message = words.format(**fault.get("ctx", {})) if words else fault["msg"][0].lower() + fault["msg"][1:]
            return [f"{key} is {_shown(fault['input'])}: {message}"]


def _shown(value: object) -> str:
    """A value in an error, cut if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text):,} characters)"


def _is_union_member(part: int | str) -> bool:
    """Whether a part of a fault's location is pydantic's name for one type of a union, not a key."""
    return isinstance(part, str) and ("[" in part or part in ("int", "float", "str", "bool", "constrained-int"))


def _suggest(key: str) -> str:
    """The key that may have been meant, as the end of a sentence."""
    own_name = {name: name.rpartition(".")[2] for name in keys()}
    last = key.rpartition(".")[2]
    same_name = [name for name in own_name if own_name[name] == last]
    similar = get_close_matches(key, [*own_name, *SECTIONS], n=1, cutoff=0.6)
    similar_name = get_close_matches(last, set(own_name.values()), n=1, cutoff=0.7)
    matches = same_name or similar or [name for name in own_name if own_name[name] in similar_name]
    return f"; did you mean {' or '.join(matches[:3])}?" if matches else f"; sections are {', '.join(sorted(SECTIONS))}"
