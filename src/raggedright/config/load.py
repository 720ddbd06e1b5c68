"""From a TOML file and the command line to a Config, or to all that is wrong with them at once."""

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from math import inf
from pathlib import Path
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import TomlConfigSettingsSource

from raggedright.config.schema import Config
from raggedright.config.unused import without_effect
from raggedright.errors import ConfigError

Values = Mapping[str, object]

_TAKES = {  # by the beginning of pydantic's name for a fault
    "int_": "it takes an integer",
    "float_": "it takes a number",
    "bool_": "it takes true or false",
    "string_": "it takes text",
    "path_": "it takes a path",
    "dict_": "it takes a table",
    "list_": "it takes a list",
    "model_": "it takes a table",
    "tuple_": "it takes a list of numbers",
    "too_long": "it takes {max_length} numbers",
    "greater_than_equal": "it takes {ge} or more",
    "greater_than": "it takes more than {gt}",
    "less_than_equal": "it takes {le} or less",
    "less_than": "it takes less than {lt}",
    "literal_error": "it takes {expected}",
}


def load_config(path: Path, overrides: Values | None = None) -> Config:
    """The config in a file, with the given keys in place of the file's; every fault is in the one error.

    Types in the file must be those of the keys; the text of overrides, which come from a command line, is parsed.
    """
    try:
        values = TomlConfigSettingsSource(Config, path)() if path.is_file() else None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    if path.is_dir():
        raise ConfigError(f"{path}: it is a folder; give a TOML file, such as configs/compaction.toml")
    if values is None:
        raise ConfigError(f"{path}: there is no such file; a run needs a TOML file, such as configs/compaction.toml")
    source = f"{path} with the options given" if overrides else str(path)
    return make_config(_merge(values, _parse_text(overrides or {})), source=source)


def parse_config(text: str, *, source: str) -> Config:
    """The config that `dump_config` wrote."""
    return make_config(tomllib.loads(text), source=source)


def make_config(values: Values, *, source: str) -> Config:
    """The config of these values; `source` names them in the error."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        faults = [line for fault in error.errors() for line in _sentences(fault)]
        count = f"{len(faults)} faults" if len(faults) > 1 else "a fault"
        raise ConfigError(f"{source} has {count}:\n" + "\n".join(f"  {fault}" for fault in faults)) from None


def dump_config(config: Config) -> str:
    """The resolved config as TOML that `load_config` reads back; keys without a value or an effect are left out."""
    values = config.model_dump(mode="json", exclude_none=True)
    for section in ("optimizer", "critic"):
        values[section].setdefault("grad_clip", inf)  # None, which TOML does not have
    for key, _ in without_effect(config, explicit=False):
        section, name = key.split(".")
        values[section].pop(name, None)
    return tomli_w.dumps(values)


def with_absolute_paths(config: Config) -> Config:
    """The config with paths that mean the same when an agent changes the working folder of its process."""
    model = config.model
    if model.path is not None and Path(model.path).exists():
        model = model.model_copy(update={"path": str(Path(model.path).absolute())})
    return config.model_copy(update={"out": config.out.absolute(), "model": model})


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Every key of the config: its dotted name, its section and its own name."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, model, name


def suggest(key: str) -> str:
    """What an unknown key may have meant, as the end of a sentence."""
    known = [name for name, _, _ in keys()]
    tables = {name.split(".")[0] for name in known if "." in name}
    near = get_close_matches(key, [*known, *tables], n=1, cutoff=0.6)
    own_name = key.rpartition(".")[2]
    same_name = [name for name in known if name.rpartition(".")[2] == own_name]
    near_name = get_close_matches(own_name, {name.rpartition(".")[2] for name in known}, n=1, cutoff=0.7)
    found = same_name or near or [name for name in known if name.rpartition(".")[2] in near_name]
    return f"; did you mean {' or '.join(found[:3])}?" if found else f"; sections are {', '.join(sorted(tables))}"


def _merge(values: Values, overrides: Values) -> dict[str, object]:
    merged = dict(values)
    for name, value in overrides.items():
        old = merged.get(name)
        section = isinstance(value, Mapping) and isinstance(old, Mapping) and _is_section(name)
        merged[name] = {**old, **value} if section else value  # pyright: ignore[reportGeneralTypeIssues]
    return merged


def _parse_text(overrides: Values, model: type[BaseModel] = Config) -> dict[str, object]:
    """Overrides with text parsed as the type of its key; text that cannot be parsed stays, and is refused later."""
    parsed = dict(overrides)
    for name, value in overrides.items():
        annotation = model.model_fields[name].annotation if name in model.model_fields else None
        if isinstance(value, Mapping) and isinstance(annotation, type) and issubclass(annotation, BaseModel):
            parsed[name] = _parse_text(value, annotation)
        elif isinstance(value, str) and (scalar := _scalar(annotation)):
            with suppress(ValidationError):
                parsed[name] = TypeAdapter(scalar).validate_python(value)
    return parsed


def _scalar(annotation: object) -> type | None:
    """The type that text stands for in a key: int, float or bool, without its limits; None where text is a value."""
    if annotation in (int, float, bool):
        return annotation  # pyright: ignore[reportReturnType]
    inside = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _scalar(inside[0])
    return next(filter(None, map(_scalar, inside)), None) if get_origin(annotation) in (Union, UnionType) else None


def _is_section(name: str) -> bool:
    field = Config.model_fields.get(name)
    return field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _sentences(fault: ErrorDetails) -> list[str]:
    """One fault of pydantic's in our words; what the whole config decides is several sentences already."""
    key = ".".join(str(part) for part in fault["loc"] if not _is_branch(part))
    match fault["type"]:
        case "extra_forbidden":
            return [f"{key}: there is no such key{suggest(key)}"]
        case "missing" if isinstance(fault["loc"][-1], int):
            return [f"{key.rpartition('.')[0]} is {fault['input']!r}: it takes more numbers"]
        case "missing":
            return [f"{key}: missing; it has no default"]
        case "value_error":
            said = fault["msg"].removeprefix("Value error, ").splitlines()
            return [f"{key}: {line}" if key else line for line in said]
        case kind:
            words = next((text for name, text in _TAKES.items() if kind.startswith(name)), None)
            message = words.format(**fault.get("ctx", {})) if words else fault["msg"][0].lower() + fault["msg"][1:]
            return [f"{key} is {fault['input']!r}: {message}"]


def _is_branch(part: int | str) -> bool:
    """Whether a part of a fault's place is pydantic's name for one type of a union, not a key."""
    return isinstance(part, str) and ("[" in part or part in ("int", "float", "str", "bool", "constrained-int"))
