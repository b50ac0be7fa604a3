"""One rank's part in a parameter-server run, as a training script sees it: a loader, `step`, and an orderly end."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from mpi4py import MPI

from hpcsync import outputs
from hpcsync.coordinator import coordinate, create_paradigm
from hpcsync.iterations import Iterations
from hpcsync.job import Job
from hpcsync.learning.flat import FlatModel
from hpcsync.learning.optimizers import OptimizerSpec
from hpcsync.learning.workloads import Evaluate
from hpcsync.mpi.evaluator import Evaluator
from hpcsync.mpi.leader import Leader, RankFailed
from hpcsync.mpi.link import Link, Reader
from hpcsync.mpi.shard import Shard, follow
from hpcsync.mpi.worker import Worker
from hpcsync.progress import Progress, console
from hpcsync.roles import Roles
from hpcsync.session import Session
from hpcsync.signals import Interrupted, interrupt, on_signals
from hpcsync.traces.provenance import provenance
from hpcsync.traces.writer import TraceWriter

FAREWELL_S = 3.0  # how long a failed rank leaves server 0 to close the trace before it ends the job


class RankSession(Session):
    """What servers and workers have in common: a link, and an end in which nobody is left behind.

    All of rank 0's model becomes everybody's: the trainable weights through the link, frozen ones and buffers here.
    """

    def __init__(self, comm: MPI.Intracomm, job: Job, model: torch.nn.Module) -> None:
        self._comm = comm
        self._job = job
        self._model = model
        self.flat = FlatModel(model)
        roles = Roles(job.cluster.servers, job.cluster.workers)
        self._link = Link(comm, roles, self.flat.weights.numpy())
        self._clocks = self._link.clocks()
        self._optimizer: torch.optim.Optimizer | None = None
        super().__init__(rank=comm.rank, n_workers=roles.n_workers)
        self._share([p.detach() for p in model.parameters() if not p.requires_grad], 0)
        self._share(model.buffers(), 0)
        self._excepthook = sys.excepthook
        sys.excepthook = self._uncaught

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Also outside of the `with` block one rank's exception must not leave the others waiting for ever."""
        self._excepthook(kind, error, trace)
        sys.stderr.flush()
        self._comm.Abort(1)

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Until the end the script's own calls must not undo what is set up here, nor pretend to do what servers do."""

        def zero_grad(set_to_none: bool = True) -> None:
            self.flat.zero_gradient()

        def step(closure: Any = None) -> None:
            raise RuntimeError("optimizer.step: the servers run the optimizer; call the session's step(loss) instead")

        self._optimizer = optimizer
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._model.zero_grad = zero_grad  # type: ignore[method-assign]
        optimizer.step = step  # type: ignore[method-assign, assignment]

    def _give_back(self) -> None:
        sys.excepthook = self._excepthook
        if self._optimizer is not None:
            del self._optimizer.zero_grad, self._optimizer.step, self._model.zero_grad
            self._optimizer = None

    @abstractmethod
    def _part(self) -> None:
        """Play this rank's part to its end; rank 0's model then holds the final weights."""

    def _fail(self, error: BaseException) -> None:
        """Say what is known to whom it helps, before the job is ended."""
        if not isinstance(error, KeyboardInterrupt):
            print(f"hpcsync: rank {self.rank} failed:", file=sys.stderr)
            traceback.print_exception(error)
        self._link.report_failure()
        time.sleep(FAREWELL_S)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            try:
                self._part()
                self._share_final_state()
                self._link.free()
                self._conclude()
                self._give_back()
                return
            except BaseException as late:
                error = late
        self._fail(error)
        sys.stdout.flush()
        sys.stderr.flush()
        self._comm.Abort(1)

    def _share_final_state(self) -> None:
        """Everybody ends with the weights that server 0 has read, and with worker 0's running statistics, which live on
        the workers and are not synchronised before."""
        self._comm.Bcast(self.flat.weights.numpy(), 0)
        self._share(self._model.buffers(), self._link.roles.rank_of(0))

    def _share(self, tensors: Iterable[torch.Tensor], root: int) -> None:
        """Give everybody the root's values, of any type."""
        for tensor in tensors:
            values = tensor.reshape(-1).clone()
            self._comm.Bcast(values.view(torch.uint8).numpy(), root)
            tensor.copy_(values.view(tensor.shape))

    def _conclude(self) -> None:
        """After the last rank has finished."""


