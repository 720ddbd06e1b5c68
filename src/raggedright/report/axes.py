"""Scales, ticks and numbers in words: what a chart and the page write beside the data.

Ticks are round numbers and the scale ends on them. A series without a spread gets room around it, so that it is a line
in the middle and not on the edge. Minus signs are minus signs.
"""

import math
from typing import NamedTuple

NONE = "\N{EN DASH}"
LARGEST = 1e290  # beyond it the width of a scale, or the sum of a series, would not be finite
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Scale(NamedTuple):
    """From where to where an axis reaches, and its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    @property
    def step(self) -> float:
        """The distance between ticks."""
        return self.ticks[1] - self.ticks[0]


def scale_of(low: float, high: float, *, zero: bool = False, most: int = 5, whole: bool = False) -> Scale:
    """A scale that holds all from low to high, and zero if asked; `whole` keeps ticks to whole numbers."""
    low, high = max(low, -LARGEST), min(high, LARGEST)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(abs(low), abs(high)) * 1e-9:
        room = abs(high) * 0.1 or 1.0
        low, high = (low if zero and low == 0 else low - room), high + room
    step = _round_step((high - low) / most)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, max(last, first + 1) + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def round_ticks(first: int, last: int, most: int) -> list[int]:
    """Round numbers between two rounds."""
    step = max(int(_round_step((last - first) / most)), 1) if last > first else 1
    return list(range(-(-first // step) * step, last + 1, step))


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next((factor * power for factor in (1, 2, 5) if factor * power >= least * 0.999), 10 * power)


def tick_text(value: float, step: float) -> str:
    """A tick's number, with as many digits as its neighbours need."""
    if value == 0 or abs(value) < step * 1e-6:
        return "0"
    if abs(value) >= 1e15 or step < 1e-3:
        return _exponent(f"{value:.3g}" if step * 100 > abs(value) else f"{value:.5g}")
    for size, unit in _UNITS:
        if abs(value) >= size and step >= size / 10 and (abs(value) >= 1e4 or step >= 1e3):
            return _minus(f"{value / size:.{0 if step >= size else 1}f}".removesuffix(".0") + unit)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return _minus(f"{value:,.{digits}f}")


def number(value: float | None) -> str:
    """Any number to three digits; a dash where there is none."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return _minus("∞" if value > 0 else "-∞")
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return _exponent(f"{value:.2e}")
    if value == int(value):
        return _minus(f"{int(value):,}")
    return _minus(f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}" if size >= 1 else f"{value:.3g}")


def signed(value: float) -> str:
    """A number with its sign."""
    return ("+" if value > 0 else "") + number(value)


def share(part: float, whole: float) -> str:
    """A part in percent; all of it only where nothing is left, none of it only where there is none."""
    if part == 0 or whole == 0:
        return "0 %"
    percent = 100 * part / whole
    if percent < 0.01:
        return "< 0.01 %"
    if 99.9 < percent < 100:
        return f"{math.floor(percent * 100) / 100:.2f} %"
    return f"{percent:.3g} %" if percent >= 1 else f"{percent:.2g} %"


def duration(seconds: float | None) -> str:
    """Seconds in the units one would say them in."""
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


def _exponent(text: str) -> str:
    mantissa, mark, power = text.partition("e")
    if not mark:
        return _minus(text)
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return _minus(f"{mantissa}e{int(power)}")


def _minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")
