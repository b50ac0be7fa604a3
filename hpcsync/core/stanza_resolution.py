"""Settings of a layer-separating job that follow from its model or its cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from statistics import mean
from typing import NamedTuple, cast

import numpy as np
import torch

from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job, Script
from hpcsync.config.workloads import Timing
from hpcsync.core.device_speed import iteration_seconds
from hpcsync.paradigms.stanza import StanzaOptions
from hpcsync.planning.split_cost import Shape, Times
from hpcsync.planning.stanza_planner import Link, SplitProfile, choose
from hpcsync.training.model_split import ModelSplit, cut, shape
from hpcsync.training.sampler import fetch
from hpcsync.training.split_profile import measured
from hpcsync.workloads.registry import Workload

ITERATIONS = 32  # iterations of each worker in the mean time


class Divided(NamedTuple):
    """Model that is cut in two.

    Attributes
    ----------
    shape
        Sizes of the halves.
    halves
        The halves; None for a model that consists of sizes only.
    batch
        First batch; empty for such a model.
    """

    shape: Shape
    halves: ModelSplit | None = None
    batch: Sequence[torch.Tensor] = ()


def stanza_options(job: Job) -> StanzaOptions:
    """Return the options of this layer-separating job."""
    assert job.paradigm.separates_layers
    return cast(StanzaOptions, job.paradigm)


def divided(job: Job, workload: Workload) -> Divided:
    """Return the model of this layer-separating job, cut in two."""
    assert not isinstance(job.workload, Script)
    if isinstance(job.workload, Timing):
        return Divided(job.workload.shape)
    assert workload.train is not None
    halves = cut(workload.model, stanza_options(job).cut)
    batch = fetch(workload.train, np.arange(job.workload.batch_size))
    return Divided(shape(halves, batch), halves, batch)


def fc_share(job: Job, shape: Shape) -> float:
    """Return the share of the model's computation above the cut.

    It is the job's setting, or else the share of the floating-point operations.

    Raises
    ------
    JobError
        If there are no operations to count.
    """
    if (share := stanza_options(job).fc_share) is not None:
        return share
    if shape.conv_flops + shape.fc_flops == 0:
        raise JobError(
            f"paradigm.fc_share: missing; must be a number from 0 to 1: with workload.name = "
            f"{shown(job.workload.name)} there are no floating-point operations to count"
        )
    return shape.fc_share


def resolved(job: Job, workload: Workload, link: Link | None = None) -> Job:
    """Return the job with the share of its model above the cut and the number of workers that train it.

    Parameters
    ----------
    job
        The job; one of another paradigm is returned unchanged.
    workload
        Its workload.
    link
        Measured link of every rank. None: the job's network; without one, transfers take no time.

    Raises
    ------
    JobError
        If a value cannot be determined.
    """
    if not job.paradigm.open_keys:
        return job
    paradigm = stanza_options(job)
    model = divided(job, workload)
    paradigm = replace(paradigm, fc_share=fc_share(job, model.shape))
    if paradigm.fc_workers == "auto":
        assert not isinstance(job.workload, Script)
        profile = SplitProfile(_times(job, paradigm, workload, model), model.shape, job.workload.batch_size)
        plan = choose(profile, link or _link(job), job.cluster.workers, micro_batches=paradigm.micro_batches)
        paradigm = replace(paradigm, fc_workers=plan.best.n_fc)
    return job.model_copy(update={"paradigm": paradigm})


def _times(job: Job, paradigm: StanzaOptions, workload: Workload, model: Divided) -> Times:
    """Return the times of the job's [cluster.compute], or else times measured in this process."""
    compute, n_workers = job.cluster.compute, job.cluster.workers
    if compute is None:
        assert model.halves is not None and workload.loss is not None
        if job.cluster.device != "cpu" and torch.cuda.is_available():
            raise JobError(
                'paradigm.fc_workers = "auto": must come with [cluster.compute] where ranks compute on GPUs: only CPUs '
                "are measured"
            )
        return measured(model.halves, workload.loss, model.batch)
    batch_s = mean(
        seconds
        for worker in range(n_workers)
        for seconds in islice(iteration_seconds(compute, job.seed, worker, n_workers), ITERATIONS)
    )
    forward, backward, above = (share * batch_s for share in paradigm.shares)
    return Times(forward, backward, above, compute.fixed_share * above, compute.fixed_share)


def _link(job: Job) -> Link:
    network = job.cluster.network
    if network is None:
        return Link(math.inf, 0.0)
    return Link(min(network.rates(0, job.cluster.workers)), 1e-6 * network.latency_us)
