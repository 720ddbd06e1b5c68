"""Text from outside, made fit to be seen: every character shows, none moves others about, and length has an end.

Control characters, bidi marks, lone surrogates and whatever else has no glyph appear by name, so that a page shows what
a model really wrote. Escaping for HTML is not done here: the template does it.
"""

import json

_SIGNS = {"\n": "↵", "\t": "⇥", "\xa0": " "}


def visible(text: str, most: int) -> str:
    """At most `most` characters of a text, and a note of how many are left out."""
    shown = "".join(c if c.isprintable() else _sign(c) for c in text[:most])
    return shown + left_out(len(text) - most)


def left_out(count: int) -> str:
    """The note where a text was cut."""
    return f" … {count:,} more characters" if count > 0 else ""


def value_text(value: object, most: int) -> str:
    """A value of a config or a task as it stands in JSON; a string without its quotes, and a dash for none."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, str):
        return visible(value, most)
    try:
        return visible(json.dumps(value, ensure_ascii=False), most)
    except RecursionError:
        return "…"


def _sign(c: str) -> str:
    return _SIGNS.get(c) or f"⟨U+{ord(c):04X}⟩"
