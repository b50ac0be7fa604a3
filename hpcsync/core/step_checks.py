"""What may be wrong with a step of a training script: no gradient, numbers that are not finite, another model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch

from hpcsync.config.job import Job
from hpcsync.config.workloads import Timing
from hpcsync.paradigms.records import Problem
from hpcsync.training.flat_model import FlatModel


class StepChecks:
    """Checks of every step of a script.

    Parameters
    ----------
    model
        Its model.
    optimizers
        Its optimizers.
    flat
        Flat view of the parameters that are trained; None for a process that trains alone.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], flat: FlatModel | None = None
    ) -> None:
        self._model, self._optimizers, self._flat = model, optimizers, flat
        self._connected = self._parameters()
        self._in_groups = self._groups()
        self._n_checked = 0
        self._computed = False  # whether a gradient has been computed since the last step
        trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        require = [p.requires_grad for p in trained]
        for parameter in trained:  # frozen ones may be trained later
            parameter.requires_grad_(True)
        self._hook = torch.autograd.graph.register_multi_grad_hook(trained, self._on_gradient, mode="any")
        for parameter, required in zip(trained, require, strict=True):
            parameter.requires_grad_(required)

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        self._computed = True

    def problem(self, losses: Sequence[float], gradient: torch.Tensor) -> Problem:
        """Return what is wrong with the step under way.

        Parameters
        ----------
        losses
            Losses recorded for it.
        gradient
            Its flat gradient, which is looked at only if there are none.
        """
        computed, self._computed = self._computed, False
        if self.model_changed():
            return Problem.MODEL_CHANGED
        if not computed:
            return Problem.NO_GRADIENT
        if losses:
            return Problem.NONE if all(map(math.isfinite, losses)) else Problem.LOSS_NOT_FINITE
        return Problem.NONE if bool(torch.isfinite(gradient).all()) else Problem.GRADIENT_NOT_FINITE

    def model_changed(self) -> bool:
        """Return True if the model has other parameters than at the begin, or they have been moved or cast.

        Whether it has other parameters takes a pass over all of its modules, in step 1, 2, 3, 5, 9, ... and at the end.
        """
        n, self._n_checked = self._n_checked, self._n_checked + 1
        if self._groups() != self._in_groups or (n & (n - 1) == 0 and self._parameters() != self._connected):
            return True
        return self._flat is not None and self._flat.is_detached()

    def ended(self) -> bool:
        """Remove the hook; return True if the model has changed."""
        self._hook.remove()
        self._n_checked = 0
        return self.model_changed()

    def _parameters(self) -> list[int]:
        return [id(p) for p in self._model.parameters()]

    def _groups(self) -> list[int]:
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers)
        return [len(group["params"]) for group in groups]


def problem_of_job(job: Job, loss: float) -> Problem:
    """Return what is wrong with a step of a job whose workload is trained by hpcsync.

    Without arithmetic there is no loss, nor on convolution workers under layer separation.
    """
    if math.isfinite(loss) or isinstance(job.workload, Timing) or job.paradigm.separates_layers:
        return Problem.NONE
    return Problem.LOSS_NOT_FINITE
