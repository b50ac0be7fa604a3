"""The `[paradigm]` of the job file: updates of k contributions, and what their state machines are given."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpcsync.job import Job
from hpcsync.job_errors import JobError
from hpcsync.paradigms import create
from tests.unit.jobs import make_job


def job(name: str, **keys: Any) -> Job:
    return make_job(paradigm={"name": name, **keys}, cluster={"workers": 4})


def error(name: str, **keys: Any) -> str:
    with pytest.raises(JobError) as caught:
        job(name, **keys)
    message = str(caught.value)
    assert "\n" not in message
    return message


SYNCHRONOUS, ASYNCHRONOUS = ("k-sync", "k-batch-sync"), ("k-async", "k-batch-async")
FAMILY = (*SYNCHRONOUS, *ASYNCHRONOUS)
STAYS: dict[str, Any] = {"k": 3}
CHANGES: dict[str, Any] = {"k": "min"}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(
    "keys",
    [STAYS, CHANGES, {"k": "state", "k_min": 2}, {"k": "loss", "k_start": 4}, {"k": "min", "k_min": 3, "k_start": 3}],
    ids=str,
)
def test_resolved_jobs_come_back_equal(name: str, keys: dict[str, Any]) -> None:
    found = job(name, **keys)
    assert Job.from_toml(found.to_toml()) == found
    assert Job.from_toml(found.to_toml()).paradigm.options == found.paradigm.options


@pytest.mark.parametrize("staleness_max", [0, 1, 2.5, math.inf])
@pytest.mark.parametrize("keys", [STAYS, CHANGES], ids=str)
def test_a_bound_comes_back_as_it_is(keys: dict[str, Any], staleness_max: float) -> None:
    found = job("k-async", **keys, staleness_max=staleness_max)
    assert Job.from_toml(found.to_toml()) == found
    assert found.paradigm.staleness_max == staleness_max


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_what_synchronous_machines_are_given(name: str) -> None:
    assert job(name, **STAYS).paradigm.options == {"k": 3, "k_start": None, "cancel": "drop"}
    aborting = job(name, **STAYS, cancel="abort", micro_batches=8).paradigm
    assert aborting.options == {"k": 3, "k_start": None, "cancel": "abort"}
    assert (aborting.micro_batches, job(name, **STAYS).paradigm.micro_batches) == (8, 4)
    options = {"k": "min", "k_min": 1, "k_start": 2, "cancel": "drop"}
    assert job(name, **CHANGES, k_start=2).paradigm.options == options


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_what_asynchronous_machines_are_given(name: str) -> None:
    stays = {"k": 3, "k_start": None, "staleness_max": math.inf, "staleness_weight": "none"}
    assert job(name, **STAYS).paradigm.options == stays
    changes = {"k": "min", "k_min": 1, "k_start": None, "staleness_max": None, "staleness_weight": "inverse"}
    assert job(name, **CHANGES).paradigm.options == changes
    asked: dict[str, Any] = {"staleness_max": 5, "staleness_weight": "none"}
    assert job(name, **CHANGES, **asked).paradigm.options == {**changes, **asked}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(
    ("keys", "k"), [(STAYS, 3), ({**CHANGES, "k_start": 2}, 2), ({"k": "state", "k_min": 2, "k_start": 4}, 4)], ids=str
)
def test_their_machines_take_what_they_are_given(name: str, keys: dict[str, Any], k: int) -> None:
    assert create(name, 4, **job(name, **keys).paradigm.options).k == k


def test_the_smallest_k() -> None:
    assert [job("k-sync", **keys).paradigm.smallest_k for keys in (STAYS, CHANGES, {"k": "loss", "k_min": 2})] == [
        3,
        1,
        2,
    ]


K = 'must be a whole number of at least 1, or one of "state", "loss", "min"'
STAYS_WHAT_IT_IS = "must be left out beside paradigm.k = 3, which stays what it is"

MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("k-sync", {}, f"paradigm.k: missing; {K}"),
    ("k-sync", {"k": 0}, f"paradigm.k = 0: {K}"),
    ("k-sync", {"k": 1.0}, f"paradigm.k = 1.0: {K}"),
    ("k-sync", {"k": True}, f"paradigm.k = true: {K}"),
    ("k-sync", {"k": "speed"}, f'paradigm.k = "speed": {K}'),
    ("k-sync", {"k": [1]}, f"paradigm.k = [1]: {K}"),
    ("k-sync", {"k": "speed", "k_min": 0}, f'paradigm.k = "speed": {K}'),
    ("k-sync", {"k": 5}, "paradigm.k = 5: must be at most cluster.workers = 4"),
    ("k-batch-sync", {"k": 5}, "paradigm.k = 5: must be at most cluster.workers = 4"),
    ("k-async", {"k": "min", "k_min": 5}, "paradigm.k_min = 5: must be at most cluster.workers = 4"),
    ("k-async", {"k": "min", "k_start": 5}, "paradigm.k_start = 5: must be at most cluster.workers = 4"),
    ("k-async", {"k": 3, "k_min": 1}, f"paradigm.k_min = 1: {STAYS_WHAT_IT_IS}"),
    ("k-async", {"k": 3, "k_start": 3}, f"paradigm.k_start = 3: {STAYS_WHAT_IT_IS}"),
    ("k-async", {"k": "state", "k_min": 0}, "paradigm.k_min = 0: must be at least 1"),
    ("k-async", {"k": "state", "k_start": 1.5}, "paradigm.k_start = 1.5: must be a whole number"),
    (
        "k-async",
        {"k": "state", "k_min": 3, "k_start": 2},
        "paradigm.k_start = 2: must be at least paradigm.k_min = 3",
    ),
    ("k-sync", {"k": 3, "cancel": "stop"}, "paradigm.cancel = \"stop\": must be 'drop' or 'abort'"),
    ("k-sync", {"k": 3, "micro_batches": 0}, "paradigm.micro_batches = 0: must be at least 1"),
    (
        "k-sync",
        {"k": 3, "staleness_max": 5},
        "paradigm.staleness_max = 5: unknown key; must be one of name, k, k_min, k_start, cancel, micro_batches",
    ),
    (
        "k-batch-async",
        {"k": 3, "cancel": "drop"},
        'paradigm.cancel = "drop": unknown key; must be one of name, k, k_min, k_start, staleness_max, '
        "staleness_weight",
    ),
    ("k-async", {"k": 3, "staleness_max": -1}, "paradigm.staleness_max = -1: must be at least 0"),
    ("k-async", {"k": 3, "staleness_max": math.nan}, "paradigm.staleness_max = NaN: must be at least 0"),
    ("k-async", {"k": 3, "staleness_max": "none"}, 'paradigm.staleness_max = "none": must be a number'),
    (
        "k-async",
        {"k": 3, "staleness_weight": "linear"},
        "paradigm.staleness_weight = \"linear\": must be 'none' or 'inverse'",
    ),
]


@pytest.mark.parametrize(("name", "keys", "message"), MISTAKES, ids=str)
def test_mistakes_are_told_in_one_line(name: str, keys: dict[str, Any], message: str) -> None:
    assert error(name, **keys) == message
