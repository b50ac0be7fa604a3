"""The `[batches]` of the job file: defaults and mistakes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hpcsync.config.batches import Batches
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from tests.unit.jobs import make_job, refusal


def job(**keys: Any) -> Job:
    """A job of four workers with a batch size of 32."""
    tables = {key: keys.pop(key) for key in ("paradigm", "workload", "stop") if key in keys}
    return make_job(
        **{"workload": {"name": "timing"}, **tables}, cluster={"workers": 4}, batches={"policy": "equal", **keys}
    )


error = partial(refusal, job)


SPEED: dict[str, Any] = {"policy": "proportional"}
SCRIPT: dict[str, Any] = {"workload": {"name": "script"}, "stop": {}}


def test_batches_are_equal_unless_something_else_is_said() -> None:
    assert make_job().batches == Batches(policy="equal") == job().batches
    found = job(**SPEED).batches
    assert (found.predictor, found.total, found.minimum, found.interval, found.gain) == ("blend", None, 1, 10, 0.05)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        SPEED,
        {"policy": "equal-finish", "predictor": "gru", "total": 100, "minimum": 3, "interval": 1, "gain": 0},
        {**SPEED, "maximum": 64},
        {**SPEED, "maximum": [16, 32, 64, 128]},
        {"minimum": 8, "maximum": 16},  # with equal batches they wait for another policy
    ],
    ids=str,
)
def test_resolved_jobs_come_back_equal(keys: dict[str, Any]) -> None:
    assert Job.from_toml(job(**keys).to_toml()) == job(**keys)


def test_a_table_has_a_purpose() -> None:
    with pytest.raises(
        JobError, match='^batches.policy: missing; must be one of "equal", "proportional", "equal-finish"$'
    ):
        make_job(batches={"maximum": 16})


def test_the_total_is_that_of_equal_batches_unless_it_is_said() -> None:
    assert (job().batch_total, job(**SPEED).batch_total, job(**SPEED, total=99).batch_total) == (128, 128, 99)
    assert job(**SCRIPT).batch_total is None
    assert job(**SCRIPT, **SPEED, total=99).batch_total == 99


def test_limits_are_for_all_workers_or_for_each() -> None:
    assert job(**SPEED).batches.maxima(4) is None
    assert job(**SPEED, maximum=40).batches.maxima(4) == [40] * 4
    assert job(**SPEED, maximum=[16, 32, 64, 128]).batches.maxima(4) == [16, 32, 64, 128]


@pytest.mark.parametrize("keys", [{"minimum": 32}, {"maximum": 32}, {"total": 4, "maximum": 1}])
def test_there_may_be_one_way_only(keys: dict[str, Any]) -> None:
    job(**SPEED, **keys)


@pytest.mark.parametrize("name", ["bsp", "asp", "allreduce", "easgd"])
def test_batches_go_with_servers_and_with_allreduce(name: str) -> None:
    job(**SPEED, paradigm={"name": name})


MANY = "must be a whole number of at least 1, or a list of them, one per worker"

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"policy": "fast"}, "batches.policy = \"fast\": must be 'equal', 'proportional' or 'equal-finish'"),
    ({"predictor": "es"}, "batches.predictor = \"es\": must be 'last', 'smoothing', 'gru' or 'blend'"),
    (
        {"max": 3},
        "batches.max = 3: unknown key; must be one of policy, predictor, total, minimum, maximum, interval, gain; "
        "did you mean maximum?",
    ),
    ({**SPEED, "total": 0}, "batches.total = 0: must be at least 1"),
    ({**SPEED, "minimum": 0}, "batches.minimum = 0: must be at least 1"),
    ({**SPEED, "interval": 0}, "batches.interval = 0: must be at least 1"),
    ({**SPEED, "gain": -0.1}, "batches.gain = -0.1: must be at least 0"),
    ({**SPEED, "gain": 1}, "batches.gain = 1: must be less than 1"),
    ({**SPEED, "maximum": 0}, f"batches.maximum = 0: {MANY}"),
    ({**SPEED, "minimum": 0, "maximum": 3}, "batches.minimum = 0: must be at least 1"),
    ({**SPEED, "maximum": 1.5}, f"batches.maximum = 1.5: {MANY}"),
    ({**SPEED, "maximum": True}, f"batches.maximum = true: {MANY}"),
    ({**SPEED, "maximum": []}, f"batches.maximum = []: {MANY}"),
    ({**SPEED, "maximum": [64, 64, 64, 0]}, f"batches.maximum = [64, 64, 64, 0]: {MANY}"),
    ({"maximum": 3, "minimum": 4}, "batches.maximum = 3: must be at least batches.minimum = 4"),
    (
        {**SPEED, "maximum": [64, 64, 64, 3], "minimum": 4},
        "batches.maximum = [64, 64, 64, 3]: must be at least batches.minimum = 4",
    ),
    (
        {"maximum": [64, 64]},
        "batches.maximum = [64, 64]: must be one whole number, or a list of cluster.workers = 4 of them",
    ),
    (
        {"total": 128},
        'batches.total = 128: must be omitted with batches.policy = "equal", where all have the same batch size',
    ),
    (
        {**SPEED, "total": 100, "minimum": 26},
        "batches.total = 100: must be at least 104: cluster.workers = 4 have batches.minimum = 26 or more",
    ),
    (
        {**SPEED, "minimum": 33},
        "batches.total = 128 (workload.batch_size times cluster.workers): must be at least 132: cluster.workers = 4 "
        "have batches.minimum = 33 or more",
    ),
    (
        {**SPEED, "total": 100, "maximum": 24},
        "batches.total = 100: must be at most 96: cluster.workers = 4 have batches.maximum = 24 or less",
    ),
    (
        {**SPEED, "maximum": [16, 32, 32, 32]},
        "batches.total = 128 (workload.batch_size times cluster.workers): must be at most 112: cluster.workers = 4 "
        "have batches.maximum = [16, 32, 32, 32] or less",
    ),
    (
        {**SPEED, **SCRIPT},
        'batches.total: missing; must be a whole number of at least 1 with batches.policy = "proportional", '
        "because the batch size of a script is unknown",
    ),
    (
        {**SPEED, "paradigm": {"name": "local-sgd", "steps": 4}},
        'batches.policy = "proportional": must be "equal" with paradigm.name = "local-sgd": batches are allocated by '
        'servers, or by all workers together under "allreduce"',
    ),
    (
        {"policy": "equal-finish", "paradigm": {"name": "gossip", "mode": "pull"}},
        'batches.policy = "equal-finish": must be "equal" with paradigm.name = "gossip": batches are allocated by '
        'servers, or by all workers together under "allreduce"',
    ),
]


@pytest.mark.parametrize(("keys", "message"), MISTAKES, ids=str)
def test_mistakes_are_reported_in_one_line(keys: dict[str, Any], message: str) -> None:
    assert error(**keys) == message
