"""What a worker does with its gradients and with the weights of the servers, and what it pushes.

| contribution | local steps          | a push sends            | after the answer                           |
|--------------|----------------------|-------------------------|--------------------------------------------|
| gradient     | none                 | the gradient            | continues from the servers' weights        |
| change       | of its own optimizer | the steps' change       | continues from the servers' weights        |
| position     | of its own optimizer | the worker's weights    | moves towards the servers' weights (EASGD) |

Real ranks and the simulator use the same classes: on a rank the weights are those of its model, and the read fills them
or a vector of their size; in a simulation they are rows of one store.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import SupportsFloat

import torch

from hpcsync.config.job import Job
from hpcsync.config.workloads import Timing
from hpcsync.state import Stateful
from hpcsync.training.flat_model import FlatModel, SquaredNorm
from hpcsync.training.lr_schedule import worker_rate
from hpcsync.training.optimizers import WorkerOptimizer
from hpcsync.training.update_rules import towards

OnWorker = Callable[[torch.Tensor], WorkerOptimizer]  # creates the optimizer of a worker's flat weights


class Contribution(Stateful):
    """A worker that contributes gradients: it makes no local steps.

    Parameters
    ----------
    weights
        Weights from which the worker computes its gradients, shape (size,).
    vector
        Where the gradients are computed, if they always are in the same memory.
    of_gradients
        Whether a push sends a gradient; False without arithmetic, where the vector is only transferred.

    Attributes
    ----------
    weights
        As above; `adopt` may replace the tensor.
    vector
        What the next push sends, shape (size,), after `prepare`.
    """

    state_types = {}  # while the worker waits for the answer to a push
    keeps_read = True  # the weights that were read must stay unchanged until the push

    def __init__(self, weights: torch.Tensor, vector: torch.Tensor | None = None, *, of_gradients: bool = True) -> None:
        self.weights = weights
        self._of_gradients = of_gradients
        self.vector = weights if vector is None else vector
        self._loss_sum = 0.0
        self._n_losses = 0

    def adopt(self, read: torch.Tensor) -> None:
        """Continue with weights of the servers, shape (size,), after a push or at the start."""
        self.weights = read

    def join(self, read: torch.Tensor) -> None:
        """Continue with weights of the servers after an absence; steps since the last push are discarded."""
        self._loss_sum, self._n_losses = 0.0, 0
        self.adopt(read)

    def step(self, gradient: torch.Tensor, n_samples: int, loss: float, *, last: bool) -> None:
        """Use a gradient at `weights`.

        Parameters
        ----------
        gradient
            Mean gradient of the samples, shape (size,).
        n_samples
            Number of samples.
        loss
            Their mean loss.
        last
            True if a push follows.
        """
        self._loss_sum += loss
        self._n_losses += 1
        self._step(gradient, n_samples, last)

    def prepare(self) -> float:
        """Make `vector` ready for the push; return the mean loss of the steps since the last one."""
        loss, self._loss_sum, self._n_losses = self._loss_sum / self._n_losses, 0.0, 0
        return loss

    def gradient_sq(self) -> SupportsFloat:
        """Return the squared norm of what the next push sends, after `prepare`; NaN if it is no gradient.

        On a GPU it may be read once the stream has been waited for.
        """
        return SquaredNorm(self.vector) if self._of_gradients else math.nan

    def _step(self, gradient: torch.Tensor, n_samples: int, last: bool) -> None:
        self.vector = gradient


class LocalSteps(Contribution):
    """A worker with an optimizer of its own, whose push covers several steps.

    Parameters
    ----------
    weights
        Weights of the worker, shape (size,), changed in place.
    optimizer
        Optimizer of these weights.
    rate
        Learning rate as a function of the worker's own samples and steps.

    Attributes
    ----------
    steps, samples
        Gradients used so far, and their samples.
    """

    state_types = {"_optimizer": WorkerOptimizer, "steps": int, "samples": int, "_lr": float}

    def __init__(self, weights: torch.Tensor, optimizer: WorkerOptimizer, rate: Callable[[int, int], float]) -> None:
        super().__init__(weights, of_gradients=False)  # it pushes no gradient
        self.steps = self.samples = 0
        self._optimizer = optimizer
        self._rate = rate
        self._lr = 0.0  # of the last gradient

    def _step(self, gradient: torch.Tensor, n_samples: int, last: bool) -> None:
        self._lr = self._rate(self.samples, self.steps)
        self.steps += 1
        self.samples += n_samples
        self._use(gradient, last)

    def _use(self, gradient: torch.Tensor, last: bool) -> None:
        self._optimizer.step(gradient, self._lr)


class Change(LocalSteps):
    """A worker that pushes the change of its weights since it read those of the servers, from which it continues.

    The state of its optimizer, such as momentum, stays with the worker. A worker that leaves pushes its steps first.

    Parameters
    ----------
    weights, optimizer, rate
        As for `LocalSteps`.
    vector
        Memory of the change, shape (size,).
    """

    def __init__(
        self, weights: torch.Tensor, optimizer: WorkerOptimizer, rate: Callable[[int, int], float], vector: torch.Tensor
    ) -> None:
        super().__init__(weights, optimizer, rate)
        self.vector = vector
        self._read = weights

    def adopt(self, read: torch.Tensor) -> None:
        """Continue from the weights of the servers."""
        self._read = read
        self.weights.copy_(read)
        self._optimizer.look_ahead()

    def prepare(self) -> float:
        """Compute the change, without look-ahead."""
        self._optimizer.drop_look_ahead()
        torch.sub(self.weights, self._read, out=self.vector)
        return super().prepare()


class Position(LocalSteps):
    """A worker that pushes its position and then moves towards the servers' centre (EASGD).

    It reads the centre as it was before its own position moved it. With the last gradient before a push it makes its
    step only after both moves. A worker that leaves between two pushes discards its steps since the last one; a worker
    that joins starts from the centre.

    Parameters
    ----------
    weights, optimizer, rate
        As for `LocalSteps`.
    gradient
        Memory of the last gradient until the answer to a push, shape (size,); it may be where gradients are computed.
    alpha
        Share of the distance to the centre by which the worker moves.
    """

    state_types = {"weights": torch.Tensor, "_gradient": torch.Tensor}
    keeps_read = False

    def __init__(
        self,
        weights: torch.Tensor,
        optimizer: WorkerOptimizer,
        rate: Callable[[int, int], float],
        gradient: torch.Tensor,
        alpha: float,
    ) -> None:
        super().__init__(weights, optimizer, rate)
        self._gradient = gradient
        self._alpha = alpha

    def adopt(self, read: torch.Tensor) -> None:
        """Move towards the centre, and make the step of the last gradient; `read` is overwritten."""
        if self.steps == 0:
            return  # the worker is at the centre
        self.weights.add_(towards(self.weights, read, self._alpha))
        self._optimizer.look_ahead()
        self._optimizer.step(self._gradient, self._lr)

    def join(self, read: torch.Tensor) -> None:
        """Start from the centre; the optimizer keeps its state, such as momentum."""
        self._loss_sum, self._n_losses = 0.0, 0
        self.weights.copy_(read)
        self._optimizer.look_ahead()

    def prepare(self) -> float:
        """Drop the look-ahead from the position."""
        self._optimizer.drop_look_ahead()
        return super().prepare()

    def _use(self, gradient: torch.Tensor, last: bool) -> None:
        if not last:
            super()._use(gradient, last)
        elif gradient is not self._gradient:
            self._gradient.copy_(gradient)


def on_rank(job: Job, flat: FlatModel, create: OnWorker) -> tuple[Contribution, torch.Tensor]:
    """Return the contribution of a worker that has a model of its own, and the vector for the servers' weights.

    `create` creates its optimizer, if it has one.
    """
    if not job.paradigm.steps_on_workers:
        of_gradients = not isinstance(job.workload, Timing)
        return Contribution(flat.weights, flat.gradient, of_gradients=of_gradients), flat.weights
    read = torch.empty_like(flat.weights)
    memory = torch.empty_like(read) if job.paradigm.contribution == "change" else flat.gradient
    return _local(job, flat.weights, create, memory), read


def in_turn(job: Job, weights: torch.Tensor, create: OnWorker) -> list[Contribution]:
    """Return the contributions of all workers that compute on one model in turn, from these initial weights."""
    workers = range(job.cluster.workers)
    if not job.paradigm.steps_on_workers:
        return [Contribution(weights) for _ in workers]
    if job.paradigm.contribution == "change":
        change = torch.empty_like(weights)  # of the worker whose turn it is
        return [_local(job, weights.clone(), create, change) for _ in workers]
    return [_local(job, weights.clone(), create, torch.empty_like(weights)) for _ in workers]


def _local(job: Job, weights: torch.Tensor, create: OnWorker, memory: torch.Tensor) -> LocalSteps:
    """Return the contribution of a worker that makes steps; it has its change, or its last gradient, in `memory`."""
    optimizer, rate = create(weights), worker_rate(job)
    if job.paradigm.contribution == "change":
        return Change(weights, optimizer, rate, memory)
    return Position(weights, optimizer, rate, memory, job.paradigm.moving_rate(job.cluster.workers))
