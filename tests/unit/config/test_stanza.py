"""Mistakes in jobs with layer separation, each reported in one line."""

import re
from typing import Any

import pytest

from hpcsync.config.job import JobError, refuse_simulated
from hpcsync.core.job_validation import check
from tests.unit.jobs import make_job

TIMING = {"name": "timing", "parameters": 9, "classifier": 5, "activations": 2, "batch_size": 4}
SCRIPT = {"name": "script"}
COMPUTE = {"model": "constant", "seconds": 1.0}
LEAVE = {"worker": 1, "at_iteration": 2, "change": "leave"}


def job(workload: dict = TIMING, paradigm: dict | None = None, **cluster: Any) -> Any:
    paradigm = {"name": "stanza", "cut": "classifier", **(paradigm or {})}
    return make_job(workload=workload, paradigm=paradigm, cluster={"workers": 4, **cluster})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"paradigm": {"fc_workers": 3}}, "cluster.workers = 4: must be at least 6 with paradigm.fc_workers = 3: "),
        ({"paradigm": {"fc_workers": "auto"}, "workers": 1}, "cluster.workers = 1: must be at least 2 with "),
        ({"paradigm": {"fc_workers": "all"}}, 'paradigm.fc_workers = "all": must be a whole number of at least 1, or '),
        ({"paradigm": {"cut": "5"}}, 'paradigm.cut = "5": must be "classifier" with workload.name = "timing"'),
        ({"workload": TIMING | {"classifier": 0}}, "workload.classifier = 0: must be at least 1 with paradigm.name = "),
        ({"workload": TIMING | {"activations": 0}}, "workload.activations = 0: must be at least 1 with paradigm.name "),
        (
            {"paradigm": {"micro_batches": 3}},
            "workload.batch_size = 4: must be a multiple of paradigm.micro_batches ",
        ),
        (
            {"events": [LEAVE]},
            'cluster.events[0].change = "leave": must be another change with paradigm.name = "stanza", ',
        ),
        (
            {"workload": SCRIPT, "paradigm": {"micro_batches": 2}},
            "paradigm.micro_batches = 2: must be 1 in a ",
        ),
        (
            {"workload": SCRIPT, "paradigm": {"fc_workers": "auto"}},
            'paradigm.fc_workers = "auto": must be a number in ',
        ),
        (
            {"workload": SCRIPT, "compute": COMPUTE},
            "paradigm.fc_share: missing; a training script with [cluster.compute] must set it",
        ),
    ],
)
def test_mistakes(tables: dict, message: str) -> None:
    with pytest.raises(JobError, match=f"^{re.escape(message)}"):
        job(**tables)


def test_allowed_jobs() -> None:
    assert [*job(paradigm={"fc_workers": 2, "micro_batches": 4}).takers] == [2, 3]
    job(workload=SCRIPT, paradigm={"fc_share": 0.5}, compute=COMPUTE)
    job(events=[LEAVE | {"change": "slow", "factor": 2.0}], compute=COMPUTE)


def test_a_timing_workload_can_only_be_simulated() -> None:
    with pytest.raises(
        JobError, match=r'^workload.name = "timing": must be another workload with paradigm.name = "stanza" to '
    ):
        refuse_simulated(job())
    refuse_simulated(job(workload={"name": "digits"}))


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ("classifer", "must be the name of a submodule (at the top: features, classifier); did you mean classifier?"),
        ("features", "the model has no trainable parameters before it"),
    ],
)
def test_a_model_that_cannot_be_cut_there(cut: str, message: str) -> None:
    images = {"name": "images", "samples": 8, "size": 8, "batch_size": 4}
    with pytest.raises(JobError, match=re.escape(f'paradigm.cut = "{cut}": {message}')):
        check(job(workload=images, paradigm={"cut": cut}))
    check(job(workload=images))
