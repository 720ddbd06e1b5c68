"""The keys of the config as options of `raggedright train`: all of them, or those that a short help shows."""

import argparse
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import CliSettingsSource

from raggedright.config.load import keys
from raggedright.config.schema import Config

CHANGED_OFTEN = (
    "out", "model.path", "agent.name", "rollout.n", "rollout.max_tokens", "train.rounds", "train.batch_size",
    "train.mini_batch_size", "optimizer.lr", "parallel.dp",
)  # fmt: skip
LONGEST_METAVAR = 45  # longer lists of choices are in the help text of the key


def add_all_keys(parser: argparse.ArgumentParser) -> CliSettingsSource[Config]:
    """Declare every key; the source reads their values."""
    source = CliSettingsSource(
        Config,
        root_parser=parser,
        cli_parse_none_str="null",
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_use_class_docs_for_groups=True,
    )
    fields = {key: section.model_fields[name] for key, section, name in keys()}
    for action in parser._actions:
        if action.dest in fields:
            action.metavar, action.help = _words(fields[action.dest])
    return source


def add_changed_often(parser: argparse.ArgumentParser) -> None:
    """Declare the keys that a short help shows."""
    group = parser.add_argument_group("config keys that are changed most often (--help-all shows all of them)")
    fields = {key: section.model_fields[name] for key, section, name in keys()}
    for key in CHANGED_OFTEN:
        metavar, help = _words(fields[key])
        group.add_argument(f"--{key}", metavar=metavar, help=help)


def _words(field: FieldInfo) -> tuple[str, str]:
    """What a key takes, and its help with the default."""
    takes, description = _metavar(field.annotation), field.description or ""
    if len(takes) > LONGEST_METAVAR:
        takes, description = "NAME", f"{description} One of {takes.strip('{}').replace(',', ', ')}."
    default = field.default
    if field.is_required():
        description += " (no default)"
    elif default is not None and default != {}:
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        description += f" (default {shown})"
    return takes, description.replace("%", "%%")


def _metavar(annotation: object) -> str:
    """A type as a user reads it: N, NUMBER, TEXT, PATH, JSON, or the choices."""
    kinds = _kinds(annotation)
    choices = [kind for kind in kinds if not isinstance(kind, type)]
    if choices:
        return "{" + ",".join(map(str, choices)) + "}"
    return {int: "N", float: "NUMBER", bool: "{true,false}", str: "TEXT", dict: "JSON", tuple: "JSON"}.get(
        kinds[0],  # pyright: ignore[reportArgumentType]
        "PATH",
    )


def _kinds(annotation: object) -> list[object]:
    """The types and choices of an annotation, without None."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(inside[0])
    if origin in (Union, UnionType):
        return [kind for each in inside for kind in _kinds(each) if kind is not type(None)]
    if origin is Literal:
        return list(inside)
    return [origin or annotation]
