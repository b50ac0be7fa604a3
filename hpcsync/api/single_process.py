"""Session of a process that trains alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from hpcsync.config.job import Job
from hpcsync.core.iterations import Iterations
from hpcsync.core.session import Asked, Batches, Session
from hpcsync.core.step_problems import ProblemReport, StepChecks
from hpcsync.paradigms.records import PushInfo
from hpcsync.training.buffers import Buffers, Calibrate
from hpcsync.training.lr_schedule import EvaluationSchedule, learning_rate
from hpcsync.training.optimizer_groups import parameters_of, scaled_rates
from hpcsync.training.script_optimizers import replace_step, unscale
from hpcsync.workloads.registry import Evaluate, aimed


class LocalSession(Session):
    """Training in a single process without MPI, in the data order of a run with one worker.

    It follows the job's stopping rule, learning-rate schedule and padding, and records nothing. With allocated batches
    it trains the whole total.
    """

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        evaluate: Evaluate | None,
        calibrate: Calibrate | None = None,
    ) -> None:
        super().__init__(rank=0, n_workers=1, worker=0)
        started_s = time.perf_counter()
        self._now = lambda: time.perf_counter() - started_s
        self._stop = job.stop
        self._schedule = EvaluationSchedule(job.evaluation.every_samples)
        self._samples = 0
        self._updates = 0
        total = None if job.batches.policy == "equal" else job.batch_total
        allocated = None if total is None else lambda: (self._samples, total)
        self._iterations = Iterations(
            job,
            0,
            self._now,
            lambda: self.stopped,
            allocated=allocated,
            unused=lambda: not self._checks.computed,
            n_optimizers=len(optimizers),
        )
        self._lr = learning_rate(job)
        self._model = model
        self._optimizers = optimizers
        self._checks = StepChecks(model, optimizers)
        self._report = ProblemReport(job.stop.on_nan)
        self._give_back = [replace_step(each, partial(self._optimizer_step, each, each.step)) for each in optimizers]
        self._evaluate = None if evaluate is None else aimed(evaluate, job.stop.target_accuracy)
        self._calibrate = calibrate
        self._evaluating_s = 0.0  # not training time
        self._clip_norm = job.optimizer.clip_norm

    def _batches(self, asked: Asked) -> Batches:
        return self._iterations.shard(asked)

    def step(self, loss: torch.Tensor | float | None = None) -> bool:
        """Step with the script's optimizer; return False once the run is over."""
        if self._iterations.left_over:
            return False
        self._refuse_step()
        if len(self._optimizers) > 1:
            raise RuntimeError("step: the session has several optimizers; call the step of each of them instead")
        if loss is not None:
            self.record(loss)
        self._optimizers[0].step()
        return not self.stopped

    def _optimizer_step(
        self, optimizer: Any, own_step: Callable[[], Any], closure: Callable[[], Any] | None = None
    ) -> Any:
        """Make a step of the script: clip the gradient, and multiply the rates by the schedule's factor."""
        if self._iterations.left_over:
            return None
        self._refuse_step()
        loss = None if closure is None else self._of_closure(closure)
        self._iterations.begin_again()
        self._iterations.end()
        self._check(optimizer)
        if self._clip_norm is not None:
            unscale(optimizer)
            if hasattr(optimizer, "grad_scale"):  # of a GradScaler, which removes it
                optimizer.grad_scale = None  # what has been dealt with
            torch.nn.utils.clip_grad_norm_(list(parameters_of(optimizer)), self._clip_norm)
        optimizer._opt_called = True  # what a scheduler looks for
        with scaled_rates(optimizer, self._lr(self._samples, self._updates, 1)):
            own_step()
        self._count()
        return loss

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Say what is wrong with the step, or raise JobError."""
        losses = self._take_losses(None)
        gradients = [p.grad.flatten() for p in parameters_of(optimizer) if p.grad is not None]
        gradient = torch.cat(gradients) if gradients and not losses else torch.zeros(0)
        problem = self._checks.problem(losses, gradient, self._optimizers.index(optimizer))
        self._report.see(PushInfo(0.0, 0, self._updates + 1, self._updates, problem=problem))

    def _count(self) -> None:
        """Count an update, and evaluate if that is due."""
        self._samples += self._iterations.batch_size
        self._updates += 1
        trained_s = self._now() - self._evaluating_s
        self.stopped = self._stop.reached(samples=self._samples, updates=self._updates, seconds=trained_s)
        if self._evaluate is not None and self._schedule.begin_if_due(self._samples):
            self.stopped |= self._stop.satisfied(*self._judge(self._evaluate))

    def _judge(self, evaluate: Evaluate) -> tuple[float, float]:
        begin_s, modes = self._now(), {module: module.training for module in self._model.modules()}
        if self._calibrate is None:
            judged = evaluate(self._model)
        else:
            buffers = Buffers(self._model)
            own = buffers.packed()
            self._calibrate(self._model)
            judged = evaluate(self._model)
            buffers.adopt([own])
        for module, was_training in modes.items():  # some layers may be frozen
            module.training = was_training
        self._evaluating_s += self._now() - begin_s
        return judged

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Recompute the model's statistics, if asked for; there is no other process to wait for."""
        ends = self._ends_with(error)
        self._entered = False
        for give_back in self._give_back:
            give_back()
        self._checks.ended()
        if (error is None or ends) and self._calibrate is not None:
            self._calibrate(self._model)
        return ends
