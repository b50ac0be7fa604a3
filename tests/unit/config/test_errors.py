"""Words of error messages; test_job.py tests the message for each key."""

import math

import pytest

from hpcsync.config.errors import did_you_mean, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (0.05, "0.05"),
        (True, "true"),
        ("ü", '"ü"'),
        ([1, "a"], '[1, "a"]'),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        ("x" * 200, '"' + "x" * 76 + "..."),
    ],
)
def test_values_are_shown_as_in_the_job_file(value: object, text: str) -> None:
    assert shown(value) == text


def test_only_similar_words_are_suggested() -> None:
    assert did_you_mean("stalenes", ["staleness", "mode"]) == "; did you mean staleness?"
    assert did_you_mean("xyz", ["staleness", "mode"]) == ""
    assert did_you_mean(3, ["staleness"]) == ""
