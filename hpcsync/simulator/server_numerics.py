"""Numerics of a run with servers in one process: the workers' gradients and the servers' updates.

Uses the arithmetic of real ranks (`hpcsync.training`) on the versions that they would have read: a granted version
stays unchanged in the store until its reader's gradient has been computed from it. One store represents the shards of
all servers, because the number of servers changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcsync.config.job import Job
from hpcsync.core.coordinator import AccumulateCommand, UpdateCommand
from hpcsync.core.roles import Roles
from hpcsync.simulator.evaluation import Evaluation
from hpcsync.simulator.gradients import Gradients, Work
from hpcsync.training import compressor, contributions, update_rules
from hpcsync.training.flat_model import trainable
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.parameter_store import Store, n_buffers, row_size
from hpcsync.workloads.registry import Workload


class Contributed(NamedTuple):
    """A computed contribution.

    Attributes
    ----------
    loss : float
        Mean loss.
    sizes_bytes : Sequence[int]
        Bytes sent to each server, shape (n_servers,); empty if the contribution was cancelled.
    gradient_sq : float
        Squared norm of the gradient that is pushed; NaN if it is none.
    """

    loss: float
    sizes_bytes: Sequence[int] = ()
    gradient_sq: float = math.nan


class NoNumerics:
    """No arithmetic: contributions are only transferred; compressed ones have their nominal size.

    Parameters
    ----------
    job
        Job with servers.
    workload
        Its workload.

    Attributes
    ----------
    attributes
        Root attributes of the trace that describe the compression.
    """

    def __init__(self, job: Job, workload: Workload) -> None:
        parameters = trainable(workload.model)
        size = sum(p.numel() for p in parameters)
        self._shards = Roles(job.cluster.servers, job.cluster.workers).shards(size)
        # Bytes sent to each server without compression.
        self._dense = [(shard.stop - shard.start) * parameters[0].element_size() for shard in self._shards]
        self._compression = compressor.of_job(job, parameters)
        self.attributes = {} if self._compression is None else self._compression.attributes()

    def contribute(self, worker: int, work: Work) -> Contributed:
        """Return NaN as the loss, and the nominal sizes."""
        if work.share < 1.0:
            return Contributed(math.nan)
        if self._compression is None:
            return Contributed(math.nan, self._dense)
        return Contributed(math.nan, [self._compression.nominal_bytes(shard, work.ratio) for shard in self._shards])

    def apply(self, update: UpdateCommand) -> tuple[int, float]:
        """Return version 0, which no update makes."""
        return 0, math.nan

    def evaluate(self, workers: Sequence[int]) -> tuple[float, float]:
        """Raise RuntimeError: there is nothing to evaluate."""
        raise RuntimeError("a workload without arithmetic cannot be evaluated")

    def _nothing(self, *of_any_kind: Any, **options: Any) -> None:
        """Do nothing."""

    grant = join = discard = accumulate = delivered = finish = _nothing


class Numerics(NoNumerics):
    """Numerics of a run with servers, in the order in which the simulation calls them.

    Memory: at most two rows of the flat weights per worker, what its contribution keeps, and its buffers twice.
    """

    def __init__(self, job: Job, workload: Workload) -> None:
        super().__init__(job, workload)
        n_workers, spec = job.cluster.workers, OptimizerSpec.of_job(job)
        self._compressors: Sequence[compressor.Compressor] = ()
        if self._compression is not None:
            self._compressors = [self._compression.compressor(worker) for worker in range(n_workers)]
        self._evaluation = Evaluation(job, workload)
        self._gradients = Gradients(job, workload)
        self._flat = self._gradients.flat
        size = self._flat.size
        buffers, slots = _rows(n_buffers(n_workers), self._flat.weights), _rows(n_workers, self._flat.weights)
        # Views, created once because creating them takes time.
        self._versions, self._slots = [list(rows[:, :size]) for rows in (buffers, slots)]
        self._versions[0].copy_(self._flat.weights)
        rule = update_rules.of_job(job, spec.on_server)
        self._store = Store(buffers, slots, np.zeros(n_workers + 1, np.int64), rule, size)
        self.contributions = contributions.in_turn(job, self._versions[0], spec.on_worker)
        self._copy = torch.empty_like(self._flat.weights)
        self._has_buffers = self._gradients.has_buffers
        self._buffers: dict[int, torch.Tensor] = {}  # worker -> its buffers as of its latest push

    def grant(self, worker: int) -> None:
        """Let the worker read the current version and continue with it."""
        self.contributions[worker].adopt(self._read(worker))

    def join(self, worker: int) -> None:
        """Let a worker that has joined again read the current version."""
        self.contributions[worker].join(self._read(worker))

    def contribute(self, worker: int, work: Work) -> Contributed:
        """Compute the worker's next contribution, of all its local steps, into its slot, as the servers receive it.

        A contribution that was cancelled is not put into the slot.
        """
        self._make_steps(worker, work, push=True)
        contribution = self.contributions[worker]
        loss = contribution.prepare()
        if work.share < 1.0:
            return Contributed(loss)
        gradient_sq, slot = float(contribution.gradient_sq()), self._slots[worker]
        if self._compression is None:
            slot.copy_(contribution.vector)
            return Contributed(loss, self._dense, gradient_sq)
        payloads = self._compressors[worker].encode(contribution.vector, self._shards, work.ratio)
        for shard, payload in zip(self._shards, payloads, strict=True):
            self._compression.decode(payload, slot[shard], shard)
        return Contributed(loss, [payload.nbytes for payload in payloads], gradient_sq)

    def discard(self, worker: int, work: Work) -> None:
        """Make the local steps of a worker that leaves without pushing them: they use its batches and its momentum."""
        self._make_steps(worker, work, push=False)

    def _make_steps(self, worker: int, work: Work, *, push: bool) -> None:
        """Make all local steps; `push` says whether a push follows."""
        contribution = self.contributions[worker]
        for step in range(work.n_steps):
            loss = self._gradients.compute(
                worker, contribution.weights, work if work.n_steps == 1 else work.of_step(step)
            )
            n_samples, last = work.n_samples // work.n_steps, push and step == work.n_steps - 1
            contribution.step(self._flat.gradient, n_samples, loss, last=last)

    def accumulate(self, accumulation: AccumulateCommand) -> None:
        """Add the worker's slot to the accumulated contributions."""
        self._store.accumulate(accumulation.worker, accumulation.weight)

    def apply(self, update: UpdateCommand) -> tuple[int, float]:
        """Apply an update to the store; return the version that it makes and the squared norm of its gradient."""
        gradient_sq = float(
            self._store.apply(update.workers, update.lr, update.weights, update.divisor, update.momentum)
        )
        return self._store.version, gradient_sq

    def delivered(self, worker: int) -> None:
        """Keep the worker's buffers: its push has arrived."""
        if self._has_buffers:
            self._buffers[worker] = self._gradients.buffers(worker)

    def evaluate(self, workers: Sequence[int]) -> tuple[float, float]:
        """Return loss and accuracy of the current version, with the buffers of these workers."""
        return self._evaluation(self._store.weights, self._buffers_of(workers))

    def finish(self, workers: Sequence[int]) -> None:
        """Write the final weights, and the buffers of these workers, into the workload's model."""
        self._flat.weights.copy_(self._store.weights)
        self._evaluation.finish(self._buffers_of(workers))

    def _buffers_of(self, workers: Sequence[int]) -> list[torch.Tensor]:
        return [self._buffers[worker] for worker in workers] if self._has_buffers else []

    def _read(self, worker: int) -> torch.Tensor:
        """Return the current version, which stays unchanged as long as the worker's contribution needs it."""
        if not self.contributions[worker].keeps_read:
            return self._copy.copy_(self._store.weights)
        buffer, _ = self._store.pin(worker)
        return self._versions[buffer]


def _rows(n: int, like: torch.Tensor) -> torch.Tensor:
    """Return zeros of shape (n, row_size); NumPy's use no memory until written, and most versions never are."""
    return torch.from_numpy(np.zeros((n, row_size(len(like))), like.numpy().dtype))
