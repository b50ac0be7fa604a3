"""Numbers, and values that only look like one."""

import math

import numpy as np
import pytest

from hpcsync.planning.checks import is_number, is_whole, must_be_one_of, must_be_whole


@pytest.mark.parametrize("value", [0, -3, 10**30, np.int64(4), np.uint8(0)])
def test_integers_are_both(value):
    assert is_whole(value) and is_number(value)


@pytest.mark.parametrize("value", [0.0, 2.0, -1.5, math.inf])
def test_others_are_numbers(value):
    assert is_number(value) and not is_whole(value)


@pytest.mark.parametrize("value", [True, False, np.True_, math.nan, "3", None, [1]])
def test_values_that_are_not_numbers(value):
    assert not is_number(value) and not is_whole(value)


def test_a_refusal_names_the_option_and_what_is_allowed():
    must_be_whole("steps", 1, 1)
    must_be_one_of("mode", "paper", ("paper", "bounded"))
    for value in (0, True, 2.0):
        with pytest.raises(ValueError, match=f"^steps must be an integer >= 1, got {value}$"):
            must_be_whole("steps", value, 1)
    with pytest.raises(ValueError, match="^mode must be one of paper, bounded, got 'papers'$"):
        must_be_one_of("mode", "papers", ("paper", "bounded"))
