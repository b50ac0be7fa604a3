"""A worker of a run with servers, without I/O, clock, torch or MPI.

Both engines feed it what happens to the worker, in this order, and do next what it returns::

    granted    the servers' grant has arrived         read the weights, or stop
    read       the weights have been read             compute
    computed   a local step has been computed         compute the next one, or push
    delivered  the contribution is in its slots       send the push info that it returns, wait for the grant

A rank carries these steps out one after the other (`hpcsync.mpi.server.worker`); a simulation schedules them in virtual
time (`hpcsync.simulator.server_run`). `cancel` may come at any time.
"""

from __future__ import annotations

import math

from hpcsync.paradigms.records import Grant, PushInfo
from hpcsync.planning.speed_estimator import Estimator
from hpcsync.state import Stateful


class WorkerMachine(Stateful):
    """Grants, local steps, times and push infos of one worker. Times are seconds since the start of the run.

    Parameters
    ----------
    worker
        Number of the worker.
    read_bytes
        Bytes of reading the weights.
    estimator
        Estimator of the next iterations' durations, sent with every push; None if they are not needed.
    grant
        Grant of the first iteration, if it is known.

    Attributes
    ----------
    grant : Grant
        The latest grant; of iteration 0 before the first one.
    n_steps, n_samples : int
        Local steps computed since the weights were read, and their samples.
    share : float
        Share of the last step's samples that was computed; if it is below 1, the contribution is not sent.
    stopped : bool
        True once the run is over for this worker.
    """

    state_types = {"grant": Grant, "estimator": Estimator | None}  # while the worker waits for a grant

    def __init__(
        self, worker: int, read_bytes: int, estimator: Estimator | None = None, grant: Grant | None = None
    ) -> None:
        self.estimator = estimator
        self.grant = grant or Grant(worker, 0)
        self.stopped = False
        self.n_steps = 0
        self._read_bytes = read_bytes
        self._waiting_since_s = 0.0
        self._cancelled = -1  # work based on this version or an earlier one is cancelled

    # ---- events ----

    def waits(self, now_s: float) -> None:
        """Note that the worker waits for a grant from now on."""
        self._waiting_since_s = now_s

    def granted(self, grant: Grant) -> bool:
        """Take the servers' grant; return False if it ends the worker's part in the run."""
        if grant.local_steps == 0:
            self.stopped = True
            return False
        self.grant = grant
        return True

    def read(self, granted_s: float, now_s: float) -> None:
        """Note that the weights have been read, for which the grant arrived at `granted_s`."""
        self._wait_s = granted_s - self._waiting_since_s
        self._pull_s = now_s - granted_s
        self._read_s = now_s
        self.n_steps = self.n_samples = 0
        self.share = 1.0

    def cancel(self, version: int) -> None:
        """Note that work based on `version` or an earlier one may be abandoned."""
        self._cancelled = max(self._cancelled, version)

    def computed(self, begin_s: float, end_s: float, n_samples: int, share: float = 1.0, load_s: float = 0.0) -> bool:
        """Note that a local step has been computed; return True if a push follows.

        Parameters
        ----------
        begin_s, end_s
            Begin and end of the step, which begins with loading its batch.
        n_samples
            Samples of the step.
        share
            Share of them that was computed; below 1 if the step was cancelled, whose contribution is not sent.
        load_s
            Seconds of waiting for batches in between.
        """
        if self.n_steps == 0:
            self._begin_s, self._load_s = begin_s, 0.0
        self._load_s += load_s
        self.n_steps += 1
        self.n_samples += n_samples
        self._end_s, self.share = end_s, share
        return self.is_cancelled or self.grant.is_done(self.n_steps, end_s - self._read_s)

    def delivered(
        self,
        loss: float,
        encode_s: float,
        put_s: float,
        put_bytes: int,
        lr: float = math.nan,
        problem: int = 0,
        gradient_sq: float = math.nan,
    ) -> PushInfo:
        """Note that the contribution is in its slots; return the push info to send.

        Parameters
        ----------
        loss
            Mean loss of the steps.
        encode_s, put_s
            Seconds of compressing and of putting the contribution.
        put_bytes
            Bytes of the contribution.
        lr
            Learning rate of the script's optimizer; NaN: the job's.
        problem
            What is wrong with the step (`records.Problem`).
        gradient_sq
            Squared norm of the gradient that was pushed; NaN: it was none.
        """
        push_info = PushInfo(
            math.nan,
            self.grant.worker,
            self.grant.iteration,
            self.grant.version,
            begin_s=self._begin_s,
            end_s=self._end_s,
            compute_s=max(0.0, self._end_s - self._begin_s - self._load_s),
            wait_s=self._wait_s,
            comm_s=self._pull_s + put_s,
            batch_size=self.n_samples,
            local_steps=self.n_steps,
            loss=loss,
            wire_bytes=self._read_bytes + put_bytes,
            share=self.share,
            pull_s=self._pull_s,
            encode_s=encode_s,
            load_s=self._load_s,
            lr=lr,
            problem=problem,
            gradient_sq=gradient_sq,
        )
        self.n_steps = 0
        if self.estimator is None:
            return push_info
        n, iteration_s, comm_s = push_info.local_steps, push_info.iteration_s, push_info.comm_s
        fixed_s, sample_s = self.estimator.observe(push_info.batch_size // n, iteration_s / n, comm_s / n)
        return push_info._replace(predicted_fixed_s=fixed_s, predicted_sample_s=sample_s)

    # ---- what follows from them ----

    @property
    def is_cancelled(self) -> bool:
        """True if the current iteration is cancelled."""
        return self._cancelled >= self.grant.version

    @property
    def samples(self) -> tuple[int, int]:
        """First sample of the next local step in the run's sequence, and number of its samples, if they are granted."""
        size = self.grant.step_samples
        return self.grant.first_sample + self.n_steps * size, size
