"""Every key of the config as a Markdown page, docs/config.md, by `make pages`."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from raggedright.config.schema import Config

HEAD = """\
# Config

One TOML file describes a run; `configs/` has some. Every key is an option of `raggedright train` too
(`--rollout.n 16`). A key without a default must be given; `-` is no value. Values in the file must have the type in the
table (`batch_size = "45"` is an error); an integer may stand for a number. A key that was set and has no effect because
of another one, such as `reference.coef` with `reference.kl = "none"`, is a warning when the run starts. This page is
made by `make pages`.
"""


def config_page() -> str:
    """The page."""
    tables = [HEAD, *_table(Config, "")]
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            tables += [f"\n## [{name}]\n\n{field.annotation.__doc__}\n", *_table(field.annotation, f"{name}.")]
    return "\n".join(tables) + "\n"


def _table(section: type[BaseModel], prefix: str) -> Iterator[str]:
    yield "| key | takes | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            continue
        default = "" if field.is_required() else _default(field.default)
        yield f"| `{prefix}{name}` | {takes(annotation)} | {default} | {field.description} |"


def _default(value: object) -> str:
    return "-" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def takes(annotation: object) -> str:
    """A key's type in a word or two."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return takes(inside[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(takes(each) for each in inside if each is not type(None)))
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inside)
    if origin is list:
        return f"a list of {takes(inside[0])}"
    if origin is tuple:
        return f"{len(inside)} numbers"
    words = {int: "an integer", float: "a number", bool: "`true`, `false`", str: "text"}
    return words.get(annotation, "a table" if origin is dict else "a path")  # pyright: ignore[reportArgumentType, reportCallIssue]
