"""Checks of options: booleans and NaN are not numbers."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral
from typing import Any


def is_whole(value: object) -> bool:
    """Return True for an integer, also of NumPy, that is not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return True for an integer or a float that is neither a bool nor NaN; infinity is a number."""
    return is_whole(value) or (isinstance(value, float) and not math.isnan(value))


def must_be_whole(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless the option is an integer of at least `least`."""
    if not (is_whole(value) and value >= least):
        raise ValueError(f"{name} must be an integer >= {least}, got {value}")


def must_be_one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """Raise ValueError unless the option is one of these words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
