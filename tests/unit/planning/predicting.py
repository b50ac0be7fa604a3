"""Assertions that every predictor of speeds must pass, given a factory."""

from __future__ import annotations

import math

import numpy as np
import pytest

IMPOSSIBLE = (0.0, -1.0, math.nan, math.inf, -math.inf)


def assert_constant_speed_has_no_error(make):
    one = make()
    for _ in range(70):
        one.observe(1234.5)
    assert one.predict() == 1234.5


def assert_step_is_followed(make, factor):
    """Assert that the error is below 10 % within 10 observations."""
    one = make()
    for _ in range(60):
        one.observe(1000.0)
    for _ in range(10):
        one.observe(1000.0 * factor)
    assert one.predict() == pytest.approx(1000.0 * factor, rel=0.1)


def assert_predictions_are_speeds(make, n=300):
    """Assert finite predictions for speeds over ten orders of magnitude, in any order."""
    generator = np.random.default_rng(1)
    for spread in (0.1, 1.0, 5.0):
        one = make()
        assert math.isnan(one.predict())
        for speed in generator.lognormal(0.0, spread, n):
            one.observe(float(speed))
            assert 0 < one.predict() < math.inf


def assert_impossible_speeds_are_refused(make):
    one = make()
    one.observe(3.0)
    for speed in IMPOSSIBLE:
        with pytest.raises(ValueError, match="speed must be finite and greater than 0"):
            one.observe(speed)
    assert one.predict() == 3.0
