"""A worker's communication: put its contribution, report it, wait for the grant, read the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hpcsync.core.assignments import STOP
from hpcsync.core.coordinator import PushInfo, with_prediction
from hpcsync.mpi.server.channel import Reader, ServerChannel
from hpcsync.mpi.transport import cuda, messages
from hpcsync.planning.speed_estimator import Estimator
from hpcsync.trace.schema import Phase
from hpcsync.training.compressor import Compressor


class Worker:
    """One worker's side of a link.

    estimator: of what the next iterations will take, to say it with every push; None where nobody asks.
    cancellable: whether server 0 may tell it that an iteration is in vain.
    assignment: what the last grant gives. read_s: when the weights that came with it were read.
    compressor: of the contribution; None where it is put as it is.
    weights, contribution: flat vectors, shape (size,): an answered wait fills the one with the servers' weights, a push
    reads the other.
    save: called with the number of a checkpoint, of which this worker's part is to be written.
    state: where the run goes on: what `state` was then. away: where the run has been going on without this worker,
    which does not know how far it was.
    """

    def __init__(
        self,
        link: ServerChannel,
        weights: torch.Tensor,
        contribution: torch.Tensor,
        estimator: Estimator | None = None,
        *,
        cancellable: bool = False,
        compressor: Compressor | None = None,
        save: Callable[[int], None] = lambda number: None,
        state: Mapping[str, Any] | None = None,
        away: bool = False,
    ) -> None:
        self.index = link.roles.worker(link.comm.rank)
        self.iteration = 0
        self.version = 0
        self.assignment = STOP
        self.read_s = 0.0
        self.stopped = False
        self._link = link
        self._weights = link.pieces(weights)  # once: slicing a tensor takes longer than beginning a transfer
        self._whole = contribution
        self._contribution = link.pieces(contribution)
        self._compressor = compressor
        self._bytes = weights.nbytes
        self._slots = [link.slot(server, self.index) for server in range(len(link.shards))]
        self._save = save
        self._reader = Reader(link, self.index, self._write)
        self._infos = link.outbox(messages.TAG_INFO, messages.PUSH_INFO)
        # Where none can come there is no inbox: MPI would look through its receives for every grant.
        self._cancellations = link.inbox(messages.TAG_CANCEL, messages.CANCEL) if cancellable else None
        self._cancelled = -1  # the last version from which it is of no use to compute on
        self._estimator = estimator
        self._wait_s = 0.0
        self._pull_s = self._comm_s = self._encode_s = 0.0
        self._wire_bytes = 0
        self._has_left = False
        self.is_away = away
        """Whether it has left only for a while."""
        self._joins = False  # whether it has said that it joins again
        self._finished = False
        if state is not None:
            vars(self).update(state)
        self.stopped = self._has_left
        if state is None:
            self.resume()

    def resume(self) -> None:
        """Wait for the grant of the next iteration, if this worker takes part."""
        if not (self._has_left or self.is_away):
            self._await(self.iteration + 1)

    def state(self) -> dict[str, Any]:
        """All that it remembers while it waits for a grant."""
        names = ("iteration", "_compressor", "_estimator", "_has_left", "is_away", "_joins")
        return {name: getattr(self, name) for name in names}

    def cancelled(self) -> bool:
        """Whether this iteration's contribution is known to be of no use any more."""
        while self._cancellations is not None and (record := self._cancellations.poll()) is not None:
            (self._cancelled,) = record
        return self._cancelled >= self.version

    def step(
        self, begin_s: float, end_s: float, batch_size: int, loss: float, local_steps: int = 1, share: float = 1.0
    ) -> None:
        """Push what was computed between begin_s and end_s; return with the next weights read.

        batch_size: samples of all its `local_steps` iterations. share: of them that was computed, if less than 1 of a
        cancelled iteration, whose contribution stays here. Sets `stopped` instead when the run is over.
        """
        self._link.phases.enter(Phase.PUSHING)
        self.cancelled()  # also where nobody asks: what is sent must be received
        if share == 1.0:
            self._put()
        push_info = PushInfo(
            worker=self.index,
            iteration=self.iteration,
            version_read=self.version,
            begin_s=begin_s,
            end_s=end_s,
            compute_s=end_s - begin_s,
            wait_s=self._wait_s,
            comm_s=self._comm_s,
            batch_size=batch_size,
            local_steps=local_steps,
            loss=loss,
            wire_bytes=self._wire_bytes,
            share=share,
            pull_s=self._pull_s,
            encode_s=self._encode_s,
        )
        if self._estimator is not None:
            push_info = with_prediction(push_info, self._estimator)
        self._infos.send(0, (messages.InfoKind.PUSHED, *push_info))
        self._await(self.iteration + 1)

    def leave(self) -> None:
        """Take no further part; return once every worker has left."""
        if not self._has_left:
            self._has_left = True
            self._say(messages.InfoKind.LEFT)
        if not self._finished:
            self._reader.wait(iteration=0)  # FINISH names none

    def stay_away(self, until_s: float) -> None:
        """Take no part in the run until then; return with the next weights read, or `stopped` if it is over before."""
        if not self.is_away:
            self.is_away = True
            self._say(messages.InfoKind.LEFT)
        if not self._joins and self._reader.idle(until_s):
            self._joins = True
            self._say(messages.InfoKind.JOINED)
        self._await(self.iteration)
        self._has_left = self._finished
        self.is_away = self._joins = False

    def _say(self, kind: int) -> None:
        self._infos.send(0, messages.brief(messages.PUSH_INFO, kind, self.index))

    def _write(self, number: int) -> None:
        self._save(number)
        self._link.say(messages.InfoKind.SAVED)

    def _put(self) -> None:
        link, pieces = self._link, self._contribution
        begin_s = link.clock.now()
        if self._compressor is not None:
            payloads = self._compressor.encode(self._whole, link.shards, self.assignment.ratio)
            pieces = [payload.view(self._whole.dtype) for payload in payloads]  # as a window takes them
            cuda.ready(self._whole)
            encoded_s = link.clock.now()
            self._encode_s, begin_s = encoded_s - begin_s, encoded_s
        for server, piece in enumerate(pieces):
            link.tensors.put(piece, server, self._slots[server])
        for server in range(len(link.shards)):
            link.tensors.flush(server)
        self._comm_s += link.clock.now() - begin_s
        self._wire_bytes += sum(piece.nbytes for piece in pieces)

    def _await(self, iteration: int) -> None:
        """The grant of this iteration; or, of one that is away, the end."""
        now, phases = self._link.clock.now, self._link.phases
        phases.enter(Phase.WAITING, iteration)
        begin_s = now()
        grants = self._reader.wait(iteration=None if self.is_away else iteration)
        if self.is_away and grants[0].iteration not in (0, iteration or grants[0].iteration):
            raise RuntimeError(f"expected the end, or grants of iteration {iteration}, not {grants}")
        granted_s = now()
        self._finished = grants[0].iteration == 0
        self._wait_s = granted_s - begin_s
        self._comm_s, self._encode_s, self._wire_bytes = 0.0, 0.0, 0
        if grants[0].local_steps == 0:
            self.stopped = True
            return
        phases.enter(Phase.READING)
        self._reader.read(grants, self._weights)
        self.iteration, self.version = grants[0].iteration, grants[0].version
        self.assignment = grants[0].assignment
        self.read_s = now()
        phases.enter(Phase.COMPUTING)
        self._pull_s = self._comm_s = self.read_s - granted_s
        self._wire_bytes = self._bytes
