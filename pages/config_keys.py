"""docs/config.md: every key of the config."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from raggedright.config.load import SECTIONS, keys, kinds

HEAD = """\
# Config

One TOML file describes a run; `configs/` has some. Every key is an option of `raggedright train` too
(`--rollout.n 16`). A key without a default must be given; `-` is no value. Values in the file must have the type in the
table (`batch_size = "45"` is an error); an integer may stand for a number. A key that was set and has no effect because
of another one, such as `reference.coef` with `reference.kl = "none"`, is a warning when the run starts. This page is
made by `make pages`.
"""
WORDS = {
    int: "an integer",
    float: "a number",
    bool: "`true`, `false`",
    str: "text",
    Path: "a path",
    dict: "a table",
    list: "a list of text",
    tuple: "2 numbers",
}


def page() -> str:
    """The page."""
    by_section: dict[str, dict[str, FieldInfo]] = {name: {} for name in ("", *SECTIONS)}
    for key, field in keys().items():
        by_section[key.rpartition(".")[0]][key] = field
    parts = [HEAD]
    for name, fields in by_section.items():
        parts += [f"\n## [{name}]\n\n{SECTIONS[name].__doc__}\n"] if name else []
        parts += _table(fields)
    return "\n".join(parts) + "\n"


def _table(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    yield "| key | takes | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for key, field in fields.items():
        default = "" if field.is_required() else _default(field.default)
        yield f"| `{key}` | {takes(field)} | {default} | {field.description} |"


def _default(value: object) -> str:
    return "-" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def takes(field: FieldInfo) -> str:
    """A key's type in a word or two."""
    of_key = kinds(field.annotation)
    choices = [f"`{kind}`" for kind in of_key if isinstance(kind, str)]
    return ", ".join(choices) if choices else " or ".join(WORDS[kind] for kind in of_key if isinstance(kind, type))
