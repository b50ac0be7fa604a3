"""A small job for tests, with whatever tables a test wants different, and the message of one that is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job

# Options that a [paradigm] must have, by its name.
REQUIRED: dict[str, dict[str, Any]] = {
    "ssp": {"staleness": 3},
    "dssp": {"staleness_min": 3, "staleness_max": 15},
    **{f"k-{form}": {"k": 1} for form in ("sync", "batch-sync", "async", "batch-async")},
    "local-sgd": {"steps": 4},
    "gossip": {"mode": "pull"},
    "stanza": {"cut": "classifier"},
}

LINEAR = {"name": "linear", "batch_size": 4, "samples": 60, "features": 5}


def make_job(**tables: Any) -> Job:
    """Least squares under BSP with two workers; each argument replaces a table of the job file as a whole."""
    table = {
        "name": "test",
        "seed": 1,
        "workload": LINEAR,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "stop": {"updates": 10},
        "paradigm": {"name": "bsp"},
        "cluster": {"workers": 2},
    }
    return Job.from_table({**table, **tables})


def refusal(refused: Callable[..., object], *given: Any, **keys: Any) -> str:
    """Return the message, one line, of the JobError that a call raises."""
    with pytest.raises(JobError) as caught:
        refused(*given, **keys)
    message = str(caught.value)
    assert "\n" not in message
    return message
