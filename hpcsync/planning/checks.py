"""What counts as a number where one is asked for: True and False do not, nor does NaN."""

from __future__ import annotations

import math


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Also an infinite one."""
    return is_whole(value) or (isinstance(value, float) and not math.isnan(value))
