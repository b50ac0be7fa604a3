"""A run in virtual time: the coordinator's decisions and the workers' arithmetic, with nothing real but the numbers.

A worker is a chain of events: it is granted an iteration, reads, computes, puts and reports; the server hears of it and
answers. The server takes no time. What it decides is the same `Coordinator` that drives real ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from hpcsync.config.job import Job, Script
from hpcsync.core.assignments import Assignment, create_assignments
from hpcsync.core.coordinator import (
    AccumulateCommand,
    Command,
    Coordinator,
    GrantCommand,
    PushInfo,
    Recorder,
    UpdateCommand,
    coordinate,
    with_prediction,
)
from hpcsync.core.device_speed import Device, encode_s
from hpcsync.paradigms import Paradigm
from hpcsync.planning.speed_estimator import Estimator
from hpcsync.simulator.cluster import SimulatedCluster
from hpcsync.simulator.gradients import Work
from hpcsync.simulator.server_numerics import arithmetic
from hpcsync.training.gradient import piece_shares
from hpcsync.training.lr_schedule import EvaluationSchedule
from hpcsync.training.speed_models import estimator, nominal_clock
from hpcsync.workloads.registry import Workload


class _Worker:
    """Where a worker is in its chain."""

    __slots__ = (
        "assignment", "begin_s", "cancelled", "comm_s", "computed", "device", "device_s", "end_s", "estimator",
        "iteration", "joins", "loss", "n_samples", "put_s", "sent_s", "share", "step", "step_s", "under_way", "version",
        "wait_s", "wire_bytes",
    )  # fmt: skip

    def __init__(self, device: Device, estimator: Estimator | None, assignment: Assignment, n_samples: int) -> None:
        self.device = device
        self.estimator = estimator
        self.assignment = assignment  # of the push that is computed
        self.n_samples = n_samples  # of each of its local steps
        self.iteration = 1  # that it computes, or may compute next; of several local steps, if the job says so
        self.computed = 0  # of these steps
        self.step = 0  # number of the local step that began last, of all
        self.under_way = False  # whether it is being computed
        self.step_s = 0.0  # when it began
        self.device_s = 0.0  # what it takes
        self.cancelled = False  # whether the worker knows that this iteration is
        self.share = 1.0  # of it that is computed
        self.joins = False  # whether what it is granted next answers its return
        self.version = 0  # that it reads
        self.begin_s = 0.0
        self.end_s = 0.0
        self.sent_s = 0.0  # when its contribution, compressed, began to be put
        self.loss = 0.0  # of it
        self.wire_bytes = 0  # of it
        self.put_s = 0.0  # when its last contribution was in its slot, or it joined
        self.wait_s = 0.0
        self.comm_s = 0.0  # reading, before the computation


class ServerSimulation:
    """One run of a job.

    watch: called after every push, for whoever wants to show how far the run is, or to end it by raising.
    """

    def __init__(
        self,
        job: Job,
        workload: Workload,
        cluster: SimulatedCluster,
        paradigm: Paradigm,
        trace: Recorder,
        watch: Callable[[float, Coordinator], None] = lambda now_s, coordinator: None,
    ) -> None:
        assert not isinstance(job.workload, Script)
        self.coordinator = coordinate(job, paradigm, trace)
        self._job = job
        self._watch = watch
        self._n_samples = job.workload.batch_size  # of an iteration for which devices' times are meant
        self._n_pieces = job.n_pieces
        self._loop, self._transfers = cluster.loop, cluster.transfers
        self._shard_bytes = sum(cluster.shard_bytes)
        self._encode_s = encode_s(job, self._shard_bytes)
        first = create_assignments(job).first
        self._workers = [
            _Worker(device, estimator(job, worker, nominal_clock()), first[worker], self._of_a_step(first[worker]))
            for worker, device in enumerate(cluster.devices)
        ]
        self._arithmetic = arithmetic(job, workload)
        self._evaluated = workload.evaluate is not None
        self._evaluations = EvaluationSchedule(job.evaluation.every_samples if self._evaluated else 0)
        self._n_pushes = 0

    def run(self) -> None:
        """Until every worker has left; the final weights are then in the workload's model, and evaluated."""
        try:
            self._let_workers_begin()
            self._loop.run()
        finally:
            self.coordinator.close()
        if self.coordinator.active:
            raise RuntimeError(f"workers {sorted(self.coordinator.active)} wait for ever: nothing can happen any more")
        self._arithmetic.finish()
        if self._evaluated:
            self._evaluate(self.coordinator.updated_s)

    def _let_workers_begin(self) -> None:
        for worker in range(len(self._workers)):
            self._arithmetic.promise(worker)
            self._transfers.pull(worker, 1, self._begin)
        if self._job.stop.seconds is not None:
            self._loop.at(self._job.stop.seconds, self._time_is_up)

    def _begin(self, worker: int, granted_s: float) -> None:
        """The worker has the weights."""
        now_s, state = self._loop.now_s, self._workers[worker]
        state.wait_s = granted_s - state.put_s
        state.comm_s = now_s - granted_s
        state.begin_s = now_s
        state.computed, state.share = 0, 1.0
        self._compute(worker)

    def _compute(self, worker: int) -> None:
        """One local step."""
        now_s, state = self._loop.now_s, self._workers[worker]
        if state.device.leaves(now_s):
            if self._job.commits and state.computed > 0:  # what it has; then it will find that it leaves
                self._send(worker)
                return
            self._transfers.push_info(worker, state.iteration, self._left)
            if state.device.joins_s < math.inf:
                self._loop.at(max(now_s, state.device.joins_s), self._join, worker)
            return
        state.step += 1
        state.under_way, state.step_s = True, now_s
        state.device_s = state.device.seconds(now_s, state.n_samples / self._n_samples)
        self._loop.after(state.device_s, self._computed, worker, state.step)
        if state.cancelled:
            self._stop_at_next_piece(worker)

    def _join(self, worker: int) -> None:
        state = self._workers[worker]
        state.device.join()
        state.joins, state.put_s = True, self._loop.now_s
        self._transfers.push_info(worker, state.iteration, self._joined)

    def _joined(self, worker: int, joined_s: float) -> None:
        self._carry_out(self.coordinator.joined(self._loop.now_s, worker))

    def _cancelled(self, version: int, worker: int, sent_s: float) -> None:
        """The worker hears that what it computes from this version will be dropped. It may have gone on since."""
        state = self._workers[worker]
        if state.version <= version:
            state.cancelled = True
            if state.under_way:
                self._stop_at_next_piece(worker)

    def _stop_at_next_piece(self, worker: int) -> None:
        """After the last piece but one it goes on to the end."""
        state = self._workers[worker]
        for share in piece_shares(state.n_samples, self._n_pieces)[:-1]:
            end_s = state.step_s + share * state.device_s
            if end_s >= self._loop.now_s:
                state.under_way = False
                self._loop.at(end_s, self._stopped_early, worker, share)
                return

    def _stopped_early(self, worker: int, share: float) -> None:
        state = self._workers[worker]
        state.computed, state.share = 1, share
        self._contribute(worker)
        self._transfers.push_info(worker, state.iteration, self._heard)

    def _computed(self, worker: int, step: int) -> None:
        state = self._workers[worker]
        if not state.under_way or state.step != step:
            return  # it was cancelled
        state.under_way = False
        state.computed += 1
        if state.cancelled or state.assignment.is_done(state.computed, self._loop.now_s - state.begin_s):
            self._send(worker)
        else:
            self._compute(worker)

    def _send(self, worker: int) -> None:
        """The worker compresses and pushes what it has computed."""
        sizes_bytes = self._contribute(worker)
        if self._encode_s:
            self._loop.after(self._encode_s, self._push, worker, sizes_bytes)
        else:
            self._push(worker, sizes_bytes)

    def _contribute(self, worker: int) -> Sequence[int]:
        """The worker has computed its contribution: so many bytes to each server."""
        state = self._workers[worker]
        given, n_samples = state.assignment, state.n_samples * state.computed
        work = Work(given.first_sample, n_samples, self._n_pieces, state.share, state.computed, given.ratio)
        state.loss, sizes_bytes = self._arithmetic.contribute(worker, work)
        state.end_s = state.sent_s = self._loop.now_s
        state.wire_bytes = sum(sizes_bytes)
        return sizes_bytes

    def _push(self, worker: int, sizes_bytes: Sequence[int]) -> None:
        state = self._workers[worker]
        state.sent_s = self._loop.now_s
        self._transfers.push(worker, state.iteration, sizes_bytes, self._heard)

    def _heard(self, worker: int, put_s: float) -> None:
        """The server hears of the worker's contribution."""
        now_s, state = self._loop.now_s, self._workers[worker]
        state.put_s = put_s
        push_info = PushInfo(
            worker=worker,
            iteration=state.iteration,
            version_read=state.version,
            begin_s=state.begin_s,
            end_s=state.end_s,
            compute_s=state.end_s - state.begin_s,
            wait_s=state.wait_s,
            comm_s=state.comm_s + (put_s - state.sent_s),
            batch_size=state.n_samples * state.computed,
            local_steps=state.computed,
            loss=state.loss,
            wire_bytes=self._shard_bytes + state.wire_bytes,
            share=state.share,
            pull_s=state.comm_s,
            encode_s=state.sent_s - state.end_s,
        )
        if state.estimator is not None:
            push_info = with_prediction(push_info, state.estimator)
        self._carry_out(self.coordinator.pushed(now_s, push_info))
        self._check_now_and_then()
        self._evaluate_if_due()
        self._watch(now_s, self.coordinator)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, GrantCommand):
                self._answer(command)
            elif isinstance(command, UpdateCommand):
                self._arithmetic.apply(command)
            elif isinstance(command, AccumulateCommand):
                self._arithmetic.accumulate(command)
            else:
                iteration = self._workers[command.worker].iteration
                self._transfers.cancel(command.worker, iteration, partial(self._cancelled, command.version))

    def _answer(self, reply: GrantCommand) -> None:
        if reply.assignment.local_steps == 0:
            self._transfers.stop(reply.worker, reply.iteration, self._stopped)
            return
        state = self._workers[reply.worker]
        state.iteration, state.version = reply.iteration, reply.version
        state.assignment, state.n_samples = reply.assignment, self._of_a_step(reply.assignment)
        state.cancelled = False
        (self._arithmetic.join if state.joins else self._arithmetic.promise)(reply.worker)
        state.joins = False
        self._transfers.pull(reply.worker, reply.iteration, self._begin)

    def _of_a_step(self, assignment: Assignment) -> int:
        return assignment.of_a_step or self._n_samples

    def _stopped(self, worker: int, stopped_s: float) -> None:
        self._transfers.push_info(worker, self._workers[worker].iteration, self._left)

    def _left(self, worker: int, left_s: float) -> None:
        self._carry_out(self.coordinator.left(self._loop.now_s, worker))
        self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        coordinator = self.coordinator
        if not coordinator.stopping and self._evaluations.begin_if_due(coordinator.samples):
            self._evaluate(self._loop.now_s)

    def _evaluate(self, now_s: float) -> None:
        """In no time: a target ends the run with the version that reaches it."""
        coordinator = self.coordinator
        loss, accuracy = self._arithmetic.evaluate()
        self._carry_out(coordinator.evaluated(now_s, coordinator.version, coordinator.samples, loss, accuracy))

    def _time_is_up(self) -> None:
        self._carry_out(self.coordinator.passed(self._loop.now_s))

    def _check_now_and_then(self) -> None:
        """The invariants of what decides. A check looks at every worker; so rarely it costs the same however many."""
        self._n_pushes += 1
        if self._n_pushes % len(self._workers) == 0:
            self.coordinator.check()
