"""A worker's part in a run without servers, as a training script sees it; rank 0 also keeps the books."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hpcsync.core.batches import Iterations
from hpcsync.core.peer_coordinator import Lockstep, StepInfo, create_batch_division, intake_info
from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.peer.exchange import ExchangeResult
from hpcsync.mpi.peer.factory import exchange, layers
from hpcsync.mpi.session_base import Given, RankSession
from hpcsync.mpi.transport import cuda, messages
from hpcsync.mpi.transport.progress_engine import choose
from hpcsync.planning.batch_allocation import Allocated, Estimate
from hpcsync.run_dir.checkpoint import RUN
from hpcsync.trace.schema import Phase
from hpcsync.training import rng_state
from hpcsync.training.gradient import Loss
from hpcsync.training.lr_schedule import EvaluationSchedule, learning_rate, worker_rate
from hpcsync.training.speed_models import estimator


class PeerSession(RankSession):
    """All ranks are workers, each with weights and an optimizer of its own."""

    def __init__(self, given: Given) -> None:
        comm, job, checkpoints, transport = given.comm, given.job, given.checkpoints, given.placement.transport
        self._estimator = estimator(job, comm.rank)  # takes seconds, before the clock starts
        super().__init__(given, layers(comm, job, given.model))
        self.worker = comm.rank
        run, self._resumed = checkpoints.state(RUN), checkpoints.state(self._name)
        self._link = PeerChannel(comm, self.flat.size, self.flat.weights.dtype, transport, tolerant=self._tolerant)
        self._division = create_batch_division(job)
        if self._resumed is not None:
            self._division, self._estimator = self._resumed["division"], self._resumed["estimator"]
        self._exchange = exchange(
            job, self._link, self.flat, given.optimizer, self._layers, self._end_of_backward, self._division
        )
        if self._resumed is not None:
            self._exchange.restore(self._resumed["exchange"])
        self._exchange.show(1)
        # Others are all in MPI when something moves between them; only an evaluation may have to wait there.
        one_sided = self._exchange.one_sided
        self._progression = choose(self._link.comm, transport=transport) if one_sided else None
        poll = self._progression.poll if self._progression and self._progression.kind == "hooks" else None
        self._hooks = [] if poll is None else self._hook(poll)
        self._clocks = self._link.start(0.0 if run is None else run["now_s"])
        allocated = None if self._division is None else partial(self._division.work, self.worker)
        self._iterations = Iterations(job, self.worker, self._link.clock.now, self._leave, poll, allocated)
        self._times: tuple[float, float] | None = None  # of the computation that has ended, until its step
        self._lr, self._own_lr = learning_rate(job), worker_rate(job)
        self._iteration = 0
        self._samples = 0
        self._lockstep = Lockstep(job)
        self._evaluations = EvaluationSchedule(job.evaluation.every_samples if self._exchange.in_step else 0)
        self._in_step = self._exchange.in_step  # until all of those in step end
        if run is not None and self._resumed is not None:
            self._iteration, self._samples, evaluations = self._resumed["counts"]
            self._lockstep.restore(self._resumed["lockstep"], comm.size)
            self._evaluations.next_samples = evaluations if run["evaluated"] is None else run["evaluated"]

    def _hook(self, poll: Callable[[], None]) -> list[torch.utils.hooks.RemovableHandle]:
        """Let every gradient that is computed help the others' transfers along."""
        return [p.register_post_accumulate_grad_hook(lambda _: poll()) for p in self.flat.parameters]

    # ---- training ----

    def loss_here(self, loss: Loss | None) -> Loss | None:
        return self._exchange.loss_here(loss)

    def shard(self, dataset: Any, batch_size: int, epochs: int | None = 1) -> Iterator[Any]:
        self._refuse_outside()
        if self._resumed is not None:  # not before: the script's preparations may draw, and change the model, too
            self._restore(self._resumed)
            self._resumed = None
        self._describe(self._exchange.prepare(dataset, batch_size, self._iterations))
        self._link.phases.enter(Phase.COMPUTING, self._iteration + 1)
        for batch in self._iterations.shard(dataset, batch_size, epochs, lambda: self.stopped):
            yield self._exchange.begin(batch)

    def _describe(self, attributes: Mapping[str, int]) -> None:
        """More of the run is known."""

    def step(self, loss: torch.Tensor | float) -> bool:
        self._refuse_step()
        if self._optimizer is not None:
            self._refuse_other_rate(self._optimizer, self._job.optimizer.lr)
        loss = float(loss.detach()) if isinstance(loss, torch.Tensor) else loss
        if self._times is None:
            self._end_computation()
        self._end_iteration(loss)
        self._link.phases.enter(Phase.COMPUTING, self._iteration + 1)
        return not self.stopped

    def _end_iteration(self, loss: float) -> None:
        assert self._times is not None
        (begin_s, end_s), self._times = self._times, None
        outcome = self._advance(self._iterations.batch_size)
        step_info = StepInfo(
            worker=self.rank,
            iteration=self._iteration,
            peer=outcome.peer,
            begin_s=begin_s,
            end_s=end_s,
            compute_s=self._iterations.computed_s,
            wait_s=outcome.wait_s,
            comm_s=outcome.comm_s,
            batch_size=self._iterations.batch_size,
            loss=loss,
            wire_bytes=outcome.wire_bytes,
            n_received=outcome.n_received,
            weight=self._exchange.peer.weight,
        )
        self._link.step_info(step_info)
        if self._estimator is not None:
            self._share_out(self._estimator.observe(step_info.batch_size, step_info.compute_s, step_info.comm_s))
        self._halt_if_requested()

    def _end_of_backward(self) -> None:
        """The gradient of this iteration is computed: from here on, after `backward`, it is the mean."""
        if self._iterations.under_way:
            self._end_computation()
        elif self._times is not None:
            raise RuntimeError(
                "several backward passes in one step: the first one's gradient is the mean of all workers' already; "
                "add the losses up and call backward once"
            )

    def _end_computation(self) -> None:
        cuda.ready(self.flat.gradient)  # only then it has been computed
        self._times = self._iterations.end()
        self._link.phases.enter(self._exchange.phase)
        self._link.hear()
        self._exchange.end_computation(self._iterations.batch_size, self._link.stop_requested)

    def _advance(self, n_samples: int) -> ExchangeResult:
        """End one iteration more, of so many samples; in step without any after this worker has made its last."""
        self._hear()
        told, exchange = self._link.stop_requested, self._exchange
        lr = self._next_rate()
        self._iteration += 1
        self._samples += n_samples
        rounds, since = divmod(self._iteration, exchange.period)
        exchange.step(lr, n_samples=n_samples, stop=told, exchanging=since == 0)
        if exchange.in_step:
            self.stopped = self._count(since)
        else:
            self.stopped = told or self._alone_and_done(n_samples)
            exchange.show(self._serial())  # with this step in it, and not yet with what is about to come
        return exchange.exchange(rounds) if since == 0 else ExchangeResult()

    def _hear(self) -> None:
        """Take note of what rank 0 has said."""
        self._link.hear()
        while self._link.died:
            self._exchange.forget(self._link.died.pop(0))

    def _share_out(self, expected: Estimate | None) -> None:
        """After an iteration in step, where batches are given out. expected: by this worker; None if it has ended."""
        if self._division is None or not self._in_step:
            return
        assert self._exchange.agreed is not None
        n_contributing = self._exchange.agreed.n_contributing
        if allocated := self._division.exchanged(n_contributing, lambda: self._gather(expected)):
            self._allocated(allocated)

    def _gather(self, expected: Estimate | None) -> list[Estimate | None]:
        """What every worker expects."""
        said = self._link.gather((expected is not None, *(expected or (0.0, 0.0))))
        known = [Estimate(*estimate) if continued else None for continued, *estimate in said.tolist()]
        return known + [None] * (self.n_workers - len(known))

    def _allocated(self, allocated: Sequence[Allocated]) -> None:
        """All workers have agreed on new batch sizes, after this iteration."""

    def _next_rate(self) -> float:
        """Of one model's next step, or of this replica's, for which the others count as being as far as it is."""
        if self._job.one_model:
            return self._lr(self._lockstep.samples, self._lockstep.updates, self.n_workers)
        return self._own_lr(self._samples, self._iteration)

    def _count(self, since: int) -> bool:
        """In step, `since` iterations after an exchange: whether this iteration is the last one, for all."""
        lockstep, agreed, ended = self._lockstep, self._exchange.agreed, False
        if since == 0:
            assert agreed is not None
            lockstep.exchanged(agreed.n_contributing, agreed.n_steps, agreed.n_samples)
            ended = agreed.stop or agreed.n_steps == 0
        self._in_step = not (ended or lockstep.enough(since))
        if self._in_step and since == 0 and self._evaluations.begin_if_due(lockstep.samples):
            self._exchange.show(self._serial())
            self._shown()
        return not self._in_step

    def _alone_and_done(self, n_samples: int) -> bool:
        """One worker knows when it has done enough; among several each is told, a little later."""
        if self.n_workers > 1:
            return False
        self._lockstep.exchanged(1, 1, n_samples)
        return self._lockstep.enough()

    def _serial(self) -> int:
        """Of the weights that this worker publishes now: in step the same on all of them. The first ones have 1."""
        return 2 + (self._lockstep.updates if self._exchange.in_step else self._iteration)

    def _shown(self) -> None:
        """All workers have published their weights of the same iteration."""

    # ---- checkpoints ----

    @property
    def _name(self) -> str:
        """What this rank's part of a checkpoint is called."""
        return f"worker-{self.rank}"

    def _halt_if_requested(self) -> None:
        """After an iteration: those in step halt after the same one, with an exchange; others when they hear of it."""
        link, exchange = self._link, self._exchange
        link.hear()
        halts = link.halt_requested
        if exchange.in_step:
            agreed = exchange.agreed
            if not self._in_step or self._iteration % exchange.period or agreed is None or not agreed.halt:
                return
            n_contributing = min(len(self._job.takers), link.comm.size)
            if not (halts := agreed.n_steps == n_contributing * exchange.period):
                self._cannot_halt()
        if halts:
            link.phases.enter(Phase.WAITING)
            link.halt(lambda number: self._checkpoints.write(number, self._name, self._state()))

    def _cannot_halt(self) -> None:
        """Somebody who was to halt has ended."""

    def _state(self) -> dict[str, Any]:
        """All that this worker has, while everybody has halted."""
        return {
            "exchange": self._exchange.state(),
            "division": self._division,
            "estimator": self._estimator,
            "counts": (self._iteration, self._samples, self._evaluations.next_samples),
            "lockstep": self._lockstep.state(),
            "iterations": self._iterations.state(),
            "generators": rng_state.state(self.flat.weights.device),
            "buffers": dict(self._model.named_buffers()),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the next batch."""
        self.flat.weights.copy_(state["exchange"]["peer"]["weights"])
        for name, buffer in self._model.named_buffers():
            buffer.copy_(state["buffers"][name])
        self._iterations.restore(state["iterations"])
        rng_state.restore(state["generators"], self.flat.weights.device)

    # ---- the end ----

    def _part(self) -> None:
        if self._times is not None:  # the script left between `backward` and `step`, and the others have this gradient
            self._end_iteration(math.nan)
        self._link.phases.enter(Phase.WAITING)
        goes_along = self._exchange.end(early=self._in_step)
        while self._in_step and goes_along:
            self._advance(0)
            self._share_out(None)
            self._halt_if_requested()
        self._link.say(messages.StepInfoKind.ENDED)
        self._link.wait_for_all()
        self._settle()
        self._link.say(messages.StepInfoKind.SETTLED)
        while not self._exchange.show(self._serial() + 1):
            time.sleep(1e-3)  # the evaluation still reads earlier ones
        together = self._link.together()
        together.barrier()
        self._finish_training()
        together.barrier()

    def _settle(self) -> None:
        """Nobody sends any more: what has come since the last iteration is taken in."""
        self._hear()
        if n_received := self._exchange.settle():
            now_s, weight = self._link.clock.now(), self._exchange.peer.weight
            self._link.step_info(intake_info(self.rank, self._iteration, now_s, n_received, weight))

    def _finish_training(self) -> None:
        """All have published their last weights."""

    def _report_failure(self) -> None:
        self._link.say(messages.StepInfoKind.FAILED)

    def _free(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._progression is not None:
            self._progression.close()
        self._exchange.free()
        self._link.free()
