"""Open settings of a layer-separating job: resolved once, from operations or from times."""

from unittest.mock import Mock

import pytest
from torch import nn

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.core import stanza_resolution
from hpcsync.core.stanza_resolution import divided, fc_share, resolved
from hpcsync.planning.split_cost import Shape, Times
from hpcsync.workloads.registry import Workload, build
from tests.unit.jobs import make_job

TIMING = {"name": "timing", "parameters": 1001, "classifier": 900, "activations": 30, "batch_size": 4}
IMAGES = {"name": "images", "samples": 8, "size": 8, "batch_size": 4}
NOTHING = Workload(nn.Linear(1, 1), None, None, None)


def job(workload: dict, compute: object = None, **paradigm: object) -> Job:
    cluster = {"workers": 4, **({} if compute is None else {"compute": compute})}
    return make_job(workload=workload, paradigm={"name": "stanza", "cut": "classifier", **paradigm}, cluster=cluster)


def test_a_model_that_consists_of_sizes() -> None:
    model = divided(job(TIMING), NOTHING)
    assert (model.halves, model.batch) == (None, ())
    assert model.shape == Shape(101, 900, 30, 8, 4)
    with pytest.raises(JobError, match=r"^paradigm.fc_share: missing; must be a number from 0 to 1: with "):
        resolved(job(TIMING), NOTHING)
    assert fc_share(job(TIMING, fc_share=0.0), model.shape) == 0.0


def test_the_model_is_cut_once_and_one_batch_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    times, spies = Times(1.0, 2.0, 3.0), [Mock(wraps=real) for real in (stanza_resolution.cut, stanza_resolution.fetch)]
    for name, spy in zip(("cut", "fetch"), spies, strict=True):
        monkeypatch.setattr(stanza_resolution, name, spy)
    monkeypatch.setattr(stanza_resolution, "measured", lambda halves, loss, batch: times)
    open_job = job(IMAGES, fc_workers="auto")
    workload = build(open_job)
    closed = resolved(open_job, workload)
    assert [spy.call_count for spy in spies] == [1, 1]
    shape = divided(open_job, workload).shape
    assert closed.paradigm.fc_share == shape.fc_flops / (shape.fc_flops + shape.conv_flops)
    assert closed.groups.n_fc == 2  # they take half of the time
    monkeypatch.setattr(stanza_resolution, "measured", lambda halves, loss, batch: times._replace(fc_s=0.01))
    assert resolved(open_job, workload).groups.n_fc == 1, "the control"
    assert resolved(closed, workload) is closed


def test_times_are_those_of_the_cluster() -> None:
    def n_fc(share: float) -> int:
        compute = {"model": "constant", "seconds": 1.0}
        return resolved(job(TIMING, compute, fc_workers="auto", fc_share=share), NOTHING).groups.n_fc

    assert (n_fc(0.5), n_fc(0.05)) == (2, 1)


def test_shares_of_a_batch() -> None:
    assert Times.of(6.0, 0.5) == Times(1.0, 2.0, 3.0)
    assert Times.of(1.0, 0.0, 0.25) == Times(0.25, 0.75, 0.0)
