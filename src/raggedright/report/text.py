"""Text for reports and terminals: counts, numbers and durations in words, and text from outside made safe to show.

Invariant: text from outside never reaches a terminal or page with control characters, bidi marks or other invisible
characters in effect; they appear by name, so that a reader sees what a model wrote. Escaping for HTML is done by the
page's template. Numbers use the minus sign, not a hyphen.
"""

import json
import math
from textwrap import fill

from rich.console import Console
from rich.text import Text

NONE = "\N{EN DASH}"
_SIGNS = {"\n": "↵", "\t": "⇥", "\xa0": " "}


def visible(text: str, max_chars: int) -> str:
    """The first characters of a text on one line, and a note of how many are left out."""
    left_out = len(text) - max_chars
    note = f" … {left_out:,} more characters" if left_out > 0 else ""
    return "".join(c if c.isprintable() else _sign(c) for c in text[:max_chars]) + note


def terminal_text(text: str) -> str:
    """The whole text for a terminal: line ends and tabs stay, escape sequences and bidi marks lose their effect."""
    return "".join(c if c.isprintable() or c in "\n\t" else _sign(c) for c in text)


def _sign(c: str) -> str:
    return _SIGNS.get(c) or f"⟨U+{ord(c):04X}⟩"


def value_text(value: object, max_chars: int) -> str:
    """A value of a config or a task as JSON; a string without its quotes, and a dash for None."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return visible(value, max_chars)
    try:
        return visible(json.dumps(value, ensure_ascii=False), max_chars)
    except RecursionError:
        return "…"


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print a text safely: wrapped between words on a terminal, with long paths kept whole; unchanged elsewhere."""
    if console.is_terminal:
        lines = [_wrap(line, console.width) for line in terminal_text(text).splitlines()]
        console.print(Text("\n".join(lines), style=style), soft_wrap=True)
    else:
        print(terminal_text(text), file=console.file, flush=True)


def _wrap(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def say(text: str, *, error: bool = False) -> None:
    """Print a text to standard output, or to standard error."""
    print_text(Console(stderr=error), text)


def counted(count: int, noun: str) -> str:
    """`1 row`, `1,024 rows`, `2 micro-batches`."""
    plural = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{plural}"


def more(num_hidden: int, noun: str) -> str:
    """What a report leaves out: `+ 12 more ranks`, or nothing."""
    return f"+ {num_hidden:,} more {counted(num_hidden, noun).split(maxsplit=1)[1]}" if num_hidden > 0 else ""


def score_text(score: float, digits: int = 3) -> str:
    """`0.250`; with an exponent from a million on, where all digits of a float would fill the screen."""
    return f"{score:.{digits}f}" if abs(score) < 1e6 else f"{score:.3g}"


def number(value: float | None) -> str:
    """A number with three digits; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return with_minus("∞" if value > 0 else "-∞")
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return with_exponent(f"{value:.2e}")
    if value == int(value):
        return with_minus(f"{int(value):,}")
    if size < 1:
        return with_minus(f"{value:.3g}")
    return with_minus(f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}")


def signed(value: float) -> str:
    """A number with its sign; zero has none."""
    return ("+" if value > 0 else "") + number(value)


def share(part: float, whole: float) -> str:
    """A part in percent; `100 %` only if nothing is missing, `0 %` only if there is nothing."""
    if part == 0 or whole == 0:
        return "0 %"
    percent = 100 * part / whole
    if percent < 0.01:
        return "< 0.01 %"
    if 99.9 < percent < 100:
        return f"{math.floor(percent * 100) / 100:.2f} %"
    return f"{percent:.3g} %" if percent >= 1 else f"{percent:.2g} %"


def duration(seconds: float | None) -> str:
    """Seconds in a readable unit: `12 ms`, `3.5 s`, `2 min 05 s`, `1 h 30 min`, `2 d 4 h`."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def with_exponent(text: str) -> str:
    """`1.50e+16` as `1.5e16`."""
    mantissa, mark, power = text.partition("e")
    if not mark:
        return with_minus(text)
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return with_minus(f"{mantissa}e{int(power)}")


def with_minus(text: str) -> str:
    """The text with minus signs in place of hyphens."""
    return text.replace("-", "\N{MINUS SIGN}")
