"""Worker's communication with the servers: push a contribution, wait for the grant, read the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hpcsync.core.worker_machine import WorkerMachine
from hpcsync.mpi.server.channel import Reader, ServerChannel
from hpcsync.mpi.transport import cuda, messages
from hpcsync.planning.speed_estimator import Estimator
from hpcsync.state import Stateful
from hpcsync.trace.schema import Phase
from hpcsync.training.buffers import Buffers
from hpcsync.training.compressor import Compressor


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
        Called with the number of a checkpoint, to save this worker's part of it.
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
        self._save = save
        self._reader = Reader(link, worker, self._write)
        self._infos = link.outbox(messages.TAG_INFO, messages.PUSH_INFO)
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
        self, loss: float, lr: float = math.nan, problem: int = 0, rates: Sequence[tuple[int, float]] = ()
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
        """
        self._link.phases.enter(Phase.PUSHING)
        encode_s, put_s, n_bytes = self._put() if self.machine.share == 1.0 else (0.0, 0.0, 0)
        push_info = self.machine.delivered(loss, encode_s, put_s, n_bytes, lr, problem)
        if self._buffers is not None:
            self._link.buffers.put(push_info.worker, push_info.iteration, self._buffers.packed())
        for change in rates:
            self._infos.send(0, (messages.InfoKind.RATE, *messages.rate_change(push_info, *change)[1:]))
        self._infos.send(0, (messages.InfoKind.PUSHED, *push_info[1:]))
        self._await(push_info.iteration + 1)

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
        self._infos.send(0, messages.brief(messages.PUSH_INFO, kind, self.machine.grant.worker))

    def _write(self, number: int) -> None:
        self._save(number)
        self._link.say(messages.InfoKind.SAVED)

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
        self._state()
        for server in range(len(link.shards)):
            link.tensors.flush(server)
        return encode_s, link.clock.now() - begin_s, sum(piece.nbytes for piece in pieces)

    def _state(self) -> None:
        """State what this push is to be used with, unless it is what was stated before."""
        link = self._link
        if self._statement is None or link.stated is None or np.array_equal(stated := self._statement(), self._stated):
            return
        self._stated = stated
        for server in range(len(link.shards)):
            link.stated.put(stated, server, self.machine.grant.worker * link.n_stated)
            link.stated.flush(server)

    def _await(self, iteration: int) -> None:
        """Wait for the grant of this iteration, or for the end of the run if this worker is away."""
        now, phases, machine = self._link.clock.now, self._link.phases, self.machine
        phases.enter(Phase.WAITING, iteration)
        machine.waits(now())
        promises = self._reader.wait(iteration=None if self.is_away else iteration, into=self._weights)
        granted_s, grant = self._reader.granted_s, promises[0].grant
        if self.is_away and grant.iteration not in (0, iteration or grant.iteration):
            raise RuntimeError(f"{promises}: must be grants of iteration {iteration}, or the end of the run")
        self._finished = grant.iteration == 0
        if not machine.granted(grant):
            return
        phases.enter(Phase.READING)
        self._reader.read(promises, self._weights)
        machine.read(granted_s, now())
        phases.enter(Phase.COMPUTING)
