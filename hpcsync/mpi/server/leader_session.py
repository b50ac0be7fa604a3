"""Session of server 0, which has the records of the run too."""

from __future__ import annotations

import contextlib
import math
import sys
from functools import partial
from typing import Any

import torch

from hpcsync.core.coordinator import coordinate
from hpcsync.mpi.rank0.run_recorder import RunRecorder
from hpcsync.mpi.server.channel import Reader
from hpcsync.mpi.server.leader import Leader
from hpcsync.mpi.server.session import FollowerSession
from hpcsync.mpi.session_base import Given
from hpcsync.run_dir.checkpoint import RUN
from hpcsync.system.signals import interrupt, on_signals
from hpcsync.training.buffers import Buffers


class LeaderSession(FollowerSession):
    """Session of server 0, which decides, evaluates and records the run."""

    def __init__(self, given: Given) -> None:
        job, resumed = given.job, given.checkpoints.state(RUN)
        super().__init__(given, 0.0 if resumed is None else resumed["now_s"])
        assert self._clocks is not None
        self._latest: list[torch.Tensor] = []  # the workers' buffers for the evaluation under way
        self._reader = Reader(self._link, self._link.roles.evaluator)
        compression = self._link.compression
        self._recorder = RunRecorder(
            given,
            resumed,
            self._clocks,
            self._link.phases,
            given.placement.attributes() | ({} if compression is None else compression.attributes()),
            partial(coordinate, job),
            self._read,
        )
        self._unheard: list[tuple[Any, ...]] = [] if resumed is None else resumed["unheard"]

    def _serve(self) -> None:
        recorder, clock = self._recorder, self._link.clock
        saver = recorder.saver(lambda: recorder.state(clock.now()), self._unheard, clock.now(), self._shard.dead)
        about_to_evaluate = self._take_buffers if self._buffers.n_words else None
        leader = Leader(self._link, self._shard, recorder, saver, about_to_evaluate)
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
        self._reader.wait(version=version, into=pieces)
        self._reader.read(pieces)
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
