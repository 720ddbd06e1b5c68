"""What an agent gives and a store must be able to keep: finite numbers, and the error for the rest."""

import math
from typing import SupportsFloat

from raggedright.sessions import SessionError

__all__ = ["SessionError", "finite"]


def finite(value: object) -> float | None:
    """A finite number as a float; None for whatever is none."""
    if type(value) not in (float, int) and not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # a tensor of several values, a huge int, whatever an agent's own type raises
        return None
    return number if math.isfinite(number) else None
