"""Stateful tests: how many random steps they make, and the check that a machine catches a broken variant.

A machine is a `RuleBasedStateMachine` whose class attributes name the classes under test, so
that a broken variant is a subclass of the machine that names another class.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

STATEFUL = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
# The first failure is enough: it is neither made smaller nor explained nor printed. Which examples are drawn depends on
# the constants in the modules that are loaded, so there are many more than a failure needs, ten to three hundred.
SEARCH = settings(
    STATEFUL,
    max_examples=5000,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
    verbosity=Verbosity.quiet,
)


def assert_caught(
    machine: type[RuleBasedStateMachine],
    match: str | None = None,
    error: type[BaseException] = AssertionError,
    search: settings = SEARCH,
) -> None:
    """Assert that the machine, with a broken class under test, fails with this error."""
    with pytest.raises(error, match=match):
        run_state_machine_as_test(machine, settings=search)
