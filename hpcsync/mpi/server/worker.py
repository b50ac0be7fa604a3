"""A worker of a run with servers: what it pushes, waits for and reads, and its session for the training script."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, SupportsFloat

import numpy as np
import torch

from hpcsync.core.assignments import create_assignments
from hpcsync.core.session import Asked, Batches
from hpcsync.core.worker_machine import WorkerMachine
from hpcsync.mpi.server.channel import Reader, ServerChannel
from hpcsync.mpi.server.session import LinkedSession
from hpcsync.mpi.session_base import Given
from hpcsync.mpi.transport import cuda, messages
from hpcsync.paradigms.records import PushInfo
from hpcsync.planning.speed_estimator import Estimator
from hpcsync.state import Stateful, built
from hpcsync.trace.schema import Phase
from hpcsync.training import contributions
from hpcsync.training.buffers import Buffers
from hpcsync.training.compressor import Compressor
from hpcsync.training.speed_models import estimator


class Worker(Stateful):
    """Worker side of a parameter-server channel: carries out what its `WorkerMachine` says.

    Parameters
    ----------
    link
        Channel to the servers.
    weights
        Flat vector, shape (size,), that a grant fills with the servers' weights.
    contribution
        Flat vector, shape (size,), that a push sends.
    estimator
        As for `WorkerMachine`.
    cancellable
        Whether server 0 may cancel an iteration.
    compressor
        Compressor of the contribution; None to send it uncompressed.
    buffers
        Buffers of the model, if it has any; they go with every push.
    save
        Called with the number of a checkpoint, to save this worker's part of it and to tell server 0.
    state
        State to resume from (`state`); None for a new run.
    away
        Whether the run has continued without this worker, which then does not know its own iteration.
    statement
        Returns what the worker states with a push, shape (n_stated,); None: nothing.

    Attributes
    ----------
    machine : WorkerMachine
        Grants, local steps and times.
    is_away : bool
        Whether the worker has left only for a while.
    """

    state_types = {  # while it waits for a grant
        "machine": WorkerMachine,
        "_compressor": Compressor | None,
        "_has_left": bool,
        "is_away": bool,
        "_joins": bool,
    }

    def __init__(
        self,
        link: ServerChannel,
        weights: torch.Tensor,
        contribution: torch.Tensor,
        estimator: Estimator | None = None,
        *,
        cancellable: bool = False,
        compressor: Compressor | None = None,
        buffers: Buffers | None = None,
        save: Callable[[int], None] = lambda number: None,
        state: Mapping[str, Any] | None = None,
        away: bool = False,
        statement: Callable[[], np.ndarray] | None = None,
    ) -> None:
        worker = link.roles.worker(link.comm.rank)
        self.machine = WorkerMachine(worker, weights.nbytes, estimator)
        self._link = link
        self._weights = link.pieces(weights)  # sliced once: slicing takes longer than beginning a transfer
        self._whole = contribution
        self._contribution = link.pieces(contribution)
        self._compressor = compressor
        self._buffers = buffers
        self._slots = [] if link.lends else [link.slot(server, worker) for server in range(len(link.shards))]
        self._wanted = link.outbox(messages.TAG_SLOT, messages.SLOT) if link.lends else None
        self._statement, self._stated = statement, np.empty(0)
        self._reader = Reader(link, worker, save)
        # No inbox without cancellations: MPI would search its receives for every grant.
        self._cancellations = link.inbox(messages.TAG_CANCEL, messages.CANCEL) if cancellable else None
        self._has_left = False
        self.is_away = away
        self._joins = False  # whether JOINED has been sent
        self._finished = False
        if state is None:
            self.resume()
        else:
            self.restore(state)
            self.machine.stopped = self._has_left

    def resume(self) -> None:
        """Wait for the grant of the next iteration, if this worker takes part."""
        if not (self._has_left or self.is_away):
            self._await(self.machine.grant.iteration + 1)

    def cancelled(self) -> bool:
        """Return whether the current iteration is cancelled."""
        while self._cancellations is not None and (record := self._cancellations.poll()) is not None:
            self.machine.cancel(*record)
        return self.machine.is_cancelled

    def push(
        self,
        loss: float,
        lr: float = math.nan,
        problem: int = 0,
        rates: Sequence[tuple[int, float]] = (),
        gradient_sq: SupportsFloat = math.nan,
    ) -> None:
        """Push the contribution of the iteration, wait for the grant and read the next weights, if the run goes on.

        Parameters
        ----------
        loss
            Mean loss of its local steps.
        lr
            Learning rate of the script's optimizer; NaN: the job's.
        problem
            What is wrong with the step (`records.Problem`).
        rates
            Parameter groups whose learning rates have changed, and these rates.
        gradient_sq
            Squared norm of the contribution, read once this has been put; NaN: it is no gradient.
        """
        self._link.phases.enter(Phase.PUSHING)
        encode_s, put_s, n_bytes = self._put() if self.machine.share == 1.0 else (0.0, 0.0, 0)
        push_info = self.machine.delivered(loss, encode_s, put_s, n_bytes, lr, problem, float(gradient_sq))
        if self._buffers is not None:
            self._link.buffers.put(push_info.worker, push_info.iteration, self._buffers.packed())
        for change in rates:
            self._link.infos.send(0, (messages.InfoKind.RATE, *messages.rate_change(push_info, *change)[1:]))
        sent_s = self._link.clock.now()
        self._link.infos.send(0, (messages.InfoKind.PUSHED, *push_info[1:]))
        self._await(push_info.iteration + 1, sent_s)

    def leave(self) -> None:
        """Leave the run; return once every worker has left."""
        if not self._has_left:
            self._has_left = True
            self._send_info(messages.InfoKind.LEFT)
        if not self._finished:
            self._reader.wait(iteration=0)  # FINISH is of iteration 0

    def stay_away(self, until_s: float) -> None:
        """Leave the run until `until_s`, then join and read the weights, unless the run ends before."""
        if not self.is_away:
            self.is_away = True
            self._send_info(messages.InfoKind.LEFT)
        if not self._joins and self._reader.idle(until_s):
            self._joins = True
            self._send_info(messages.InfoKind.JOINED)
        self._await(self.machine.grant.iteration)
        self._has_left = self._finished
        self.is_away = self._joins = False

    def _send_info(self, kind: int) -> None:
        self._link.infos.send(0, (kind, *PushInfo(math.nan, self.machine.grant.worker)[1:]))

    def _put(self) -> tuple[float, float, int]:
        """Put the contribution into its slots; return the seconds of compressing and putting it, and its bytes.

        The time of putting includes that of waiting for a slot, if slots are lent.
        """
        link, pieces = self._link, self._contribution
        if self._wanted is not None:
            self._wanted.send(0, (self.machine.grant.worker,))
        begin_s, encode_s = link.clock.now(), 0.0
        if self._compressor is not None:
            payloads = self._compressor.encode(self._whole, link.shards, self.machine.grant.ratio)
            pieces = [payload.view(self._whole.dtype) for payload in payloads]  # the element type of the window
            cuda.ready(self._whole)
            encoded_s = link.clock.now()
            encode_s, begin_s = encoded_s - begin_s, encoded_s
        if self._wanted is not None:
            self._slots = [link.slot(server, slot) for server, slot in enumerate(self._reader.lent())]
        for server, piece in enumerate(pieces):
            link.tensors.put(piece, server, self._slots[server])
        self._put_statement()
        for server in range(len(link.shards)):
            link.tensors.flush(server)
        return encode_s, link.clock.now() - begin_s, sum(piece.nbytes for piece in pieces)

    def _put_statement(self) -> None:
        """State what this push is to be used with, unless it is what was stated before."""
        link = self._link
        if self._statement is None or link.stated is None or np.array_equal(stated := self._statement(), self._stated):
            return
        self._stated = stated
        for server in range(len(link.shards)):
            link.stated.put(stated, server, self.machine.grant.worker * link.n_stated)
            link.stated.flush(server)

    def _await(self, iteration: int, since_s: float | None = None) -> None:
        """Wait for the grant of this iteration, or for the end of the run if this worker is away.

        The wait counts from `since_s`: from before the push info is sent, so that it is never shorter than `held_s`.
        """
        now, phases, machine = self._link.clock.now, self._link.phases, self.machine
        phases.enter(Phase.WAITING, iteration)
        machine.waits(now() if since_s is None else since_s)
        grant = self._reader.wait(iteration=None if self.is_away else iteration, into=self._weights)
        if self.is_away and grant.iteration not in (0, iteration or grant.iteration):
            raise RuntimeError(f"{grant}: must be of iteration {iteration}, or the end of the run")
        self._finished = grant.iteration == 0
        if not machine.granted(grant):
            return
        phases.enter(Phase.READING)
        self._reader.read(self._weights)
        machine.read(self._reader.granted_s, now())
        phases.enter(Phase.COMPUTING)


class WorkerSession(LinkedSession):
    """Session of a worker."""

    def __init__(self, given: Given) -> None:
        job, checkpoints = given.job, given.checkpoints
        worker = given.comm.rank - job.cluster.servers
        speed = estimator(job, worker)  # takes seconds, hence before the clock starts
        super().__init__(given)
        self._comes_back = checkpoints.resumed is not None and self._resumed is None  # was absent at the checkpoint
        self._contribution, self._read = contributions.on_rank(job, self.flat, self._optimizer.on_worker)
        compression = self._link.compression
        self._engine = Worker(
            self._link,
            self._read,
            self._contribution.vector,
            speed,
            cancellable=job.paradigm.aborts or job.commits,
            compressor=None if compression is None else compression.compressor(worker),
            buffers=self._buffers if self._buffers.n_words else None,
            save=lambda number: self._save(number, self._state()),
            state=None if self._resumed is None else self._resumed["engine"],
            away=self._comes_back,
            statement=None if self._script is None else self._script.statement,
        )
        self._machine = self._engine.machine
        self.stopped = self._machine.stopped
        if self._resumed is None and not self._comes_back:
            self._continue()
        granted = create_assignments(job).first[0].first_sample >= 0
        allocated = (lambda: self._machine.samples) if granted else None
        self._iterations = self._create_iterations(worker, self._link.clock.now, allocated)
        self._computed = 1.0  # share of the batch that is computed when it is pushed

    def _batches(self, asked: Asked) -> Batches:
        """Return this worker's batches; restore the state of a resumed run first."""
        if self._resumed is not None:  # only now: the script's preparations may use the generators too
            state, self._resumed = self._resumed, None
            with self._checkpoints.restoring(self._name):
                self._restore(state)
            self._engine.resume()  # with the grant that was waited for
            if not self._engine.is_away:
                with nullcontext() if self._script is None else self._script.finishing(state.get("script")):
                    self._continue()
            self._keep_for_continuing()
        if self._comes_back:
            if self._leave(0.0):
                n_steps = (self._machine.grant.iteration - 1) * self._job.local_steps
                self._iterations.skip(n_steps * asked.accumulate // self._n_optimizers)
            self._comes_back = False  # only now: a checkpoint may be made while this worker waits for its first grant
        return self._iterations.shard(asked)

    def cancelled(self, share: float) -> bool:
        """Return whether server 0 has cancelled the current iteration."""
        super().cancelled(share)
        if self._job.paradigm.aborts and self._computed == 1.0:
            cuda.ready(self.flat.gradient)
            self._iterations.pad(share)
            if self._engine.cancelled():
                self._computed = share
        return self._computed < 1.0

    def _step(self, loss: torch.Tensor | float | None) -> None:
        """Use the gradient, and push if a push is due."""
        self._refuse_step()
        self._iterations.begin_again()
        mean_loss = self._look_at_step(loss, complete=self._computed == 1.0)
        if self._skips:
            self.flat.gradient.zero_()
        cuda.ready(self.flat.gradient)  # the computation ends here
        begin_s, end_s = self._iterations.end(self._computed)
        self._engine.cancelled()  # receive pending cancellations even if the script never asks
        n_samples = self._iterations.batch_size
        last = self._machine.computed(begin_s, end_s, n_samples, self._computed, self._iterations.load_s)
        self._computed = 1.0
        self._contribution.step(self.flat.gradient, n_samples, mean_loss, last=last)
        if last:
            self._push()

    def _push(self) -> None:
        """Push the contribution, and continue with the weights read after it."""
        lr, rates = self._rates()
        loss = self._contribution.prepare()
        gradient_sq = self._contribution.gradient_sq() if self._machine.share == 1.0 else math.nan
        self._engine.push(loss, lr, self._take_problem(), rates, gradient_sq)
        self._continue()

    def _continue(self, *, joins: bool = False) -> None:
        """Continue with the weights that were read, unless the run is over."""
        self.stopped = self._machine.stopped
        if not self.stopped:
            (self._contribution.join if joins else self._contribution.adopt)(self._read)
            self.flat.spread()
            self._weights_were_read()

    def _push_rest(self) -> None:
        """Push the local steps since the last push, where a worker that leaves does."""
        if self._job.commits and self._machine.n_steps > 0:
            self._push()

    def _leave(self, joins_s: float) -> bool:
        if joins_s == math.inf:
            return super()._leave(joins_s)
        self._push_rest()
        if not self.stopped:
            self._engine.stay_away(joins_s)
            self._continue(joins=True)
        return not self.stopped

    def _state(self) -> dict[str, Any]:
        """Return the worker's state while it waits for a grant."""
        return {
            "comes_back": self._comes_back,
            "engine": self._engine.state(),
            "contribution": self._contribution.state(),
            "script": None if self._script is None else self._script.state(),
            **self._training_state(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state; the grant that was waited for has not arrived yet."""
        self._comes_back = built(bool, state["comes_back"])
        self._contribution.restore(state["contribution"])
        self._restore_training(state)

    def _part(self) -> None:
        self._push_rest()
        self._engine.leave()

    @property
    def _unpushed(self) -> int:
        return self._machine.n_samples if self._machine.n_steps > 0 and not self.stopped else 0
