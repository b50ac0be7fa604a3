"""What is said of steps with a problem: one line, once, for all workers."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, Script
from hpcsync.paradigms.records import Problem, PushInfo, StepInfo

NOT_FINITE = {
    Problem.LOSS_NOT_FINITE: "the loss is not finite",
    Problem.GRADIENT_NOT_FINITE: "the gradient is not finite",
}
WRONG = {
    Problem.NO_GRADIENT: "step without a gradient: no backward pass has computed one since the last step",
    Problem.MODEL_CHANGED: "the model or the optimizer has changed since connect: parameters were moved, cast, "
    "replaced or added",
}


UNEVEN = 0.05  # part of the steps by which workers may differ without a word


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
        line = describe(info, problem)
        if problem in WRONG or self._stops:
            raise JobError(line)
        if problem not in self._said:
            self._said.add(problem)
            print(f'hpcsync: {line}; stop.on_nan = "stop" would end the run', file=sys.stderr, flush=True)


def describe(info: PushInfo | StepInfo, problem: Problem) -> str:
    """Return the problem in words, with its worker, iteration and, on servers, version."""
    version = f", version {info.version_read}" if isinstance(info, PushInfo) else ""
    return f"worker {info.worker}, iteration {info.iteration}{version}: {({**NOT_FINITE, **WRONG})[problem]}"


def unequal_steps(job: Job, done: Sequence[int]) -> str:
    """Return a line if the loops of a script made no step, or different numbers of steps; "" if that is as it should.

    Different numbers are where the paradigm bounds no worker's lead, or the job itself lets workers leave or allocates
    their batches, and for differences of a step or 5 %, as of data that do not divide evenly.

    Parameters
    ----------
    done
        Iterations (pushes) of each worker.
    """
    expected = math.isinf(job.paradigm.lead_bound) or job.cluster.events or job.batches.policy != "equal"
    fewest, most = min(done), max(done)
    if isinstance(job.workload, Script) and most == 0:
        return "no worker has made a step: nothing was trained (was sync.step or optimizer.step never called?)"
    if not isinstance(job.workload, Script) or expected or most - fewest <= max(1, UNEVEN * most):
        return ""
    who = ", ".join(str(worker) for worker, n in enumerate(done) if n == fewest)
    workers = f"workers {who}" if "," in who else f"worker {who}"
    since = f"the updates from step {fewest + 1} on are without {who}"
    return f"{workers} made {fewest} steps, others up to {most}: {since}"
