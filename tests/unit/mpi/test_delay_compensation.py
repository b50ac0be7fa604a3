"""DC-ASGD on real ranks: the weights are those of the published formula, also after a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcsync.config.job import Job
from hpcsync.trace.reader import load
from tests.mpi.training import failures, on_some
from tests.plain import delay_compensated
from tests.unit.jobs import make_job
from tests.unit.mpi.test_checkpoints import killed

FORMS: dict[str, tuple[float, float | None]] = {"constant": (0.3, None), "adaptive": (0.5, 0.9)}


def job(form: str, workers: int, servers: int = 1) -> Job:
    strength, decay = FORMS[form]
    options = {"strength": strength} | ({} if decay is None else {"mean_decay": decay})
    return make_job(
        seed=3,
        workload={"name": "linear", "batch_size": 4, "features": 11, "samples": 200, "noise": 1.0},
        optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.5},
        stop={"updates": 24},
        evaluation={"every_samples": 30},
        checkpoint={"updates": 7, "keep": 9},
        paradigm={"name": "asp", "compensation": form, **options},
        cluster={
            "servers": servers,
            "workers": workers,
            "compute": {"model": "lognormal", "seconds": [0.002 * (1 + (w == 1)) for w in range(workers)]},
        },
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_weights_are_those_of_the_formula_with_and_without_an_interruption(comm, needs, folder, form):
    """A resumed run corrects the gradients that were on their way at the checkpoint. No correction is the control."""
    needs(2)
    servers = 2 if comm.size > 3 else 1
    this = job(form, comm.size - servers, servers)
    for resume in (False, True):
        path = killed(comm, folder) if resume else folder
        weights = on_some(comm, this, path, resume=resume)
        if comm.rank:
            continue
        trace = load(path / "trace.h5")
        assert failures(trace) == []
        np.testing.assert_allclose(weights, delay_compensated(this, trace, *FORMS[form]), rtol=0, atol=1e-12)
        delayed = trace.tables["pushes"]["staleness"].any()
        plain: Any = delay_compensated(this, trace, 0.0, None)
        assert (np.abs(weights - plain).max() > 1e-9) == delayed
