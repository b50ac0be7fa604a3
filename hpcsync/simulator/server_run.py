"""Simulated run with servers: the coordinator's decisions and the workers' numerics in virtual time.

A worker is a chain of events: it receives a grant, reads, computes, puts its contribution and sends its push info; the
server receives it and answers. The servers take no time, or that of their updates: then they handle one push after the
other, and a grant follows the updates before it. Decisions are those of the same `Coordinator` that drives real ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from hpcsync.config.job import Job
from hpcsync.core.assignments import create_assignments
from hpcsync.core.coordinator import (
    AccumulateCommand,
    Command,
    Coordinator,
    Recorder,
    UpdateCommand,
    coordinate,
)
from hpcsync.core.device_speed import Device, encode_s, update_s
from hpcsync.core.straggler_detector import NoDetector
from hpcsync.core.worker_machine import WorkerMachine
from hpcsync.paradigms.events import Elapsed, Grant
from hpcsync.paradigms.records import Problem
from hpcsync.simulator.cluster import SimulatedCluster
from hpcsync.simulator.gradients import Work
from hpcsync.simulator.run import Judged, Simulation, Watch
from hpcsync.simulator.server_numerics import Contributed, NoNumerics, Numerics
from hpcsync.training.gradient import piece_shares
from hpcsync.training.speed_models import estimator, nominal_clock
from hpcsync.workloads.registry import Workload


@dataclass(slots=True)
class _Worker:
    """Event chain of a worker."""

    device: Device
    machine: WorkerMachine
    step: int = 0  # number of the latest end of a local step that was scheduled; earlier ones do not hold
    under_way: bool = False  # True while a step is being computed that may be stopped
    step_s: float = 0.0  # its begin
    device_s: float = 0.0  # its duration
    joins: bool = False  # True if the next grant answers its join
    end_s: float = 0.0  # when its last local step ended
    sent_s: float = 0.0  # when the put of its encoded contribution began
    contributed: Contributed = field(init=False)  # its latest contribution


class ServerSimulation(Simulation):
    """Simulation of one run of a job with servers.

    Parameters
    ----------
    job
        Job with servers.
    workload
        Its workload.
    cluster
        Event loop, devices and transfers.
    trace
        Receiver of the trace rows.
    watch
        See `Simulation`.
    """

    coordinator: Coordinator

    def __init__(
        self,
        job: Job,
        workload: Workload,
        cluster: SimulatedCluster,
        trace: Recorder,
        watch: Watch = lambda now_s, coordinator: None,
    ) -> None:
        super().__init__(job, workload, cluster.loop, trace, watch)
        self.coordinator = coordinate(job, trace, NoDetector())
        self._n_pieces = job.n_pieces_of(0)  # of every worker
        self._transfers = cluster.transfers
        read_bytes = sum(cluster.shard_bytes)
        self._encode_s = encode_s(job, read_bytes)
        self._update_s = update_s(job, max(cluster.shard_bytes))  # per contribution
        self._arrived: deque[tuple[int, float]] = deque()  # push infos that wait for the servers: worker, end of put
        self._free_s = 0.0  # when the servers have made all updates so far
        first = create_assignments(job).first
        self._workers = [
            _Worker(device, WorkerMachine(worker, read_bytes, estimator(job, worker, nominal_clock()), first[worker]))
            for worker, device in enumerate(cluster.devices)
        ]
        self._numerics = (NoNumerics if workload.loss is None else Numerics)(job, workload)
        self.attributes = self._numerics.attributes
        self._n_pushes = 0
        self._due: Elapsed | None = None  # scheduled latest
        self._deferred: set[int] = set()  # workers whose messages a checkpoint kept back, until they are handled

    def run(self) -> None:
        """Run as any simulation, and record the contributions that no update uses, however the run ends."""
        try:
            super().run()
        finally:
            self.coordinator.close()

    def _start(self) -> None:
        for worker in range(len(self._workers)):
            self._numerics.grant(worker)
            self._transfers.pull(worker, 1, self._begin)
        self._evaluate_if_wanted()

    def _finish(self) -> None:
        self._numerics.finish(self.coordinator.trained_by)

    def _begin(self, worker: int, granted_s: float) -> None:
        """Begin an iteration: the worker has read the weights."""
        self._workers[worker].machine.read(granted_s, self._loop.now_s)
        self._compute(worker)

    def _compute(self, worker: int) -> None:
        """Begin one local step, or leave."""
        now_s, state = self._loop.now_s, self._workers[worker]
        if state.device.leaves(now_s):
            if state.machine.n_steps > 0:
                if self._job.commits:  # push the finished steps first; the worker leaves afterwards
                    self._send(worker)
                    return
                self._numerics.discard(worker, self._work(worker))
            self._transfers.message(worker, state.machine.grant.iteration, self._left)
            if state.device.joins_s < math.inf:
                self._loop.at(max(now_s, state.device.joins_s), self._join, worker)
            return
        state.step += 1
        state.under_way, state.step_s = True, now_s
        state.device_s = state.device.seconds(now_s, self._step_samples(state.machine.grant) / self._batch_size)
        self._loop.after(state.device_s, self._computed, worker, state.step)
        if state.machine.is_cancelled:
            self._stop_at_next_piece(worker)

    def _join(self, worker: int) -> None:
        state = self._workers[worker]
        state.device.join()
        state.joins = True
        state.machine.waits(self._loop.now_s)
        self._transfers.message(worker, state.machine.grant.iteration, self._joined)

    def _joined(self, worker: int, joined_s: float) -> None:
        if self._keeps_back(worker, self._joined, joined_s):
            return
        self._carry_out(self.coordinator.joined(self._loop.now_s, worker))

    def _cancelled(self, version: int, worker: int, sent_s: float) -> None:
        """Cancel work based on `version` or an earlier one; the worker may have continued since."""
        state = self._workers[worker]
        state.machine.cancel(version)
        if state.machine.is_cancelled and state.under_way:
            self._stop_at_next_piece(worker)

    def _stop_at_next_piece(self, worker: int) -> None:
        """Stop at the end of the current micro-batch; the last one runs to its end."""
        state = self._workers[worker]
        for share in piece_shares(self._step_samples(state.machine.grant), self._n_pieces)[:-1]:
            end_s = state.step_s + share * state.device_s
            if end_s >= self._loop.now_s:
                state.under_way = False
                state.step += 1
                self._loop.at(end_s, self._computed, worker, state.step, share)
                return

    def _computed(self, worker: int, step: int, share: float = 1.0) -> None:
        """End a local step of which this share was computed."""
        state = self._workers[worker]
        if state.step != step:
            return  # it was stopped before
        state.under_way = False
        if state.machine.computed(state.step_s, self._loop.now_s, self._step_samples(state.machine.grant), share):
            self._send(worker)
        else:
            self._compute(worker)

    def _send(self, worker: int) -> None:
        """Compress and push the worker's contribution; of a cancelled one only the push info."""
        state = self._workers[worker]
        state.contributed = self._contribute(worker)
        state.end_s = state.sent_s = self._loop.now_s
        if state.machine.share < 1.0:
            self._transfers.message(worker, state.machine.grant.iteration, self._arrive)
        elif self._encode_s:
            self._loop.after(self._encode_s, self._push, worker)
        else:
            self._push(worker)

    def _contribute(self, worker: int) -> Contributed:
        """Compute the worker's contribution."""
        return self._numerics.contribute(worker, self._work(worker))

    def _work(self, worker: int) -> Work:
        """Return the local steps that the worker has computed since it read the weights."""
        machine = self._workers[worker].machine
        grant = machine.grant
        return Work(grant.first_sample, machine.n_samples, self._n_pieces, machine.share, machine.n_steps, grant.ratio)

    def _push(self, worker: int) -> None:
        state = self._workers[worker]
        state.sent_s = self._loop.now_s
        self._transfers.push(worker, state.machine.grant.iteration, state.contributed.sizes_bytes, self._arrive)

    def _arrive(self, worker: int, put_s: float) -> None:
        """Handle a push once the servers have made the updates of earlier ones."""
        if self._update_s == 0.0:
            self._receive_push(worker, put_s)
            return
        self._arrived.append((worker, put_s))
        if len(self._arrived) == 1:
            self._loop.at(max(self._free_s, self._loop.now_s), self._receive_next)

    def _receive_next(self) -> None:
        if self._free_s <= self._loop.now_s:  # no updates for another reason, such as a worker that left
            self._receive_push(*self._arrived.popleft())
        if self._arrived:
            self._loop.at(max(self._free_s, self._loop.now_s), self._receive_next)

    def _receive_push(self, worker: int, put_s: float) -> None:
        """Handle a push at the server."""
        if self._keeps_back(worker, self._arrive, put_s):
            return
        now_s, state = self._loop.now_s, self._workers[worker]
        loss, sizes_bytes, gradient_sq = state.contributed
        encode_s, duration_s = state.sent_s - state.end_s, put_s - state.sent_s
        complete = worker in self._with_loss and state.machine.share == 1.0
        problem = Problem.of_losses(loss) if complete else Problem.NONE
        push_info = state.machine.delivered(
            loss, encode_s, duration_s, sum(sizes_bytes), problem=problem, gradient_sq=gradient_sq
        )
        if problem:
            self._look_at(push_info)
        state.machine.waits(put_s)
        self._numerics.delivered(worker)
        self._carry_out(self.coordinator.pushed(now_s, push_info))
        self._n_pushes += 1
        if self._n_pushes % len(self._workers) == 0:  # a check looks at every worker
            self.coordinator.check()
        self._evaluate_if_due()
        self._watch(now_s, self.coordinator)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        contributing: set[int] = set()  # workers whose contributions a later update takes
        if self._update_s:
            contributing.update(*(each.workers for each in commands if isinstance(each, UpdateCommand)))
        reserved: list[Callable[[], None]] = []  # transfers of grants that the next update sends, as on real servers
        for command in commands:
            if isinstance(command, Grant):
                transfer = self._granted(command)
                if command.worker in contributing:
                    reserved.append(transfer)
                else:
                    self._once_updated(transfer)
            elif isinstance(command, UpdateCommand):
                version, gradient_sq = self._numerics.apply(command)
                if version:
                    self.coordinator.updated(version, gradient_sq)
                self._spend(max(1, len(command.workers)) * self._update_s)
                contributing.difference_update(command.workers)
                for transfer in reserved:
                    self._once_updated(transfer)
                reserved.clear()
            elif isinstance(command, AccumulateCommand):
                self._numerics.accumulate(command)
                self._spend(self._update_s)
            else:
                iteration = self._workers[command.worker].machine.grant.iteration
                self._transfers.message(command.worker, iteration, partial(self._cancelled, command.version))
        due = self.coordinator.due
        if due is not None and due != self._due:
            self._loop.at(max(due.now_s, self._loop.now_s), self._time_has_come)  # it may have passed during a halt
        self._due = due

    def _spend(self, seconds: float) -> None:
        """Let the servers update for so long, from now or from when they are free."""
        if seconds:
            self._free_s = max(self._free_s, self._loop.now_s) + seconds

    def _granted(self, grant: Grant) -> Callable[[], None]:
        """Let the worker have a grant; return what begins its transfer."""
        state = self._workers[grant.worker]
        if not state.machine.granted(grant):
            return partial(self._transfers.stop, grant.worker, grant.iteration, self._stopped)
        (self._numerics.join if state.joins else self._numerics.grant)(grant.worker)
        state.joins = False
        return partial(self._transfers.pull, grant.worker, grant.iteration, self._begin)

    def _once_updated(self, transfer: Callable[[], None]) -> None:
        """Begin a transfer once the servers have made all updates that were commanded before it."""
        if self._free_s > self._loop.now_s:
            self._loop.at(self._free_s, transfer)
        else:
            transfer()

    def _step_samples(self, grant: Grant) -> int:
        return grant.step_samples or self._batch_size

    def _stopped(self, worker: int, stopped_s: float) -> None:
        self._transfers.message(worker, self._workers[worker].machine.grant.iteration, self._left)

    def _left(self, worker: int, left_s: float) -> None:
        if self._keeps_back(worker, self._left, left_s):
            return
        self._carry_out(self.coordinator.left(self._loop.now_s, worker))
        self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        super()._evaluate_if_due()
        self._evaluate_if_wanted()

    def _evaluate_if_wanted(self) -> None:
        """Evaluate the current version if the paradigm wants it and no other evaluation is under way."""
        coordinator = self.coordinator
        if coordinator.wants_evaluation and not self._evaluating:
            self._evaluations.begin_if_due(coordinator.samples)  # one evaluation serves both
            self._evaluate(coordinator.version, coordinator.samples)

    def _judge(self, version: int, samples: int, now_s: float) -> Judged:
        return now_s, version, samples, *self._numerics.evaluate(self.coordinator.trained_by)

    def _evaluation_ends(self, judged: Judged) -> None:
        if not self._is_kept(self._evaluation_ends, judged):  # no other begins meanwhile, as on real ranks
            super()._evaluation_ends(judged)

    def _conclude(self, judged: Judged) -> None:
        self._carry_out(self.coordinator.evaluated(*judged, known_s=self._loop.now_s))
        self._evaluate_if_wanted()

    def _time_has_come(self) -> None:
        if self._is_kept(self._time_has_come):
            return
        self._carry_out(self.coordinator.passed(self._loop.now_s))
        self._evaluate_if_due()

    @property
    def _halted_s(self) -> float:
        return max(self._loop.now_s, self._free_s)

    def _keeps_back(self, worker: int, handle: Callable[[int, float], None], time_s: float) -> bool:
        """Keep a worker's message back if workers are to halt, as real servers do; return whether it was kept back."""
        if self._deferred:  # they are handled before the next checkpoint
            self._deferred.discard(worker)
            return False
        if not self._must_halt():
            return False
        self._halt(worker, handle, worker, time_s)
        return True

    def _end_halt(self) -> None:
        assert self._halts is not None
        self._deferred = self._halted.copy() if self._halts.has_saved else set()
        super()._end_halt()
