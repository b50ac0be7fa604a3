"""Sessions of servers, and what they have in common with those of workers (`hpcsync.mpi.server.worker`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from hpcsync.core.assignments import create_assignments
from hpcsync.core.session import Asked, Batches, WithoutBatch
from hpcsync.mpi.collectives.model_parts import Layers
from hpcsync.mpi.server.channel import ServerChannel
from hpcsync.mpi.server.shard import Shard, follow
from hpcsync.mpi.session_base import Given, RankSession
from hpcsync.mpi.transport import messages
from hpcsync.training import compressor, loading, update_rules
from hpcsync.training.optimizers import OptimizerSpec, ServerOptimizer
from hpcsync.training.piece_optimizer import PieceOptimizer

# What `loss`, `total / n`, `losses[-1]` and `max(losses)` raise after a loop without batches.
OF_EMPTY_LOOPS = (NameError, ZeroDivisionError, IndexError, ValueError)


def _add_note(rank: int, error: BaseException) -> None:
    note = (
        f"hpcsync: rank {rank} is a server: sync.shard yields no batch there, so what the loop over it assigns or "
        "counts is missing after it. Use that on workers only (if sync.worker is not None)."
    )
    if isinstance(error, OF_EMPTY_LOOPS) and note not in getattr(error, "__notes__", ()):  # of an earlier session
        error.add_note(note)


def _excepthook(rank: int, hook: Callable[..., Any], kind: Any, error: BaseException, trace: Any) -> None:
    """Add the note to an exception after the `with` block."""
    _add_note(rank, error)
    hook(kind, error, trace)


class LinkedSession(RankSession):
    """Session with a channel, common to servers and workers.

    Parameters
    ----------
    given
        Inputs of the session.
    begin_s
        Time at which the clock starts on server 0, in seconds.
    """

    def __init__(self, given: Given, begin_s: float = 0.0) -> None:
        comm, job = given.comm, given.job
        super().__init__(given, Layers(comm, given.model))
        contributors_read = job.paradigm.grants_first
        weights = self.flat.weights
        self._link = ServerChannel(
            comm,
            self._roles,
            len(weights),
            weights.dtype,
            given.placement.transport,
            contributors_read=contributors_read,
            compression=compressor.of_job(job, self.flat.parameters, weights.dtype),
            begin_s=begin_s,
            tolerant=self._tolerant,
            shards=None if self._script is None else self._script.cuts(self._roles.n_servers),
            n_stated=0 if self._script is None or job.paradigm.steps_on_workers else self._script.n_stated,
            buffer_words=self._buffers.n_words,
        )
        self._clocks = self._link.clock.rows(self._link.comm)  # for the trace, on server 0
        self._pieces: PieceOptimizer | None = None  # a script's optimizers, on a server

    def _save(self, number: int, state: Mapping[str, Any]) -> None:
        """Write this rank's part of a checkpoint, and tell server 0."""
        self._checkpoints.write(number, self._name, state)
        if self.rank > 0:
            self._link.say(messages.InfoKind.SAVED)

    def _report_failure(self) -> None:
        self._link.say(messages.InfoKind.FAILED)

    def _free(self) -> None:
        self._link.free()

    def _share_results(self, comm: MPI.Intracomm) -> None:
        """Give all ranks the model, and their optimizers of the script what the servers' have kept.

        Where workers step, each keeps what its own have kept, and the servers get that of the last worker.

        Learning rates and the like, and parameters that no optimizer has, are those of a worker: its schedulers have
        changed the former, and its forward passes may have changed the latter, such as a moving average of others.
        """
        trained = {id(p) for p in self.flat.parameters}
        self._layers.share(comm, [p for p in self._model.parameters() if id(p) not in trained])
        if self._script is None:
            return
        on_workers, last = self._job.paradigm.steps_on_workers, comm.size - 1  # the last rank is a worker
        keepers = [last] if on_workers else range(self._roles.n_servers)
        kept = (self._script if on_workers else self._pieces) if comm.rank in keepers else None
        own = [] if kept is None else kept.kept_pieces()
        in_groups = None if kept is None else kept.kept_in_groups
        of_all = None if kept is None else kept.kept_of_all()
        adopts = self.worker is None or not on_workers
        for rank in keepers:
            for i in range(comm.bcast(len(own), rank)):  # one by one: together they may be too large for a message
                piece = comm.bcast(own[i] if comm.rank == rank else None, rank)
                if adopts:
                    self._script.adopt([piece])
            groups, together = comm.bcast(in_groups, rank), comm.bcast(of_all, rank)
            if adopts:
                self._script.kept_in_groups = groups
                self._script.keep_of_all(together)
        stated = comm.bcast(self._script.step_to_make().numbers, last)
        if self.worker is None:
            self._script.set_numbers(stated)


class FollowerSession(LinkedSession):
    """Session of a server: it serves while the script would train.

    Its loader is empty and returns when the run is over.
    """

    def __init__(self, given: Given, begin_s: float = 0.0) -> None:
        super().__init__(given, begin_s)
        state = given.checkpoints.state(self._name)
        n_present = self._link.comm.size - self._roles.n_servers
        self._shard = Shard(
            self._link,
            update_rules.of_job(given.job, self._on_shard),
            self.flat.weights,
            [grant for grant in create_assignments(given.job).first if grant.worker < n_present],
            lambda number: self._save(number, {**self._shard.state(), "buffers": self._link.buffers.state()}),
            state,
        )
        if state is not None:
            self._link.buffers.restore(state["buffers"])

    def _on_shard(self, weights: torch.nn.Parameter) -> ServerOptimizer:
        """Return the optimizer of the row of weights that begins with this server's shard."""
        if isinstance(self._optimizer, OptimizerSpec):
            return self._optimizer.on_server(weights)
        shard, reduce = self._link.shards[self.rank], self._link.sum_over_servers
        self._pieces = PieceOptimizer(self._optimizer, weights, shard, reduce)
        return self._pieces

    def _batches(self, asked: Asked) -> Batches:
        """Serve until the run is over; return no batches."""
        loading.refuse(asked.dataset, asked.batch_size, sharded=asked.sharded)
        if not self._shard.finished:
            self._serve()
        self.stopped = True
        return Batches(iter(()), lambda: 0)

    def _step(self, loss: torch.Tensor | float | None) -> None:
        """Raise WithoutBatch: a server does not train."""
        raise WithoutBatch

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if self.stopped and error is not None:
            _add_note(self.rank, error)
        ends = super().__exit__(kind, error, trace)
        if self.stopped and (error is None or ends):
            sys.excepthook = partial(_excepthook, self.rank, sys.excepthook)
        return ends

    def _serve(self) -> None:
        follow(self._link, self._shard)

    def _part(self) -> None:
        if not self._shard.finished:
            self._serve()
