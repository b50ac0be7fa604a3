"""Cases of a test that runs at several numbers of ranks: all of them at each, or some at each and every case at some.

Ranks are processes under MPI (tests/mpi) or threads of one process (tests/unit/mpi).
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

gc.disable()  # until the tests are collected: during the import of torch collections take half a second

# Open MPI 5.0.11 has a segmentation fault within MPI_Init itself, seldom: another host's first message arrives early.
# MPICH 5.0.2 never ends MPI_Init in one of 100 starts on busy cores, if the hosts have different numbers of ranks, and
# more seldom with equal ones. A program that says nothing in between can only be seen not to end.
FAULTS = [r"Segmentation fault(.|\n)*ompi_mpi_init", r"is RUNNING .*; its output:\s*loading libraries\s*$"]
FAULTS += [r"TimeoutExpired: Command '\['nsenter'"]
FAULTY_START = pytest.mark.flaky(reruns=1, only_rerun=FAULTS)
BETWEEN_HOSTS = [Path(__file__).parent / folder for folder in ("hosts", "slurm")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent in BETWEEN_HOSTS:
            item.add_marker(FAULTY_START)


def pytest_collection_finish() -> None:
    """A collection of garbage visits nothing that was imported: in unit tests that was a twelfth of their time."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--take-turns", action="store_true", help="leave some cases to other numbers of ranks")


def is_its_turn(number: int, n_cases: int, turn: int) -> bool:
    """Whether case `number` of a test runs at this turn: every third at each, or every other one of two.

    Not simply every third number: those may all have the same value of a parameter.
    """
    share = min(n_cases, 3)
    return (number + number // share + turn) % share == 0


def runs_everywhere(item: pytest.Item) -> bool:
    """Whether a test itself says at which number of ranks it runs."""
    return "only" in getattr(item, "fixturenames", ()) or item.get_closest_marker("once") is not None
