"""Engine-independent records and decisions of a run without servers, kept by one of the workers.

Workers send step info after every iteration and wait for no answer. From it follow the versions, the stopping rule and
the trace rows. The peers that a worker exchanges with follow from the seed.

An update is a step of the model. With all-reduce and under layer separation all workers make the same update together;
otherwise every step of a worker is an update of its own replica.

Once the stopping rule is true it stays true. Asynchronous workers are sent a stop message; synchronous workers count
for themselves what the step info will contain (`Lockstep`), so that all of them end after the same iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcsync.config.job import Job, Script
from hpcsync.core.assignments import create_allocator
from hpcsync.core.coordinator import Recorder, RunCounts, own_rate
from hpcsync.core.straggler_detector import StragglerDetector
from hpcsync.paradigms.records import StepInfo
from hpcsync.planning.batch_allocation import Allocated, Allocator, Estimate
from hpcsync.state import Stateful
from hpcsync.trace.schema import Change
from hpcsync.training.lr_schedule import learning_rate, worker_rate


def gradient_buckets(size: int, step: int) -> list[tuple[int, int]]:
    """Return the slices (begin, end) of a gradient that are summed at a time, in order: from its end, at most `step`.

    `step` is in the same unit as `size`.
    """
    return [(max(0, end - step), end) for end in range(size, 0, -step)]


def default_bucket_bytes(n_bytes: int, *, between_nodes: bool) -> int:
    """Return the bytes of a gradient of `n_bytes` bytes that are summed at a time, unless a job sets them.

    The last slice is summed after the backward pass, so a small one leaves less to wait for. Between nodes a sum costs
    little more than its bytes. On one node it costs a synchronisation above all.
    """
    return min(max(-(-n_bytes // 4), 1_000_000), 8_000_000) if between_nodes else 25_000_000


def ring_bytes(n_bytes: int, n_workers: int) -> int:
    """Return the mean number of bytes that each worker sends in a ring all-reduce of `n_bytes` bytes."""
    return 2 * (n_workers - 1) * n_bytes // n_workers


def broadcast_bytes(n_bytes: int, n_workers: int) -> int:
    """Return the bytes sent to deliver `n_bytes` of one worker to every other worker.

    In a ring the others pass them on; all together send as much.
    """
    return (n_workers - 1) * n_bytes


class Lockstep(Stateful):
    """Progress of synchronous workers, counted by each of them, so that all end after the same iteration.

    The counts are exact at every exchange. Between two exchanges all contributors of the last one are assumed to
    continue; with batches whose sizes may differ, as in a script, the count is not known before the next exchange.

    Parameters
    ----------
    job
        The job.

    Attributes
    ----------
    samples
        Samples of all workers up to the last exchange.
    updates
        Updates up to the last exchange.
    """

    state_types = {"samples": int, "updates": int, "_n_contributing": int}
    __slots__ = ("_batch_size", "_n_contributing", "_one_model", "_stop", "samples", "updates")

    def __init__(self, job: Job) -> None:
        self.samples = 0
        self.updates = 0
        self._n_contributing = len(job.takers)
        self._batch_size = None if isinstance(job.workload, Script) else job.workload.batch_size
        self._one_model = job.paradigm.one_model
        self._stop = job.stop

    def resume(self, n_present: int) -> None:
        """Continue with this number of workers, after restoring a state."""
        self._n_contributing = min(self._n_contributing, n_present)

    def exchanged(self, n_contributing: int, n_steps: int, n_samples: int) -> None:
        """Count the work of all workers since the previous exchange.

        Parameters
        ----------
        n_contributing
            Workers that contributed.
        n_steps, n_samples
            Their steps and samples.
        """
        self._n_contributing = n_contributing
        self.samples += n_samples
        self.updates += min(1, n_steps) if self._one_model else n_steps

    def enough(self, since: int = 0) -> bool:
        """Return True if training is over `since` iterations after the last exchange."""
        if since and self._batch_size is None:
            return False
        steps = since * self._n_contributing
        return self._stop.reached(samples=self.samples + steps * (self._batch_size or 0), updates=self.updates + steps)


class BatchDivision(Stateful):
    """Allocation of batches among synchronous workers, computed by each of them alike.

    An iteration of all workers takes the next samples of the run's sequence, worker after worker. Every `interval`
    iterations, and when a worker is found to have left, all workers gather the estimates of their next iterations and
    compute the same new sizes. In the iteration in which a worker is first missing, its samples are left out.

    A gradient is the mean of its worker's batch. So that the mean over workers is that over all samples, each gradient
    is multiplied by `weight`, its batch size over the mean batch size; if workers are missing, the sum of the others is
    rescaled by `correction`.

    Parameters
    ----------
    allocator
        New allocator of the job.
    """

    state_types = {
        "_allocator": Allocator,
        "_active": list[int],
        "_total": int,
        "_work": dict[int, tuple[int, int]],
        "_iterations": int,
    }

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._active = [worker for worker, size in enumerate(allocator.sizes) if size]
        self._total = sum(allocator.sizes)
        self._work = {worker: allocator.allocate_next(worker) for worker in self._active}
        self._iterations = 0

    def work(self, worker: int) -> tuple[int, int]:
        """Return (first_sample, n_samples) of the worker's iteration, valid until `exchanged`."""
        return self._work[worker]

    def weight(self, worker: int) -> float:
        """Return the weight of the worker's gradient; exactly 1 if its batch is the mean batch."""
        return self._work[worker][1] * len(self._active) / self._total

    def correction(self, n_contributing: int, n_samples: int) -> float:
        """Return the factor for the sum of the weighted gradients divided by the number of contributors."""
        return n_contributing * self._total / (len(self._active) * n_samples) if n_samples else 1.0

    def exchanged(self, n_contributing: int, gather: Callable[[], Sequence[Estimate | None]]) -> list[Allocated]:
        """End an iteration that another one follows.

        Parameters
        ----------
        n_contributing
            Workers that contributed to it.
        gather
            Collective call that returns each worker's estimate: NaN if not known yet, None from a worker that did not
            contribute. It is called by all workers or by none.

        Returns
        -------
        list of Allocated
            New sizes, if any: one or more rows for each active worker.
        """
        self._iterations += 1
        allocated: list[Allocated] = []
        if self._iterations % self._allocator.interval == 0 or n_contributing < len(self._active):
            expected = gather()
            for worker in [worker for worker in self._active if expected[worker] is None]:
                allocated += self._allocator.left(worker)
            known = {worker: estimate for worker, estimate in enumerate(expected) if estimate is not None}
            allocated += self._allocator.allocate(known)
            self._active = sorted(known)
            self._total = sum(self._allocator.sizes)
        self._work = {worker: self._allocator.allocate_next(worker) for worker in self._active}
        return allocated


