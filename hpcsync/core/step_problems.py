"""What may be wrong with a step (no gradient, numbers that are not finite, another model), and what is said of it."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from itertools import chain

import torch

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, Script
from hpcsync.paradigms.records import Problem, PushInfo, StepInfo
from hpcsync.training.flat_model import FlatModel, squared_norm
from hpcsync.training.optimizer_groups import parameters_of

NOT_FINITE = {
    Problem.LOSS_NOT_FINITE: "the loss is not finite",
    Problem.GRADIENT_NOT_FINITE: "the gradient is not finite",
}
WRONG = {
    Problem.NO_GRADIENT: "step without a gradient: no backward pass has computed one since the last step; those "
    "that are computed otherwise must pass through torch.autograd.backward(parameters, gradients)",
    Problem.MODEL_CHANGED: "the model or the optimizer has changed since connect: parameters were moved, cast, "
    "replaced or added",
    Problem.WEIGHTS_CHANGED: "the script has changed the values of parameters, such as by clamping or loading them: "
    "the servers' weights replace them",
}
LOOKED_AT = 16  # elements of a parameter, at least, by which changes by the script are noticed
UNEVEN = 0.05  # part of the steps by which workers may differ without a word


class StepChecks:
    """Checks of every step of a script.

    Parameters
    ----------
    model
        Its model.
    optimizers
        Its optimizers.
    flat
        Flat view of the parameters that are trained; None for a process that trains alone.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], flat: FlatModel | None = None
    ) -> None:
        self._model, self._optimizers, self._flat = model, optimizers, flat
        self._connected = self._parameters()
        self._in_groups = self._groups()
        self._n_checked = 0
        self._n_read = 0
        self._read: tuple[torch.Tensor, torch.Tensor] | None = None  # places in `weights`, and what servers have sent
        self._to_step: set[int] = set()  # optimizers that have not stepped since a gradient was computed
        trained = [*parameters_of(*optimizers)]
        require = [p.requires_grad for p in trained]
        for parameter in trained:  # frozen ones may be trained later
            parameter.requires_grad_(True)
        self._hook = torch.autograd.graph.register_multi_grad_hook(trained, self._on_gradient, mode="any")
        for parameter, required in zip(trained, require, strict=True):
            parameter.requires_grad_(required)

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        self._to_step.update(range(len(self._optimizers)))

    @property
    def computed(self) -> bool:
        """True if a gradient has been computed with which an optimizer has not stepped."""
        return bool(self._to_step)

    def weights_were_read(self) -> None:
        """Note some elements of each parameter, which servers have sent, in each step others.

        On a GPU, which would have to be waited for, it is done in steps 1, 2, 3, 5, 9, ...
        """
        assert self._flat is not None
        n, self._n_read, self._read = self._n_read, self._n_read + 1, None
        if not self._flat.weights.is_cuda or is_rare(n):
            begin, size, within = self._spread_out
            places = (within + n) % size + begin
            self._read = places, self._flat.weights[places]

    def weights_changed(self) -> bool:
        """Return whether the script has changed what servers have sent, by more than the rounding of a move and back.

        As sharpness-aware minimisation makes, which may move tiny weights far: by up to about 1.
        """
        if self._read is None:
            return False
        assert self._flat is not None
        self._flat.collect()  # parameters of another type than the vector are copies
        places, read = self._read
        change = (self._flat.weights[places] - read).abs()
        return bool((change > self._rounding * (1.0 + read.abs())).any())

    @functools.cached_property
    def _rounding(self) -> float:
        """Relative rounding error of the narrowest parameters."""
        assert self._flat is not None
        return max(torch.finfo(parameter.dtype).eps for parameter in self._flat.parameters)

    @functools.cached_property
    def _spread_out(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Places of some elements: where the parameter begins in `weights`, its size, and the place within it."""
        assert self._flat is not None
        places = [
            (span.start, parameter.numel(), within)
            for span, parameter in zip(self._flat.spans, self._flat.parameters, strict=True)
            for within in range(0, parameter.numel(), max(1, parameter.numel() // LOOKED_AT))
        ]
        begin, size, within = torch.tensor(places, device=self._flat.weights.device).T
        return begin, size, within

    def problem(self, losses: Sequence[float], gradient: torch.Tensor, stepping: int = 0) -> Problem:
        """Return what is wrong with the step under way.

        Parameters
        ----------
        losses
            Losses recorded for it.
        gradient
            Its flat gradient, which is looked at only if there are none.
        stepping
            Index of its optimizer.
        """
        computed = stepping in self._to_step
        self._to_step.discard(stepping)
        if self.model_changed() or (not computed and self._parameters() != self._connected):
            return Problem.MODEL_CHANGED
        if self.weights_changed():
            return Problem.WEIGHTS_CHANGED
        self._read = None
        if not computed:
            return Problem.NO_GRADIENT
        if losses:
            return Problem.of_losses(*losses)
        finite = math.isfinite(squared_norm(gradient)) or bool(torch.isfinite(gradient).all())  # a tenth of the time
        return Problem.NONE if finite else Problem.GRADIENT_NOT_FINITE

    def model_changed(self) -> bool:
        """Return True if the model has other parameters than at the begin, or they have been moved or cast.

        Whether it has other parameters takes a pass over all of its modules, in step 1, 2, 3, 5, 9, ... and at the end.
        """
        n, self._n_checked = self._n_checked, self._n_checked + 1
        if self._groups() != self._in_groups or (is_rare(n) and self._parameters() != self._connected):
            return True
        return self._flat is not None and self._flat.is_detached()

    def ended(self) -> bool:
        """Remove the hook; return True if the model has changed."""
        self._hook.remove()
        self._n_checked = 0
        return self.model_changed()

    def _parameters(self) -> list[int]:
        return [id(p) for p in self._model.parameters()]

    def _groups(self) -> list[int]:
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers)
        return [len(group["params"]) for group in groups]


def is_rare(n_before: int) -> bool:
    """Return whether a step after so many others gets a check that takes long: in steps 1, 2, 3, 5, 9, 17, ..."""
    return n_before & (n_before - 1) == 0


class ProblemReport:
    """Lines about problems, each kind once.

    Parameters
    ----------
    on_nan
        "stop" to end the run when a loss or a gradient is not finite, "warn" to go on.
    """

    def __init__(self, on_nan: str) -> None:
        self._stops = on_nan == "stop"
        self._said: set[Problem] = set()

    def see(self, info: PushInfo | StepInfo) -> None:
        """Look at a step.

        Raises
        ------
        JobError
            If the run must end.
        """
        if info.problem <= Problem.SKIPPED:
            return
        problem = Problem(info.problem)
        version = f", version {info.version_read}" if isinstance(info, PushInfo) else ""  # on servers
        what = {**NOT_FINITE, **WRONG}[problem]
        line = f"worker {info.worker}, iteration {info.iteration}{version}: {what}"
        if problem in WRONG or self._stops:
            raise JobError(line)
        if problem not in self._said:
            self._said.add(problem)
            print(f'hpcsync: {line}; stop.on_nan = "stop" would end the run', file=sys.stderr, flush=True)


def unequal_steps(job: Job, done: Sequence[int]) -> str:
    """Return a line if the loops of a script made no step, or different numbers of steps; "" if that is as it should.

    Different numbers are where the paradigm bounds no worker's lead, or the job itself lets workers leave or allocates
    their batches, and for differences of a step or 5 %, as of data that do not divide evenly.

    Parameters
    ----------
    job
        The job.
    done
        Iterations (pushes) of each worker.
    """
    expected = math.isinf(job.paradigm.lead_bound) or job.cluster.events or job.batches.policy != "equal"
    fewest, most = min(done), max(done)
    n = job.local_steps
    if isinstance(job.workload, Script) and most == 0 and n > 1:
        return f"no worker has made a step that was pushed: nothing was trained (a push follows every {n} steps)"
    if isinstance(job.workload, Script) and most == 0:
        return "no worker has made a step: nothing was trained (was sync.step or optimizer.step never called?)"
    if not isinstance(job.workload, Script) or expected or most - fewest <= max(1, UNEVEN * most):
        return ""
    who = ", ".join(str(worker) for worker, n in enumerate(done) if n == fewest)
    workers = f"workers {who}" if "," in who else f"worker {who}"
    since = f"the updates from step {fewest + 1} on are without {who}"
    return f"{workers} made {fewest} steps, others up to {most}: {since}"
