"""Running statistics of a workload's model, recomputed from its training data."""

from __future__ import annotations

from torch import Tensor, nn

from hpcsync.config.job import Job, Script
from hpcsync.training.buffers import Calibrate, recompute_statistics
from hpcsync.training.flat_model import device_of
from hpcsync.training.sampler import batch_indices, fetch, whole_batches
from hpcsync.workloads.registry import Workload

BATCHES = 32  # as many of the job's batches are passed through the model


def calibration(job: Job, workload: Workload) -> Calibrate | None:
    """Return the function that recomputes the statistics, if the job evaluates with recomputed ones.

    It passes the first batches in the job's data order through the loss, at most those of one training epoch.
    """
    loss, train = workload.loss, workload.train
    if job.evaluation.buffers != "recompute" or loss is None or train is None:
        return None
    assert not isinstance(job.workload, Script), "such a job has no workload"
    batch_size, size = job.workload.batch_size, len(train)  # type: ignore[arg-type]

    def forward(model: nn.Module, number: int) -> None:
        indices = batch_indices(job.seed, number, batch_size=batch_size, size=size)
        device = device_of(model)
        loss(model, *(x.to(device) if isinstance(x, Tensor) else x for x in fetch(train, indices)))

    n_batches = min(BATCHES, whole_batches(batch_size, size))
    return lambda model: recompute_statistics(model, range(n_batches), forward)
