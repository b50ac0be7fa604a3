"""Sessions of servers and workers in a parameter-server run."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from hpcsync.config.errors import JobError
from hpcsync.core.assignments import create_assignments, create_paradigm
from hpcsync.core.coordinator import coordinate
from hpcsync.core.iterations import Iterations
from hpcsync.core.roles import Roles
from hpcsync.core.session import Asked
from hpcsync.core.step_problems import ProblemReport
from hpcsync.mpi.collectives.model_parts import Layers
from hpcsync.mpi.rank0.run_recorder import RunRecorder
from hpcsync.mpi.server.channel import Reader, ServerChannel
from hpcsync.mpi.server.leader import Leader
from hpcsync.mpi.server.shard import Shard, follow
from hpcsync.mpi.server.worker import Worker
from hpcsync.mpi.session_base import Given, RankSession
from hpcsync.mpi.transport import cuda, messages
from hpcsync.run_dir.checkpoint import RUN
from hpcsync.state import built, restore_arrays
from hpcsync.system.signals import interrupt, on_signals
from hpcsync.training import compressor, contributions, loading, rng_state, update_rules
from hpcsync.training.buffers import Buffers
from hpcsync.training.optimizers import OptimizerFactory
from hpcsync.training.script_optimizers import OfShard
from hpcsync.training.speed_models import estimator


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
        roles = Roles(job.cluster.servers, job.cluster.workers)
        super().__init__(given, Layers(comm, given.model))
        contributors_read = job.paradigm.grants_first
        weights = self.flat.weights
        self._link = ServerChannel(
            comm,
            roles,
            len(weights),
            weights.dtype,
            given.placement.transport,
            contributors_read=contributors_read,
            compression=compressor.of_job(job, self.flat.parameters, weights.dtype),
            begin_s=begin_s,
            tolerant=self._tolerant,
            shards=self._cuts(roles.n_servers),
            n_stated=0 if self._script is None or job.steps_on_workers else self._script.n_stated,
            buffer_words=self._buffers.n_words,
        )
        self._clocks = self._link.clocks()

    def _cuts(self, n_servers: int) -> list[slice] | None:
        """Return the shards of a script's parameters."""
        try:
            return None if self._script is None else self._script.cuts(n_servers)
        except ValueError as error:
            raise JobError(f"cluster.servers = {n_servers}: {error}") from None

    def _report_failure(self) -> None:
        self._link.say(messages.InfoKind.FAILED)

    def _free(self) -> None:
        self._link.free()

    @property
    def _name(self) -> str:
        """Name of this rank's part of a checkpoint."""
        return self._link.roles.name(self.rank)

    def _share_kept(self, comm: MPI.Intracomm) -> None:
        """Give all ranks' optimizers of the script what the servers' have kept; collective over the survivors."""
        if self._script is None or self._job.steps_on_workers:
            return
        own = self._kept_pieces()
        for server in range(self._link.roles.n_servers):
            for i in range(comm.bcast(len(own), server)):  # one by one: together they may be too large for a message
                self._script.adopt([comm.bcast(own[i] if comm.rank == server else None, server)])

    def _kept_pieces(self) -> list[Any]:
        """Return what this server's optimizers have kept; on a worker nothing."""
        return []


