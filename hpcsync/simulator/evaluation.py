"""Evaluations of a simulated run, and its final model."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from hpcsync.config.job import Job
from hpcsync.training.buffers import Buffers
from hpcsync.training.flat_model import FlatModel
from hpcsync.workloads.calibration import calibration
from hpcsync.workloads.registry import Workload, aimed


class Evaluation:
    """Evaluation of flat weights, with the buffers that the job chooses, on a copy of the workload's model."""

    def __init__(self, job: Job, workload: Workload) -> None:
        self._evaluate = None if workload.evaluate is None else aimed(workload.evaluate, job.stop.target_accuracy)
        self._flat = FlatModel(copy.deepcopy(workload.model))
        self._buffers = Buffers(self._flat.model, job.evaluation.buffers)
        self._final_buffers = Buffers(workload.model, job.evaluation.buffers)
        self._model = workload.model
        self._calibrate = calibration(job, workload)

    def __call__(self, weights: torch.Tensor, buffers: Sequence[torch.Tensor]) -> tuple[float, float]:
        """Return loss and accuracy of these weights.

        Parameters
        ----------
        weights
            Flat weights, shape (size,).
        buffers
            Buffers of the workers to choose from (`hpcsync.training.buffers`).
        """
        assert self._evaluate is not None
        self._flat.weights.copy_(weights)
        self._buffers.adopt(buffers)
        if self._calibrate is not None:
            self._calibrate(self._flat.model)
        return self._evaluate(self._flat.model)

    def finish(self, buffers: Sequence[torch.Tensor]) -> None:
        """Set the buffers of the workload's model, which has the final weights."""
        self._final_buffers.adopt(buffers)
        if self._calibrate is not None:
            self._calibrate(self._model)
