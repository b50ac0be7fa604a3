"""Type checks of numbers: booleans and NaN are not numbers."""

from __future__ import annotations

import math


def is_whole(value: object) -> bool:
    """Return True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return True for an int or a float that is neither a bool nor NaN; infinity is a number."""
    return is_whole(value) or (isinstance(value, float) and not math.isnan(value))
