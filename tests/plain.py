"""What plain PyTorch makes of a job, in one process and with no part of hpcsync's servers and means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from hpcsync.config.job import Job
from hpcsync.core.assignments import create_assignments
from hpcsync.core.job_validation import check
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Outcome
from hpcsync.training.sampler import batch_indices, sequence_indices
from hpcsync.workloads.registry import Workload


def on_batches(job: Job, steps: Iterable[Iterable[int]]) -> np.ndarray:
    """The weights after one step on each of these groups of batches together."""
    workload = check(job)
    shape = {"batch_size": job.workload.batch_size, "size": len(workload.train)}
    return trained(
        job, workload, (np.concatenate([batch_indices(job.seed, j, **shape) for j in numbers]) for numbers in steps)
    )


def on_samples(job: Job, steps: Iterable[np.ndarray]) -> np.ndarray:
    """The weights after one step on each of these groups of samples of the run's sequence together."""
    workload = check(job)
    return trained(job, workload, (sequence(job, numbers, len(workload.train)) for numbers in steps))


def sequence(job: Job, numbers: np.ndarray, size: int) -> np.ndarray:
    """Which samples of a data set of this size these ones of the run's sequence are."""
    return sequence_indices(job.seed, 0, int(numbers.max()) + 1, size=size)[numbers]


def whole_batches(job: Job, iterations: int) -> list[np.ndarray]:
    """The samples of the run's sequence that all workers take together, iteration by iteration."""
    return list(np.arange(job.batch_total * iterations).reshape(iterations, -1))


def trained(job: Job, workload: Workload, steps: Iterable[np.ndarray]) -> np.ndarray:
    """The weights after one step on each of these groups of samples of the data set."""
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[job.optimizer.name]
    optimizer = kind(workload.model.parameters(), lr=job.optimizer.lr, **job.optimizer.options)
    assert workload.loss is not None
    for indices in steps:
        at = torch.from_numpy(indices)
        optimizer.zero_grad()
        workload.loss(workload.model, *(tensor[at] for tensor in workload.train.tensors)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in workload.model.parameters()]).numpy()


def samples(job: Job, trace: Trace, push: Any) -> np.ndarray:
    """Indices of the samples that a push is of."""
    size, batch_size = len(check(job).train), int(push["batch_size"])
    if (first_sample := first_of(job, trace, push)) >= 0:
        return sequence_indices(job.seed, first_sample, batch_size, size=size)
    batch = int(push["iteration"] - 1) * job.cluster.workers + int(push["worker"])
    return batch_indices(job.seed, batch, batch_size=batch_size, size=size)


def first_of(job: Job, trace: Trace, push: Any) -> int:
    """Number of its first sample in the run's sequence, where samples are given out; -1 elsewhere."""
    if push["iteration"] == 1:
        return create_assignments(job).first[push["worker"]].first_sample
    grants = trace.tables["grants"]
    mine = (grants["worker"] == push["worker"]) & (grants["iteration"] == push["iteration"])
    return int(grants["first_sample"][mine][0])


def delay_compensated(job: Job, trace: Trace, strength: float, decay: float | None) -> np.ndarray:
    """The weights by the formula of DC-ASGD, from plain torch's gradients at the versions that the trace names."""
    workload = check(job)
    data, parameters = workload.train.tensors, list(workload.model.parameters())
    versions = [torch.cat([p.detach().flatten() for p in parameters]).numpy()]
    momentum, buffer = job.optimizer.options.get("momentum", 0.0), 0.0
    mean_square: dict[int, Any] = {}
    for push in trace.tables["pushes"]:
        if push["weight"] == 0:
            continue
        read, now = versions[push["version_read"]], versions[-1]
        torch.nn.utils.vector_to_parameters(torch.from_numpy(read), parameters)
        workload.model.zero_grad()
        at = torch.from_numpy(samples(job, trace, push))
        workload.loss(workload.model, *(tensor[at] for tensor in data)).backward()
        g = torch.cat([p.grad.flatten() for p in parameters]).numpy()
        factor: Any = strength
        if decay is not None:
            worker = int(push["worker"])
            mean_square[worker] = decay * mean_square.get(worker, 0.0) + (1 - decay) * g**2
            factor = strength / np.sqrt(mean_square[worker] + 1e-7)
        g = g + factor * g**2 * (now - read)
        buffer = momentum * buffer + g
        versions.append(now - job.optimizer.lr * buffer)
    return versions[-1]


