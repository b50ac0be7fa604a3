"""A worker of elastic averaging: it trains by itself, and now and then meets the centre that the servers hold."""

from __future__ import annotations

import torch
from mpi4py import MPI

from hpcsync.job import Job
from hpcsync.job_paradigms import Easgd
from hpcsync.learning.optimizers import OptimizerSpec
from hpcsync.learning.peer import LocalOptimizer
from hpcsync.learning.rules import towards
from hpcsync.learning.schedule import worker_rate
from hpcsync.mpi.placement import Placement
from hpcsync.mpi.session import WorkerSession
from hpcsync.mpi.worker import Worker


class ElasticSession(WorkerSession):
    """A push is of `period` iterations: with the gradient of the last of them the worker gives its position, and reads
    where the centre was before that position moved it. Both moves done, it makes the gradient's step.

    A worker that leaves between two pushes leaves what it did since the first of them behind.
    """

    def __init__(
        self, comm: MPI.Intracomm, job: Job, model: torch.nn.Module, placement: Placement, optimizer: OptimizerSpec
    ) -> None:
        super().__init__(comm, job, model, placement)
        assert isinstance(job.paradigm, Easgd)
        self._period = job.paradigm.period
        self._alpha = job.paradigm.moving_rate(job.cluster.workers)
        self._local = LocalOptimizer(self.flat.weights, optimizer)
        self._rate = worker_rate(job)
        self._steps = 0
        self._samples = 0
        self._stretch = _Stretch()

    def _make_engine(self) -> Worker:
        self._centre = torch.empty_like(self.flat.weights)
        return Worker(self._link, self._centre, self.flat.weights, self._estimator)

    def _handed_out(self) -> tuple[int, int]:
        n_samples = self._engine.n_samples // self._period
        return self._engine.first_sample + self._stretch.steps * n_samples, n_samples

    def _end_iteration(self, begin_s: float, end_s: float, loss: float) -> None:
        lr = self._rate(self._samples, self._steps)
        batch_size = self._iterations.batch_size
        self._steps += 1
        self._samples += batch_size
        self._stretch.add(begin_s, batch_size, loss)
        if self._stretch.steps == self._period:
            self._exchange(end_s)
        if not self._engine.stopped:
            self._local.step(self.flat.gradient, lr)

    def _exchange(self, end_s: float) -> None:
        stretch, self._stretch = self._stretch, _Stretch()
        self._local.drop_look_ahead()
        self._engine.step(stretch.begin_s, end_s, stretch.samples, stretch.loss / stretch.steps, stretch.steps)
        if not self._engine.stopped:
            self.flat.weights.add_(towards(self.flat.weights, self._centre, self._alpha))
            self._local.look_ahead()


class _Stretch:
    """The iterations since the last push."""

    def __init__(self) -> None:
        self.begin_s = 0.0
        self.steps = 0
        self.samples = 0
        self.loss = 0.0  # sum

    def add(self, begin_s: float, batch_size: int, loss: float) -> None:
        if self.steps == 0:
            self.begin_s = begin_s
        self.steps += 1
        self.samples += batch_size
        self.loss += loss
