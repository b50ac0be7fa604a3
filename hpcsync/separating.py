"""What a job that separates the layers of its model leaves open, and its model, or its cluster, decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from statistics import mean

import numpy as np
import torch

from hpcsync.devices import iteration_seconds
from hpcsync.job import Job, Script, Timing
from hpcsync.job_errors import JobError, shown
from hpcsync.job_paradigms import Stanza
from hpcsync.learning.cutting import Halves, activation_shape, cut, flops
from hpcsync.learning.data import fetch
from hpcsync.learning.flat import trainable
from hpcsync.learning.profiling import Times, measured
from hpcsync.learning.workloads import Workload
from hpcsync.planning.node_assignment import Links, Profile, choose

ITERATIONS = 32  # of each worker, of which a mean is formed


def resolved(job: Job, workload: Workload, links: Links | None = None) -> Job:
    """The job with the share of its model that lies above the cut, and the number of workers that train it.

    links: between its ranks, where the job does not say what they are; by default nothing takes time there. A job of
    another paradigm stays as it is. Raises JobError for a share that cannot be found.
    """
    paradigm = job.paradigm
    if not isinstance(paradigm, Stanza):
        return job
    fc_share = paradigm.fc_share
    if fc_share is None:
        fc_share = _share_above(job, paradigm, workload)
    fc_workers = paradigm.fc_workers
    if fc_workers == "auto":
        profile = _profile(job, paradigm, workload, fc_share)
        plan = choose(profile, links or _links(job), job.cluster.workers, micro_batches=paradigm.micro_batches)
        fc_workers = plan.best.n_fc
    update = {"fc_share": fc_share, "fc_workers": fc_workers}
    return job.model_copy(update={"paradigm": paradigm.model_copy(update=update)})


def _share_above(job: Job, paradigm: Stanza, workload: Workload) -> float:
    """Of the model's floating-point operations."""
    n_below = n_above = 0
    if workload.train is not None:
        halves, x = cut(workload.model, paradigm.cut), _batch(job, workload)[0]
        n_below, n_above = flops(halves.below, x), flops(halves.above, _activations(halves, x))
    if n_below + n_above == 0:
        raise JobError(
            f"paradigm.fc_share: missing; must be a number from 0 to 1: with workload.name = "
            f"{shown(job.workload.name)} there are no floating-point operations to count"
        )
    return n_above / (n_below + n_above)


def _profile(job: Job, paradigm: Stanza, workload: Workload, fc_share: float) -> Profile:
    """What a node takes for a batch, and what it is of."""
    assert not isinstance(job.workload, Script)
    times = _times(job, paradigm, workload, fc_share)
    label_bytes, itemsize = 8, 4
    if isinstance(job.workload, Timing):
        n_fc, activations = job.workload.classifier, job.workload.activations
        n_conv = job.workload.parameters - n_fc
    else:
        halves, (x, *labels) = cut(workload.model, paradigm.cut), _batch(job, workload)
        n_conv, n_fc = (sum(p.numel() for p in trainable(half)) for half in halves)
        activations = _activations(halves, x)[0].numel()
        label_bytes = sum(label[0].nbytes for label in labels)
        itemsize = trainable(workload.model)[0].element_size()
    sizes = (n_conv, n_fc, activations, job.workload.batch_size, label_bytes, itemsize)
    return Profile(*times[:3], *sizes, times.fc_fixed_s)


def _times(job: Job, paradigm: Stanza, workload: Workload, fc_share: float) -> Times:
    """By the job's [cluster.compute], or else as this process takes them."""
    compute, n_workers = job.cluster.compute, job.cluster.workers
    if compute is None:
        assert workload.loss is not None
        return measured(cut(workload.model, paradigm.cut), workload.loss, _batch(job, workload))
    batch_s = mean(
        seconds
        for worker in range(n_workers)
        for seconds in islice(iteration_seconds(compute, job.seed, worker, n_workers), ITERATIONS)
    )
    conv_s, fc_s = (1.0 - fc_share) * batch_s, fc_share * batch_s
    forward_s = paradigm.forward_share * conv_s
    return Times(forward_s, conv_s - forward_s, fc_s, compute.fixed_share * fc_s)


def _batch(job: Job, workload: Workload) -> Sequence[torch.Tensor]:
    """The first one."""
    assert workload.train is not None and not isinstance(job.workload, Script)
    batch: Sequence[torch.Tensor] = fetch(workload.train, np.arange(job.workload.batch_size))
    return batch


def _activations(halves: Halves, x: torch.Tensor) -> torch.Tensor:
    """Of these samples, without values."""
    dtype = trainable(halves.below)[0].dtype
    return torch.empty(len(x), *activation_shape(halves.below, x), dtype=dtype, device="meta")


def _links(job: Job) -> Links:
    network = job.cluster.network
    if network is None:
        return Links(math.inf, 0.0)
    return Links(min(network.rates(0, job.cluster.workers)), 1e-6 * network.latency_us)