def committed(job: Job, trace: Any) -> np.ndarray:
    """The weights that come of the commits in this trace: each of plain torch's steps on its samples, from the version
    that it read, as many times as it says it counted. An update is of as many of them as the trace says; their order is
    that of the versions that they say they made."""
    workload = check(job)
    data, parameters = workload.train.tensors, list(workload.model.parameters())
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[job.optimizer.name]
    versions = [torch.cat([p.detach().flatten() for p in parameters]).clone()]
    states: dict[int, Any] = {}
    taken = dict.fromkeys(range(job.cluster.workers), 0)
    outer, changes = outer_steps(job), []
    pushes = trace.tables["pushes"]
    made = np.where(pushes["outcome"] == Outcome.APPLIED, pushes["version_read"] + pushes["staleness"], len(pushes))
    for push in pushes[np.argsort(made, kind="stable")]:
        worker, n_steps = int(push["worker"]), int(push["local_steps"])
        read = versions[push["version_read"]]
        if worker not in states:
            mine = torch.nn.Parameter(read.clone())
            states[worker] = mine, kind([mine], lr=job.optimizer.lr, **job.optimizer.options)
        mine, optimizer = states[worker]
        ahead = job.optimizer.lr * job.optimizer.options.get("momentum", 0.0)
        buffer = optimizer.state[mine].get("momentum_buffer") if job.optimizer.options.get("nesterov") else None
        with torch.no_grad():
            mine.copy_(read if buffer is None else read - ahead * buffer)
        for rows in _of_steps(job, len(data[0]), trace, push, worker, n_steps, taken):
            torch.nn.utils.vector_to_parameters(mine.detach(), parameters)
            workload.model.zero_grad()
            workload.loss(workload.model, *(tensor[torch.from_numpy(rows)] for tensor in data)).backward()
            mine.grad = torch.cat([p.grad.flatten() for p in parameters])
            optimizer.step()
        buffer = optimizer.state[mine].get("momentum_buffer") if job.optimizer.options.get("nesterov") else None
        done = mine.detach() if buffer is None else mine.detach() + ahead * buffer
        if push["outcome"] == Outcome.APPLIED:
            changes.append(float(push["weight"]) * (done - read))
            if len(changes) == trace.tables["updates"]["n_contributions"][len(versions) - 1]:
                versions.append(outer(versions[-1], sum(changes)))
                changes = []
    return versions[-1].numpy()


def outer_steps(job: Job) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The next weights, given the last and the mean change: their sum, or as by Algorithm 3 of Liu et al. (2024)."""
    options = job.paradigm
    if options.name != "async-diloco":
        return torch.add
    period, c = options.momentum_every or -(-job.cluster.workers // options.quorum), options.momentum_between
    beta, lr, gradients, m = options.outer_momentum, options.outer_lr, list[torch.Tensor](), [0.0]

    def step(weights: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        gradients.append(-change)
        if len(gradients) % period:
            return weights - lr * (c * beta * m[0] - change / period)
        m[0] = beta * m[0] + sum(gradients[-period:]) / period
        return weights - lr * ((1 - c * period + c) * beta * m[0] - change / period)

    return step


def _of_steps(
    job: Job, size: int, trace: Any, push: Any, worker: int, n_steps: int, taken: dict[int, int]
) -> list[np.ndarray]:
    """The samples of each of a push's steps, out of so many."""
    if job.paradigm.name == "ashl":
        return np.split(samples(job, trace, push), n_steps)
    first, taken[worker] = taken[worker], taken[worker] + n_steps
    numbers = [(first + step) * job.cluster.workers + worker for step in range(n_steps)]
    return [batch_indices(job.seed, number, batch_size=job.workload.batch_size, size=size) for number in numbers]
