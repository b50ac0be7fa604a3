"""One rank's part in a run, as a training script sees it, whatever the paradigm: the model, and an orderly end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from abc import abstractmethod
from types import TracebackType
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.core.session import Session
from hpcsync.mpi.collectives.model_parts import Layers
from hpcsync.mpi.transport.ulfm import RankFailed, leave_with, survivors, tolerable
from hpcsync.mpi.transport.window_selection import WindowSelection
from hpcsync.run_dir.checkpoint import Checkpoints
from hpcsync.system import launcher
from hpcsync.system.atomic_files import NotWritten
from hpcsync.system.signals import TO_BE_RESUMED, Terminated, left_to_rank_0
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.gradient import Loss
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.workloads.registry import Evaluate

FAREWELL_S = 3.0  # how long a failed rank leaves rank 0 to close the trace before it ends the job


def end_all(comm: MPI.Intracomm, error: BaseException) -> None:
    """End every rank of a run that cannot be finished, with the status that says whether it can be resumed."""
    status = TO_BE_RESUMED if isinstance(error, Terminated) else 1
    if tolerable():  # there an abort ends nobody; but of ranks that are killed the others hear
        if isinstance(error, RankFailed) and comm.rank > 0:
            os._exit(status)  # they have heard already, and somebody must tell the launcher
        os.kill(os.getpid(), signal.SIGKILL)
    if status == TO_BE_RESUMED and launcher.under_pmi2_of_slurm():
        os._exit(status)  # an abort would kill this rank too, and its status be lost
    comm.Abort(status)
    os._exit(status)  # MPICH's abort may return before the launcher ends this rank


class Given(NamedTuple):
    """What a rank's session is made of. optimizer: of gradients, wherever they are applied. checkpoints: of the run."""

    comm: MPI.Intracomm
    job: Job
    model: torch.nn.Module
    placement: WindowSelection
    checkpoints: Checkpoints
    optimizer: OptimizerSpec
    evaluate: Evaluate | None


class RankSession(Session):
    """What all ranks have in common: one model to begin and to end with, and an end in which nobody is left behind.

    All of rank 0's model becomes everybody's, of the layers that a rank has. Running statistics are not synchronised
    during the run.
    """

    def __init__(self, given: Given, layers: Layers) -> None:
        comm, job = given.comm, given.job
        self._comm = comm
        self._job = job
        self._checkpoints = given.checkpoints
        self._tolerant = job.cluster.on_death == "continue"
        self._layers, self._model = layers, layers.model
        self.flat = FlatModel(layers.trained)
        self.flat.model = layers.model  # it is called as a whole
        self._optimizer: torch.optim.Optimizer | None = None
        super().__init__(rank=comm.rank, n_workers=job.cluster.workers)
        layers.share()
        self._excepthook = sys.excepthook
        sys.excepthook = self._uncaught
        self._heed_signals = left_to_rank_0()

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Also outside of the `with` block one rank's exception must not leave the others waiting for ever."""
        self._excepthook(kind, error, trace)
        sys.stderr.flush()
        end_all(self._comm, error)

    def loss_here(self, loss: Loss | None) -> Loss | None:
        """What a job's loop computes on this rank with the model, if its loss is this."""
        return loss

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Until the end the script's calls must neither undo what is set up here nor seem to do what a session does."""

        def zero_grad(set_to_none: bool = True) -> None:
            self.flat.zero_gradient()

        def step(closure: Any = None) -> None:
            raise RuntimeError("optimizer.step: the session runs the optimizer; call the session's step(loss) instead")

        self._optimizer = optimizer
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._model.zero_grad = zero_grad  # type: ignore[method-assign]
        optimizer.step = step  # type: ignore[method-assign, assignment]

    def _give_back(self) -> None:
        self._heed_signals()
        sys.excepthook = self._excepthook
        if self._optimizer is not None:
            del self._optimizer.zero_grad, self._optimizer.step, self._model.zero_grad
            self._optimizer = None

    @abstractmethod
    def _part(self) -> None:
        """Play this rank's part to its end; rank 0's model then holds the final weights."""

    @abstractmethod
    def _report_failure(self) -> None:
        """Tell rank 0 that this rank cannot go on."""

    @abstractmethod
    def _free(self) -> None:
        """Give up everything that was made for the run; collective."""

    def _fail(self, error: BaseException) -> None:
        """Say what is known to whom it helps, before the job is ended."""
        if isinstance(error, RankFailed):
            print(f"hpcsync: rank {self.rank} cannot go on: {error}", file=sys.stderr)
        elif isinstance(error, NotWritten | JobError):
            print(f"hpcsync: rank {self.rank} failed: {error}", file=sys.stderr)
        elif not isinstance(error, KeyboardInterrupt):
            print(f"hpcsync: rank {self.rank} failed:", file=sys.stderr)
            traceback.print_exception(error)
        with contextlib.suppress(RankFailed, MPI.Exception):  # rank 0 itself may have died
            self._report_failure()
        time.sleep(FAREWELL_S)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            try:
                self._part()
                together = survivors(self._comm) if self._tolerant else self._comm
                complete = together.size == self._comm.size
                self._layers.share(self._layers.first, together)
                if complete:
                    self._free()
                    self._layers.free()
                self._conclude()
                self._give_back()
                if not complete:
                    leave_with(together)
                return
            except BaseException as late:
                error = late
        self._fail(error)
        sys.stdout.flush()
        sys.stderr.flush()
        end_all(self._comm, error)

    def _conclude(self) -> None:
        """After the last rank has finished."""
