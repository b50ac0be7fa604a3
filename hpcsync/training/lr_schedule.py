"""Functions of training progress: the learning rate, and when to evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable

from hpcsync.config.job import Job, Script
from hpcsync.state import Stateful

LearningRate = Callable[[int, int, int], float]


def learning_rate(job: Job) -> LearningRate:
    """Return the learning rate of server updates as a function.

    Parameters
    ----------
    job
        The job, with its schedule, `lr_clock` and `async_lr_scale`.

    Returns
    -------
    callable
        `lr(samples, updates, n_contributions)`: rate of the update that follows so many samples and updates.

    Notes
    -----
    The optimizers of a script have rates of their own (`training.script_optimizers`), of which this is a factor.

    The schedule counts what `optimizer.lr_clock` names. With `async_lr_scale = "1/workers"` an update of n of P
    contributions is scaled by n/P, so that a pass over the data makes the same total step under every paradigm.
    """
    optimizer, workers = job.optimizer, job.cluster.workers
    by_samples = optimizer.lr_clock == "samples"
    scaled = optimizer.async_lr_scale == "1/workers"
    base = 1.0 if isinstance(job.workload, Script) else float(optimizer.lr)
    if optimizer.schedule is None and not scaled:
        return lambda samples, updates, n_contributions: base

    def lr(samples: int, updates: int, n_contributions: int) -> float:
        clock = samples if by_samples else updates
        share = n_contributions / workers if scaled else 1.0
        return base * share * factor(optimizer.schedule, clock)

    return lr


def worker_rate(job: Job) -> Callable[[int, int], float]:
    """Return the learning rate of a worker's local steps as a function of its own samples and iterations.

    The schedule assumes that all other workers are as far as this one, so that no step has to wait for their progress:
    its samples are those of all workers. Its updates are the worker's own steps.
    """
    lr, workers = learning_rate(job), job.cluster.workers
    if job.optimizer.schedule is None:
        rate = lr(0, 0, workers)
        return lambda samples, iterations: rate
    return lambda samples, iterations: lr(samples * workers, iterations, workers)


def factor(schedule: object, clock: int) -> float:
    """Return the schedule's factor of the initial rate when the clock is `clock`; 1 without a schedule."""
    if schedule is None:
        return 1.0
    warmup = schedule.warmup  # type: ignore[attr-defined]
    if clock < warmup:
        return (clock + 1) / (warmup + 1)
    if schedule.name == "multistep":  # type: ignore[attr-defined]
        return float(schedule.gamma ** sum(clock >= m for m in schedule.milestones))  # type: ignore[attr-defined]
    progress = min(1.0, (clock - warmup) / max(1, schedule.total - warmup))  # type: ignore[attr-defined]
    return 0.5 * (1.0 + math.cos(math.pi * progress))


class EvaluationSchedule(Stateful):
    """Schedule of evaluations: one is due at every multiple of `every_samples` training samples; 0: never."""

    state_types = {"next_samples": int}
    __slots__ = ("_every_samples", "next_samples")

    def __init__(self, every_samples: int) -> None:
        self._every_samples = every_samples
        self.next_samples = every_samples

    def due(self, samples: int) -> bool:
        """Return True if an evaluation is due after so many samples."""
        return 0 < self._every_samples and self.next_samples <= samples

    def begin_if_due(self, samples: int) -> bool:
        """Return True if an evaluation is due, and then record that it has begun."""
        if not self.due(samples):
            return False
        self.begun(samples)
        return True

    def begun(self, samples: int) -> None:
        """Record that an evaluation after so many samples has begun; the next is due at the next multiple."""
        self.next_samples = samples - samples % self._every_samples + self._every_samples

    def resume(self, next_samples: int, samples: int) -> None:
        """Continue after so many samples, where the next one was due at `next_samples`; it may be due earlier now."""
        if self._every_samples:
            self.begun(samples)
            self.next_samples = min(self.next_samples, next_samples)