class WorkerSession(RankSession):
    def __init__(self, comm: MPI.Intracomm, job: Job, model: torch.nn.Module) -> None:
        super().__init__(comm, job, model)
        self._engine = self._make_engine()
        self.worker = self._engine.index
        self._iterations = Iterations(job, self.worker, self._link.clock.now, self._stop)

    def shard(self, dataset: Any, batch_size: int, epochs: int | None = 1) -> Iterator[Any]:
        self._refuse_outside()
        return self._iterations.shard(dataset, batch_size, epochs, lambda: self.stopped)

    def step(self, loss: torch.Tensor | float) -> bool:
        self._refuse_step()
        self._check_learning_rate()
        loss = float(loss.detach()) if isinstance(loss, torch.Tensor) else loss
        self.flat.gather_gradient()
        self._end_iteration(*self._iterations.end(), loss)
        self.stopped = self._engine.stopped
        return not self.stopped

    def _make_engine(self) -> Worker:
        return Worker(self._link, self.flat.weights.numpy(), self.flat.gradient.numpy())

    def _end_iteration(self, begin_s: float, end_s: float, loss: float) -> None:
        """The gradient of an iteration, computed between begin_s and end_s, is in the model."""
        self._engine.step(begin_s, end_s, self._iterations.batch_size, loss)

    def _stop(self) -> None:
        """The worker leaves before its next batch: for its script the run is over."""
        self.stopped = True

    def _check_learning_rate(self) -> None:
        if self._optimizer is not None and self._optimizer.param_groups[0]["lr"] != self._job.optimizer.lr:
            raise RuntimeError(
                f"the script changed the optimizer's learning rate from {self._job.optimizer.lr} to "
                f"{self._optimizer.param_groups[0]['lr']}: it lives on the servers; give connect a schedule instead"
            )

    def _part(self) -> None:
        self._engine.leave()


class FollowerSession(RankSession):
    """A server serves while its script would train: its loader is empty, and returns when the run is over."""

    def __init__(self, comm: MPI.Intracomm, job: Job, model: torch.nn.Module, optimizer: OptimizerSpec) -> None:
        super().__init__(comm, job, model)
        self._shard = Shard(self._link, optimizer, self.flat.weights)

    def shard(self, dataset: Any, batch_size: int, epochs: int | None = 1) -> Iterator[Any]:
        self._refuse_outside()
        if not self._shard.finished:
            self._serve()
        return iter(())

    def step(self, loss: torch.Tensor | float) -> bool:
        raise RuntimeError("step on a server: only workers train")

    def _serve(self) -> None:
        follow(self._link, self._shard)

    def _part(self) -> None:
        if not self._shard.finished:
            self._serve()
        self._shard.free()


class LeaderSession(FollowerSession):
    """Server 0: decides, evaluates, and writes everything down."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        job: Job,
        model: torch.nn.Module,
        optimizer: OptimizerSpec,
        evaluate: Evaluate | None,
        folder: Path,
    ) -> None:
        super().__init__(comm, job, model, optimizer)
        paradigm = create_paradigm(job)
        assert self._clocks is not None
        self._reader = Reader(self._link, self._link.roles.evaluator)
        hosts = [host for _, host, _, _ in self._clocks]
        attributes = provenance(job, engine="mpi", mpi_library=MPI.Get_library_version().strip("\0 \n"), hosts=hosts)
        self.folder = folder
        self._trace = TraceWriter(folder / outputs.TRACE, attributes, paradigm.decision_fields)
        for row in self._clocks:
            self._trace.append("clocks", row)
        self._trace.flush()
        self._coordinator = coordinate(job, paradigm, self._trace)
        self._evaluate = evaluate
        self._evaluator = (
            Evaluator(self._reader, model, evaluate, job.evaluation.every_samples) if evaluate is not None else None
        )
        self._console = console()
        self._progress = Progress(self._console)

    def _serve(self) -> None:
        leader = Leader(self._link, self._shard, self._coordinator, self._evaluator, self._chores)
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # the evaluator's Python code must not hold up the server's
        try:
            leader.serve()
        finally:
            sys.setswitchinterval(switch_s)
            self._progress.close()
        with on_signals(interrupt):
            self._finish_training(leader)
        leader.finish()

    def _chores(self, now_s: float) -> None:
        self._trace.flush_if_due(now_s)
        self._progress.show(now_s, self._coordinator)

    def _finish_training(self, leader: Leader) -> None:
        """While the others still wait patiently: evaluate the final weights. The weights are safe before that."""
        coordinator = self._coordinator
        coordinator.close()
        self._trace.flush()
        if self._evaluator is not None:
            self._evaluator.close()
            if (judged := self._evaluator.result()) is not None:
                coordinator.evaluated(*judged)
        leader.read(self._reader, self.flat.weights.numpy())
        if self._evaluate is not None:
            self._save()
            loss, accuracy = self._evaluate(self._model)
            coordinator.evaluated(coordinator.updated_s, coordinator.version, coordinator.samples, loss, accuracy)

    def _save(self) -> None:
        outputs.save_weights(self.folder, self._model)

    def _conclude(self) -> None:
        if self._evaluate is None:  # else they are saved: what is evaluated has no running statistics to wait for
            self._save()
        self._trace.close("finished")
        outputs.conclude(self.folder, self._console)

    def _fail(self, error: BaseException) -> None:
        status = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        with contextlib.suppress(OSError, RuntimeError):
            self._coordinator.close()
            self._trace.close(status)
        if isinstance(error, Interrupted | RankFailed):
            print(f"hpcsync: {status}: {error}; the trace so far is {self._trace.path}", file=sys.stderr)
        elif not isinstance(error, KeyboardInterrupt):
            traceback.print_exception(error)