def create_batch_division(job: Job) -> BatchDivision | None:
    """Create the batch division of this job; None if all batches have the same size."""
    allocator = create_allocator(job)
    return None if allocator is None else BatchDivision(allocator)


class PeerCoordinator(RunCounts):
    """Records of one run without servers.

    Parameters
    ----------
    job
        The job.
    trace, stalls
        See `RunCounts`.

    Attributes
    ----------
    active
        Workers that have not left.
    done
        Iterations that each worker has ended.
    """

    blocked = None  # workers wait for no answer

    state_types = {
        "active": set[int],
        "done": list[int],
        "_own_samples": list[int],
        "_round": dict[int, list[StepInfo]],
    }

    def __init__(self, job: Job, trace: Recorder, stalls: StragglerDetector | None = None) -> None:
        super().__init__(trace, job.stop, stalls)
        n_workers = job.cluster.workers
        self.active = set(range(n_workers))
        self.done = [0] * n_workers
        self._n_workers = n_workers
        self._lr, self._rate = learning_rate(job), worker_rate(job)
        self._one_model = job.paradigm.one_model
        self._of_own_rates = isinstance(job.workload, Script)
        self._counting, self._judging = job.takers, job.with_loss
        self._own_samples = [0] * n_workers
        self._round: dict[int, list[StepInfo]] = {}  # common iterations: step infos
        for worker in self.active:
            self.stalls.began(worker, 1, 0.0)

    @property
    def iters(self) -> list[int]:
        """Iterations of each worker by which leads are counted."""
        return self.done

    @property
    def computing(self) -> set[int]:
        """Active workers that are not blocked: all of them, since they wait for no answer."""
        return self.active

    def exchanged(self, now_s: float, step_info: StepInfo) -> None:
        """Process the step info of a worker that has ended an iteration."""
        r = step_info
        self._trace.append("exchanges", (now_s, *r))
        if r.batch_size == 0:
            return
        self.done[r.worker] = r.iteration
        self.stalls.ended(r.worker, now_s, r.wait_s)
        if r.worker in self._judging:
            self.last_loss = r.loss
        if self._one_model:
            infos = self._round.setdefault(r.iteration, [])
            infos.append(r)
            if len(infos) >= len(self.active):  # otherwise a step info is missing
                self._end_rounds(now_s)
        else:
            self._update(now_s, self._rate(self._own_samples[r.worker], r.iteration - 1), [r])
        if not self.stopping:
            self.stalls.began(r.worker, r.iteration + 1, now_s)

    def allocated(self, now_s: float, iteration: int, allocated: Sequence[Allocated]) -> None:
        """Record new batch sizes on which the workers agreed after this iteration."""
        for worker, size, inputs in allocated:
            self.seq += 1
            row = (self.seq, now_s, "batches", worker, float(size), float(iteration), *inputs)
            self._trace.append("decisions", row)

    def left(self, now_s: float, worker: int, change: int = Change.LEFT) -> None:
        """Process the departure of a worker; `change` is LEFT or DIED, for the trace."""
        self.seq += 1
        self._trace.append("membership", (self.seq, now_s, worker, change))
        self.active.discard(worker)  # a worker that has left may die as well
        self.stalls.left(worker)
        self._end_rounds(now_s)

    def evaluated(
        self, now_s: float, version: int, samples: int, loss: float, accuracy: float, distance: float
    ) -> None:
        """Record an evaluation of the mean of the replicas, and stop the run if it satisfies the stopping rule.

        Parameters
        ----------
        now_s
            Time of the replicas.
        version, samples
            Updates and samples at that time.
        loss, accuracy
            Results on held-out data.
        distance
            Distance of the replicas from their mean.
        """
        self._trace.append("evaluations", (now_s, version, samples, loss, accuracy, distance))
        self.last_accuracy = accuracy
        self.stopping = self.stopping or self._stop.satisfied(loss, accuracy)

    def passed(self, now_s: float) -> None:
        """Note that time has passed; end the run once its seconds are up."""
        self.stopping = self.stopping or self._stop.reached(seconds=now_s)

    def reconsider(self, now_s: float) -> None:
        """Note that the run resumes with another stopping rule, by which it may not be over."""
        self.stopping = self._stop.reached(samples=self.samples, updates=self.version, seconds=now_s)

    def continued(self, now_s: float) -> None:
        """Note that workers that waited for a checkpoint continue with their next iterations."""
        for worker in [*self.stalls.running]:
            self.stalls.began(worker, self.done[worker] + 1, now_s)

    def _end_rounds(self, now_s: float) -> None:
        """End the common iterations that every active worker has reported; each that has samples is an update."""
        for iteration in sorted(self._round):
            if all(self.done[worker] >= iteration for worker in self.active):
                if infos := [info for info in self._round.pop(iteration) if info.worker in self._counting]:
                    self._update(now_s, self._lr(self.samples, self.version, self._n_workers), infos)

    def _update(self, now_s: float, lr: float, counted: Sequence[StepInfo]) -> None:
        """Record an update; with a script's optimizers `lr` is a factor of their rates."""
        if self._of_own_rates:
            lr *= own_rate(counted)
        self.version += 1
        self.updated_s = now_s
        for step_info in counted:
            self.samples += step_info.batch_size
            self._own_samples[step_info.worker] += step_info.batch_size
        gradient_sq = counted[0].mean_gradient_sq if self._one_model else counted[0].gradient_sq
        self._trace.append("updates", (self.version, now_s, len(counted), lr, self.samples, gradient_sq))
        self.stopping = self.stopping or self._stop.reached(samples=self.samples, updates=self.version, seconds=now_s)