class WorkerSession(LinkedSession):
    """Session of a worker."""

    def __init__(self, given: Given) -> None:
        job, checkpoints = given.job, given.checkpoints
        worker = given.comm.rank - job.cluster.servers
        speed = estimator(job, worker)  # takes seconds, hence before the clock starts
        super().__init__(given)
        self.worker = worker
        self._resumed = checkpoints.state(self._name)
        self._comes_back = checkpoints.resumed is not None and self._resumed is None  # was absent at the checkpoint
        self._contribution, self._read = contributions.on_rank(job, self.flat, self._optimizer)
        compression = self._link.compression
        self._engine = Worker(
            self._link,
            self._read,
            self._contribution.vector,
            speed,
            cancellable=job.aborts or job.commits,
            compressor=None if compression is None else compression.compressor(worker),
            buffers=self._buffers if self._buffers.n_words else None,
            save=lambda number: checkpoints.write(number, self._name, self._state()),
            state=None if self._resumed is None else self._resumed["engine"],
            away=self._comes_back,
            statement=None if self._script is None else self._script.statement,
        )
        self._machine = self._engine.machine
        self.stopped = self._machine.stopped
        if self._resumed is None and not (self._comes_back or self.stopped):
            self._contribution.adopt(self._read)
            self.flat.spread()
        granted = create_assignments(job).first[0].first_sample >= 0
        allocated = (lambda: self._machine.samples) if granted else None
        self._iterations = Iterations(job, worker, self._link.clock.now, self._leave, allocated=allocated)
        self._computed = 1.0  # share of the batch that is computed when it is pushed

    def _batches(self, asked: Asked) -> Iterator[Any]:
        """Return this worker's batches; restore the state of a resumed run first."""
        if self._resumed is not None:  # only now: the script's preparations may use the generators too
            state, self._resumed = self._resumed, None
            with self._checkpoints.restoring(self._name):
                self._restore(state)
            self._engine.resume()  # with the grant that was waited for
            if not self._engine.is_away:
                self._continue()
        if self._comes_back:
            if self._leave(0.0):
                self._iterations.skip((self._machine.grant.iteration - 1) * self._job.local_steps)
            self._comes_back = False  # only now: a checkpoint may be made while this worker waits for its first grant
        return self._iterations.shard(*asked[:3], lambda: self.stopped, sharded=asked.sharded)

    def cancelled(self, share: float) -> bool:
        """Return whether server 0 has cancelled the current iteration."""
        super().cancelled(share)
        if self._job.aborts and self._computed == 1.0:
            cuda.ready(self.flat.gradient)
            self._iterations.pad(share)
            if self._engine.cancelled():
                self._computed = share
        return self._computed < 1.0

    def step(self, loss: torch.Tensor | float | None = None) -> bool:
        """Use the gradient, and push if a push is due; return False once the run is over."""
        self._refuse_step()
        losses = self._take_losses(loss)
        mean_loss = sum(losses) / len(losses) if losses else math.nan
        self.flat.gather_gradient()
        if self._computed == 1.0:
            self._check_step(losses, mean_loss)
        if self._skips:
            self.flat.gradient.zero_()
        cuda.ready(self.flat.gradient)  # the computation ends here
        if not self._iterations.under_way and self._may_begin_again:
            self._iterations.begin_again()
        begin_s, end_s = self._iterations.end(self._computed)
        self._engine.cancelled()  # receive pending cancellations even if the script never asks
        n_samples = self._iterations.batch_size
        last = self._machine.computed(begin_s, end_s, n_samples, self._computed, self._iterations.load_s)
        self._computed = 1.0
        self._contribution.step(self.flat.gradient, n_samples, mean_loss, last=last)
        if last:
            self._push()
        return not self.stopped

    def _push(self) -> None:
        """Push the contribution, and continue with the weights read after it."""
        lr, rates = (math.nan, []) if self._script is None else (self._script.lr, self._script.changed_rates())
        self._engine.push(self._contribution.prepare(), lr, self._take_problem(), rates)
        self._continue()

    def _continue(self) -> None:
        self.stopped = self._machine.stopped
        if not self.stopped:
            self._contribution.adopt(self._read)
            self.flat.spread()

    def _push_rest(self) -> None:
        """Push the local steps since the last push, where a worker that leaves does."""
        if self._contribution.commits_rest and self._machine.n_steps > 0:
            self._push()

    def _leave(self, joins_s: float) -> bool:
        if joins_s == math.inf:
            return super()._leave(joins_s)
        self._push_rest()
        if not self.stopped:
            self._engine.stay_away(joins_s)
            self.stopped = self._machine.stopped
        if not self.stopped:
            self._contribution.join(self._read)
            self.flat.spread()
        return not self.stopped

    def _state(self) -> dict[str, Any]:
        """Return the worker's state while it waits for a grant."""
        return {
            "comes_back": self._comes_back,
            "engine": self._engine.state(),
            "contribution": self._contribution.state(),
            "iterations": self._iterations.state(),
            "generators": rng_state.state(self.flat.weights.device),
            "buffers": dict(self._model.named_buffers()),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state; the grant that was waited for has not arrived yet."""
        self._comes_back = built(bool, state["comes_back"])
        self._contribution.restore(state["contribution"])
        self._iterations.restore(state["iterations"])
        rng_state.restore(state["generators"], self.flat.weights.device)
        restore_arrays(dict(self._model.named_buffers()), state["buffers"])

    def _part(self) -> None:
        self._push_rest()
        self._engine.leave()


class FollowerSession(LinkedSession):
    """Session of a server: it serves while the script would train.

    Its loader is empty and returns when the run is over.
    """

    def __init__(self, given: Given, begin_s: float = 0.0) -> None:
        super().__init__(given, begin_s)
        state = given.checkpoints.state(self._name)
        n_present = self._link.comm.size - self._link.roles.n_servers
        self._shard = Shard(
            self._link,
            update_rules.of_job(given.job, self._on_shard()),
            self.flat.weights,
            [grant for grant in create_assignments(given.job).first if grant.worker < n_present],
            self._save_shard,
            state,
        )
        if state is not None:
            self._link.buffers.restore(state["buffers"])

    def _on_shard(self) -> OptimizerFactory:
        """Return the optimizer of this server's shard."""
        if self._script is None:
            return self._optimizer
        return OfShard(self._script, self._link.shards[self.rank], self._link.sum_over_servers)

    def _batches(self, asked: Asked) -> Iterator[Any]:
        """Serve until the run is over; return no batches."""
        loading.refuse(asked.dataset, asked.batch_size, sharded=asked.sharded)
        if not self._shard.finished:
            self._serve()
        return iter(())

    def step(self, loss: torch.Tensor | float | None = None) -> bool:
        """Raise RuntimeError: a server does not train."""
        raise RuntimeError("step on a server: only workers train")

    def _kept_pieces(self) -> list[Any]:
        return self._shard.store.kept_pieces()

    def _serve(self) -> None:
        follow(self._link, self._shard)

    def _save_shard(self, number: int) -> None:
        self._checkpoints.write(number, self._name, {**self._shard.state(), "buffers": self._link.buffers.state()})
        if self.rank > 0:
            self._link.say(messages.InfoKind.SAVED)

    def _part(self) -> None:
        if not self._shard.finished:
            self._serve()
        self._shard.free()


class LeaderSession(FollowerSession):
    """Session of server 0, which decides, evaluates and records the run."""

    def __init__(self, given: Given) -> None:
        job, resumed = given.job, given.checkpoints.state(RUN)
        super().__init__(given, 0.0 if resumed is None else resumed["now_s"])
        assert self._clocks is not None
        self._latest: list[torch.Tensor] = []  # the workers' buffers for the evaluation under way
        self._reader = Reader(self._link, self._link.roles.evaluator)
        self._recorder = RunRecorder(
            given,
            resumed,
            self._clocks,
            self._link.phases,
            given.placement.attributes(),
            partial(coordinate, job, create_paradigm(job)),
            self._read,
        )
        self._unheard: list[tuple[Any, ...]] = [] if resumed is None else resumed["unheard"]

    def _serve(self) -> None:
        recorder, clock = self._recorder, self._link.clock
        saver = recorder.saver(lambda: recorder.state(clock.now()), self._unheard, clock.now())
        leader = Leader(
            self._link,
            self._shard,
            recorder.coordinator,
            recorder.evaluator,
            recorder.chores,
            saver,
            recorder.watch.look,
            self._take_buffers if self._buffers.n_words else None,
            ProblemReport(self._job.stop.on_nan).see,
            recorder.rate_changed,
        )
        switch_s = sys.getswitchinterval()
        recorder.begin()
        sys.setswitchinterval(1e-4)  # the evaluator's Python code must not delay the server's
        try:
            leader.serve()
        finally:
            sys.setswitchinterval(switch_s)
            recorder.stop_showing()
        with on_signals(interrupt):
            self._finish_training(leader)
        leader.finish()

    def _take_buffers(self) -> None:
        """Copy the workers' buffers as of the pushes handled so far."""
        coordinator = self._recorder.coordinator
        self._latest = self._link.buffers.latest(coordinator.trained_by, coordinator.done)

    def _read(self, version: int, into: torch.Tensor, buffers: Buffers) -> float:
        """Read a version for the evaluator; all servers have promised it, or are about to."""
        pieces = self._link.pieces(into)
        self._reader.read(self._reader.wait(version=version, into=pieces), pieces)
        buffers.adopt(self._latest)
        return math.nan

    def _finish_training(self, leader: Leader) -> None:
        """Evaluate the final weights, while the other ranks wait with backoff."""
        recorder = self._recorder
        recorder.coordinator.close()
        recorder.trace.flush()
        if recorder.evaluator is not None:
            recorder.evaluator.close()
            if (judged := recorder.evaluator.result()) is not None:
                recorder.coordinator.evaluated(*judged)
        leader.read(self._reader, self.flat.weights)
        self.flat.spread()
        self._take_buffers()
        self._buffers.adopt(self._latest)
        recorder.judge(self._model, math.nan)

    def _conclude(self) -> None:
        self._recorder.conclude(self._model)

    def _fail(self, error: BaseException) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._recorder.coordinator.close()
        self._recorder.fail(error)
