"""Base class of sessions on MPI ranks: the model, shared weights, and an orderly end."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
import threading
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.modules.module import register_module_forward_pre_hook, register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpcsync.config.compression import refuse_momentum
from hpcsync.config.errors import JobError, below, shown
from hpcsync.config.job import Job
from hpcsync.config.user_code import of_user
from hpcsync.core.iterations import Iterations
from hpcsync.core.job_validation import IN_DDP
from hpcsync.core.roles import Roles
from hpcsync.core.session import Session, WithoutBatch
from hpcsync.core.step_problems import WRONG, StepChecks
from hpcsync.mpi.collectives.model_parts import Layers
from hpcsync.mpi.transport.ulfm import RankFailed, end_with, survivors, tolerable
from hpcsync.mpi.transport.window_selection import WindowSelection
from hpcsync.paradigms.records import Problem
from hpcsync.run_dir import status_file
from hpcsync.run_dir.checkpoint import Checkpoints
from hpcsync.state import StateError, restore_arrays
from hpcsync.system import launch_output, rank_environment
from hpcsync.system.atomic_files import NotWritten
from hpcsync.system.signals import TO_BE_RESUMED, Terminated, left_to_rank_0, told_to_end
from hpcsync.training import rng_state
from hpcsync.training.buffers import Buffers, Calibrate
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.gradient import Loss
from hpcsync.training.loading import different_data
from hpcsync.training.optimizer_groups import parameters_of
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.script_optimizers import (
    ScriptOptimizers,
    different_rates,
    replace_step,
    same,
    unscale,
)
from hpcsync.training.untrained import UntrainedParameters
from hpcsync.workloads.registry import Evaluate

FAREWELL_S = 3.0  # time that a failed rank gives rank 0 to close the trace before it ends the job

_within = threading.local()  # `session`: the one in whose block this rank is; ranks may be threads


class WithinAnother(JobError):
    """All ranks of a script begin a session where their servers are busy with another one."""


def refuse_within_another(comm: MPI.Intracomm) -> None:
    """Raise WithinAnother if servers would take part in a session on `comm` only after one that waits for it."""
    outer: RankSession | None = getattr(_within, "session", None)
    if outer is not None and outer.keeps_servers_from(comm):
        raise WithinAnother(
            "connect: must not be called within the with block of another session, whose servers take part in nothing "
            "else: give one connect all models and optimizers, in lists, or call it after the block"
        )


def end_all(comm: MPI.Intracomm, error: BaseException, *, is_interrupted: bool = False) -> NoReturn:
    """End every rank of a run that cannot be finished; the exit status tells if the run can be resumed.

    Rank 0 alone may have been told to end: the others know it from `is_interrupted`.
    """
    told = isinstance(error, Terminated) or (isinstance(error, RankFailed) and (told_to_end() or is_interrupted))
    status = TO_BE_RESUMED if told else 1
    if tolerable():  # with ULFM an abort ends no other rank, but the others detect ranks that are killed
        if isinstance(error, RankFailed) and comm.rank > 0:
            os._exit(status)  # the others already know, and one rank must return the status to the launcher
        os.kill(os.getpid(), signal.SIGKILL)
    if status == TO_BE_RESUMED and rank_environment.under_pmi2_of_slurm():
        os._exit(status)  # an abort would kill this rank too and lose its status
    launch_output.wait_until_read()
    comm.Abort(status)
    os._exit(status)  # MPICH's abort may return before the launcher ends this rank


class Given(NamedTuple):
    """Inputs of a rank's session.

    Attributes
    ----------
    comm : MPI.Intracomm
        Communicator of all ranks.
    job : Job
        The job.
    model : torch.nn.Module
        Model to train.
    placement : WindowSelection
        Transport of the tensors.
    checkpoints : Checkpoints
        Checkpoints of the run, and the run's folder.
    optimizer : OptimizerSpec or tuple of torch.optim.Optimizer
        Optimizer of the gradients, wherever they are applied; or the optimizers of a script.
    evaluate : Evaluate or None
        Evaluation of the model.
    calibrate : Calibrate or None
        Recomputes the running statistics before an evaluation and at the end; None if they are the workers'.
    log : str or None
        Log of rank 0, a key of `hpcsync.export.loggers.LOGS`.
    """

    comm: MPI.Intracomm
    job: Job
    model: torch.nn.Module
    placement: WindowSelection
    checkpoints: Checkpoints
    optimizer: OptimizerSpec | tuple[torch.optim.Optimizer, ...]
    evaluate: Evaluate | None
    calibrate: Calibrate | None
    log: str | None

    def parameters(self, module: torch.nn.Module) -> list[torch.nn.Parameter] | None:
        """Return the parameters of a module, or of a copy of the model, that the run trains; None: all trainable ones.

        They are those of a script's optimizers, frozen or not.
        """
        if isinstance(self.optimizer, OptimizerSpec):
            return None
        given = {id(p) for p in parameters_of(*self.optimizer)}
        if not any(id(p) in given for p in module.parameters()):  # a copy
            pairs = zip(self.model.parameters(), module.parameters(), strict=True)
            return [copy for original, copy in pairs if id(original) in given]
        return [p for p in module.parameters() if id(p) in given]


class RankSession(Session):
    """Session common to all ranks: one model at the beginning and the end, and an end that no rank leaves early.

    All of rank 0's model is broadcast to the ranks, for the layers that each rank trains. Buffers, such as running
    statistics, are each worker's own during the run; at the end rank 0 chooses them.
    """

    def __init__(self, given: Given, layers: Layers) -> None:
        comm, job = given.comm, given.job
        self._comm = comm
        self._job = job
        self._checkpoints = given.checkpoints
        self._tolerant = job.cluster.on_death == "continue"
        self._layers, self._model = layers, layers.model
        self._script: ScriptOptimizers | None = None
        self._taken = contextlib.ExitStack()  # gives back the steps of its optimizers
        self._optimizer: OptimizerSpec | ScriptOptimizers
        if isinstance(given.optimizer, OptimizerSpec):
            self.flat = FlatModel(layers.trained)
            self._optimizer = given.optimizer
        else:
            self.flat = FlatModel(layers.trained, given.parameters(layers.trained))
            self._optimizer = self._script = ScriptOptimizers(given.optimizer, self.flat, job.optimizer.clip_norm)
        self.flat.model = layers.model  # the forward pass calls the whole model
        self._buffers = Buffers(layers.model, job.evaluation.buffers)
        self._checks: StepChecks | None = None  # of a worker that runs a script
        self._problems: set[Problem] = set()  # of the steps since the last push
        self._iterations: Iterations  # of a worker
        self._n_steps = 0  # made by the script
        self._has_skipped = False  # a step, as a GradScaler does
        self._last_rates: tuple[tuple[int, int], list[float]] | None = None  # of the last step that was told
        self._session_stepped = False  # since the latest step of any optimizer on these parameters began
        self._roles = roles = Roles(job.cluster.servers, job.cluster.workers)
        worker = None if roles.is_server(comm.rank) else roles.worker(comm.rank)
        super().__init__(rank=comm.rank, n_workers=roles.n_workers, worker=worker)
        self._has_loss = worker in job.with_loss
        self._name = roles.name(comm.rank)  # of this rank's part of a checkpoint
        self._resumed = None if worker is None else given.checkpoints.state(self._name)  # until it is restored
        used = 0 if self._resumed is None else self._resumed["iterations"].get("used")
        self.batches_before = used if isinstance(used, int) else 0  # what is wrong with the state is told later
        layers.share()
        self.flat.collect()
        self._untrained: UntrainedParameters | None = None
        if worker is not None and self._script is not None:
            self._untrained = UntrainedParameters(self._model, parameters_of(*self._script.optimizers))
        self._excepthook = sys.excepthook
        sys.excepthook = self._uncaught
        self._heed_signals = left_to_rank_0()

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End all ranks after an exception outside the `with` block, so that the others do not wait for ever."""
        self._excepthook(kind, error, trace)
        sys.stderr.flush()
        end_all(self._comm, error)

    def __enter__(self) -> Self:
        refuse_within_another(self._comm)
        self._outer, _within.session = getattr(_within, "session", None), self
        return super().__enter__()

    def keeps_servers_from(self, comm: MPI.Intracomm) -> bool:
        """Return whether all ranks of this session, of which some serve until the others have left, are in `comm`."""
        return self._job.has_servers and comm.size >= self._comm.size

    def loss_here(self, loss: Loss | None) -> Loss | None:
        """Return the function that a job's loop computes on this rank with the model, if its loss is `loss`."""
        return loss

    def take_over(self) -> None:
        """Let the `step` of the script's optimizers be that of the session, until its end."""
        assert self._script is not None
        self._trained = {id(p) for p in self.flat.parameters}
        if self.worker is not None:
            self._checks = StepChecks(self._model, self._script.optimizers, self.flat)
            self._taken.callback(register_optimizer_step_pre_hook(self._before_step_of_any).remove)
            self._taken.callback(register_optimizer_step_post_hook(self._after_step_of_any).remove)
            self._weights_were_read()
            of_new = register_module_module_registration_hook(lambda module, _, inner: self._refuse_ddp(module, inner))
            self._taken.callback(of_new.remove)
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                of_called = register_module_forward_pre_hook(lambda module, _: self._refuse_ddp(module, module))
                self._taken.callback(of_called.remove)
        self._said_where_state_is = False
        for index, optimizer in enumerate(self._script.optimizers):
            self._taken.callback(replace_step(optimizer, self._step_of(index, optimizer)))
            if self.worker is None or self.batches_before:  # it steps later than a scheduler, or never
                optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # a GradScaler leaves it to `step`
            self._taken.callback(delattr, optimizer, "_step_supports_amp_scaling")
            if not self._job.paradigm.steps_on_workers:
                self._taken.callback(optimizer.register_state_dict_pre_hook(self._on_state_dict).remove)
                self._taken.callback(optimizer.register_load_state_dict_pre_hook(self._on_load_state_dict).remove)

    def _refuse_ddp(self, module: torch.nn.Module, inner: torch.nn.Module) -> None:
        """Raise JobError if a module averages the gradients of what is trained: the servers would never take part."""
        if isinstance(module, DistributedDataParallel) and dist.get_world_size() > 1:
            if any(id(p) in self._trained for p in inner.parameters()):
                raise JobError(IN_DDP)

    def _weights_were_read(self) -> None:
        """Note the weights of the servers, so that a script's change of them does not remain unnoticed."""
        if self._checks is not None and not self._job.paradigm.steps_on_workers:
            self._checks.weights_were_read()

    def _step_of(self, index: int, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        """Return the `step` of an optimizer of the script.

        It calls the hooks that are registered for the step, unless the optimizer's own step is made here and does.
        """

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._optimizer_step(index, closure)

        own = self._job.paradigm.steps_on_workers
        return partial(step if own else torch.optim.Optimizer.profile_hook_step(step), optimizer)

    def step(self, loss: torch.Tensor | float | None = None) -> bool:
        """Step with the script's only optimizer, or the job's; return False once the run is over."""
        if self._script is None or self._script.only is None:
            self._step(loss)
        else:
            self._refuse_outside()  # where that step is the optimizer's own
            if loss is not None:
                self.record(loss)
            self._script.optimizers[0].step()
        return not self.stopped

    @abstractmethod
    def _step(self, loss: torch.Tensor | float | None) -> None:
        """Use the gradient of the step under way."""

    def _is_of_script(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer steps on the parameters of the run, and the run itself does not make the step."""
        assert self._script is not None
        return not self._script.makes_step and any(id(p) in self._trained for p in parameters_of(optimizer))

    def _before_step_of_any(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_of_script(optimizer):
            self._session_stepped = False

    def _after_step_of_any(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise JobError after a step that has not called that of the session."""
        if self._is_of_script(optimizer) and not self._session_stepped:
            raise JobError(
                f"optimizer {type(optimizer).__name__}: must be given to connect, and its step be called after that: "
                "this step on the model's parameters was made on this worker alone"
            )

    def _on_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        if self.worker == 0 and self._n_steps and not self._said_where_state_is:
            self._said_where_state_is = True
            line = (
                "optimizer.state_dict: its state is on the servers until the end of the with block; save it after that"
            )
            print(f"hpcsync: {line}, or use checkpoint= of connect", file=sys.stderr, flush=True)

    def _on_load_state_dict(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        if not self._n_steps and same(optimizer.state_dict()["state"], state["state"]):
            return  # as Accelerate does to move it to a device
        raise RuntimeError("optimizer.load_state_dict: its state is on the servers by now; load it before connect")

    def _optimizer_step(self, index: int, closure: Callable[[], Any] | None = None) -> Any:
        """Make the step of an optimizer of the script; as its own `step`, it returns what the closure returns."""
        script, loss = self._script, None
        assert script is not None
        self._session_stepped = True
        if self.worker is not None and self._iterations.left_over:
            return None
        optimizer: Any = script.optimizers[index]
        if self._job.paradigm.separates_layers and hasattr(optimizer, "found_inf"):
            raise JobError(
                f"GradScaler: must be left out with paradigm.name = {shown(self._job.paradigm.name)}: after an "
                "overflow in one half of the model alone, the halves would have different scales; bfloat16 needs none"
            )
        if "momentum" in optimizer.defaults:
            for group in optimizer.param_groups:  # which a scheduler may have changed
                refuse_momentum(self._job.compression, group["momentum"] or 0)
        if closure is not None:
            loss = self._of_closure(closure)
        optimizer._opt_called = True  # what a scheduler looks for
        script.stepping = index
        script.skips = bool(getattr(optimizer, "found_inf", 0.0))  # set by a GradScaler
        if not script.skips:
            unscale(optimizer)
        if hasattr(optimizer, "grad_scale"):  # of a GradScaler, which removes both
            optimizer.grad_scale = optimizer.found_inf = None  # what has been dealt with
        try:
            self._step(None)
        finally:
            script.stepping, script.skips = script.only, False
        return loss

    @property
    def _n_optimizers(self) -> int:
        return 1 if self._script is None else len(self._script.optimizers)

    def _create_iterations(
        self,
        worker: int,
        now: Callable[[], float],
        allocated: Callable[[], tuple[int, int]] | None,
        while_padding: Callable[[], None] | None = None,
    ) -> Iterations:
        return Iterations(
            self._job,
            worker,
            now,
            lambda: self.stopped,
            self._leave,
            while_padding,
            allocated,
            unused=lambda: self._checks is not None and not self._checks.computed,
            n_optimizers=self._n_optimizers,
        )

    def _refuse_step(self) -> None:
        super()._refuse_step()
        if self._script is not None and self._script.stepping is None:
            raise RuntimeError("step: the session has several optimizers; call the step of each of them instead")

    def _look_at_step(self, loss: torch.Tensor | float | None, *, complete: bool = True) -> float:
        """Gather the gradient of the step under way, and note what is wrong with it if it is `complete`.

        Returns
        -------
        float
            Mean of the losses recorded for the step, `loss` included; NaN if there are none.
        """
        losses = self._take_losses(loss)
        mean_loss = sum(losses) / len(losses) if losses else math.nan
        self.flat.gather_gradient()
        self._n_steps += 1
        if complete:
            found = Problem.of_losses(mean_loss) if self._has_loss else Problem.NONE
            if self._checks is not None:
                stepping = 0 if self._script is None else self._script.stepping or 0
                found = self._checks.problem(losses if self._has_loss else [], self.flat.gradient, stepping)
            self._problems.add(Problem.SKIPPED if self._skips else found)
            self._has_skipped = self._has_skipped or self._skips
        return mean_loss

    def _take_problem(self) -> Problem:
        """Return the worst problem since the last call; that steps are skipped is one only if all are."""
        found, self._problems = self._problems, set()
        return max(found - {Problem.SKIPPED} or found, default=Problem.NONE)

    def _rates(self) -> tuple[float, Sequence[tuple[int, float]]]:
        """Return the learning rate of the script's optimizer, and the parameter groups with another rate than before.

        A job's rate is NaN.
        """
        if self._script is None:
            return math.nan, ()
        changed = self._script.changed_rates()
        step = self._n_steps, self._iterations.training_epochs
        self._last_rates = (step, self._script.told_rates) if self._may_compare_rates else None
        return self._script.lr, changed

    @property
    def _may_compare_rates(self) -> bool:
        """True if workers that have made equally many steps should have the same learning rates."""
        assert self._script is not None
        paradigm = self._job.paradigm
        one_rate = (paradigm.one_model or not paradigm.steps_on_workers) and not self._script.sets_rates
        return one_rate and self._n_optimizers == 1 and self.batches_before == 0 and not self._has_skipped

    @property
    def _skips(self) -> bool:
        """True if the step under way must change nothing."""
        return self._script is not None and self._script.skips

    # ---- what a checkpoint holds of every worker ----

    def _training_state(self) -> dict[str, Any]:
        return {
            "iterations": self._iterations.state(),
            "generators": rng_state.state(self.flat.weights.device),
            "buffers": dict(self._model.named_buffers()),
            "untrained": None if self._untrained is None else self._untrained.state(),
        }

    def _restore_training(self, state: Mapping[str, Any]) -> None:
        before_format_7 = {"used_by": [], "first_by": [], "training_epochs": 0}
        self._iterations.restore(before_format_7 | state["iterations"])
        rng_state.restore(state["generators"], self.flat.weights.device)
        restore_arrays(dict(self._model.named_buffers()), state["buffers"])
        if self._untrained is not None and "untrained" in state:  # not before format 7
            self._untrained.restore(state["untrained"])

    def _keep_for_continuing(self) -> None:
        """Let the loop continue with the generators as they are now, whatever it draws in epochs that are over.

        Likewise with what the script's optimizers change themselves, whatever its schedulers do in these epochs.
        """
        device, script = self.flat.weights.device, self._script
        generators, kept = rng_state.state(device), [] if script is None else script.kept_in_groups

        def restore() -> None:
            rng_state.restore(generators, device)
            if script is not None:
                script.kept_in_groups = kept

        self._iterations.when_continuing(restore)

    # ---- the end ----

    def _give_back(self) -> None:
        self._entered = False
        self._heed_signals()
        sys.excepthook = self._excepthook
        self._taken.close()

    @abstractmethod
    def _part(self) -> None:
        """Complete this rank's part of the run; rank 0's model then holds the final weights."""

    @abstractmethod
    def _report_failure(self) -> None:
        """Notify rank 0 that this rank failed."""

    @abstractmethod
    def _free(self) -> None:
        """Free all resources of the run; collective."""

    def _fail(self, error: BaseException) -> None:
        """Print the error and notify rank 0, before the job is ended."""
        error = of_user(self._job, error)
        # A file is missing where rank 0 has failed and deleted the unfinished checkpoint.
        # A signal may have been sent to all ranks.
        of_all = isinstance(error, WithoutBatch | WithinAnother | KeyboardInterrupt)
        if of_all or (isinstance(error, NotWritten) and error.errno == errno.ENOENT):
            launch_output.let_rank_0_report(self.rank, self._comm.size)
        if isinstance(error, RankFailed):
            if status_file.final_status(self._checkpoints.folder) is None:  # else rank 0 has said why it ended the run
                launch_output.print_at_once(f"hpcsync: rank {self.rank} cannot continue: {error}")
        elif isinstance(error, NotWritten | JobError | StateError):
            launch_output.print_at_once(f"hpcsync: rank {self.rank} failed: {error}{below(error)}")
        elif isinstance(error, KeyboardInterrupt):
            launch_output.print_at_once(f"hpcsync: rank {self.rank} was interrupted")
        else:
            trace = "".join(traceback.format_exception(error))
            launch_output.print_at_once(f"hpcsync: rank {self.rank} failed:\n{trace}")
        with contextlib.suppress(RankFailed, MPI.Exception):  # rank 0 itself may have died
            self._report_failure()
        end_s = time.monotonic() + FAREWELL_S
        while time.monotonic() < end_s:  # between hosts MPICH sends the report only during calls of this rank
            with contextlib.suppress(MPI.Exception):
                self._comm.Iprobe()
            time.sleep(0.01)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        _within.session = self._outer
        ends = self._ends_with(error)
        if ends or error is None or (isinstance(error, SystemExit) and not error.code):
            try:
                if self._checks is not None and self._checks.ended():
                    raise JobError(f"worker {self.worker}: {WRONG[Problem.MODEL_CHANGED]}")
                if self._checks is not None and self.worker == 0 and self._checks.weights_changed():
                    line = f"after the last step {WRONG[Problem.WEIGHTS_CHANGED]}; change them after the with block"
                    print(f"hpcsync: {line}", file=sys.stderr, flush=True)
                self._buffers.refuse_others()
                self._part()
                together = survivors(self._comm) if self._tolerant else self._comm
                complete = together.size == self._comm.size
                self._share_results(together)
                self._tell_of_workers(together)
                if complete:
                    self._free()
                    self._layers.free()
                self._conclude()
                self._give_back()
                if tolerable():
                    end_with(self._comm, together if self._tolerant else self._comm.Dup())
                return ends
            except BaseException as late:
                error = late
        self._fail(error)
        sys.stdout.flush()
        sys.stderr.flush()
        end_all(self._comm, error, is_interrupted=status_file.final_status(self._checkpoints.folder) == "interrupted")

    def _share_results(self, comm: MPI.Intracomm) -> None:
        """Give all ranks what others have at the end; collective over the survivors."""
        self._layers.share(comm)

    def _tell_of_workers(self, comm: MPI.Intracomm) -> None:
        """Say on rank 0 if workers' data or schedules differ that should be alike, and how many samples are lost."""
        if self._script is None:
            return
        read = {} if self.worker is None else self._iterations.data_read
        of_ranks = comm.gather((read, self._last_rates, self._unpushed))
        if of_ranks is None:
            return
        data, rates, unpushed = zip(*of_ranks, strict=True)
        lines = [different_data(data), different_rates(rates)]
        if n := sum(unpushed):
            steps = self._job.local_steps
            lines.append(f"{n} samples of the last steps are in no push: workers push every {steps} steps")
        for line in filter(None, lines):
            print(f"hpcsync: {line}", file=sys.stderr, flush=True)

    @property
    def _unpushed(self) -> int:
        """Samples of this worker's steps since its last push, if its loop has ended before the run."""
        return 0

    def _conclude(self) -> None:
        """Finish the outputs, after the last rank has finished."""
