"""Checks that a run has trained: some update, or worker's own step, had a gradient of finite numbers, not all zero."""

from __future__ import annotations

import numpy as np

from hpcsync.audit.check import Check, check_rows
from hpcsync.config.job import Script
from hpcsync.paradigms.records import Problem
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Outcome, Rows

NAMES = {problem.value: problem.name.lower().replace("_", " ") for problem in Problem}


def check_training(trace: Trace) -> list[Check]:
    """Return the checks, none for a trace that has no contribution yet.

    A finished run of a script must have one. Without servers a worker's step is its own contribution, whatever is
    exchanged afterwards.
    """
    served = trace.job.has_servers
    rows = trace.tables["pushes" if served else "exchanges"]
    used = rows["outcome"] == Outcome.APPLIED if served else rows["batch_size"] > 0
    problems = rows["problem"][used]
    if not len(problems) and not (trace.finished and isinstance(trace.job.workload, Script)):
        return []
    codes, counts = np.unique(problems[problems != Problem.NONE], return_counts=True)
    kinds = (f"{NAMES.get(code, f'problem {code}')} {n:,}" for code, n in zip(codes.tolist(), counts, strict=True))
    found = f"of {len(problems):,} contributions: {', '.join(kinds)}" if len(codes) else ""
    if not len(problems):
        found = "there is none"
    known = set(codes.tolist()) <= NAMES.keys()
    finite = Check("some contribution is finite", known and len(problems) > counts.sum(), len(problems), found)
    return [finite, *gradients_are_not_all_zero(trace, rows[used]), losses_have_their_problems(trace, rows)]


def gradients_are_not_all_zero(trace: Trace, rows: Rows) -> list[Check]:
    """Check that some gradient is not zero, which none is if the loss does not depend on what is trained.

    There is no check if no norm is known, or if the run has not finished. A gradient that is not finite has an infinite
    norm.
    """
    norms = rows["gradient_sq"][~np.isnan(rows["gradient_sq"])]
    if not len(norms) or not trace.finished:
        return []
    some = bool((norms > 0).any())
    detail = "" if some else "all are zero: does the loss depend on the model's parameters?"
    return [Check("some gradient is not zero", some, len(norms), detail)]


def losses_have_their_problems(trace: Trace, rows: Rows) -> Check:
    """Check that a loss is finite exactly where no problem says that it is not.

    A script may record none, a cancelled iteration may have none, and a workload without arithmetic or a convolution
    worker has none, nor have rows that are no iterations.
    """
    finite, said = np.isfinite(rows["loss"]), rows["problem"] == Problem.LOSS_NOT_FINITE
    always = np.isin(rows["worker"], trace.job.with_loss) & (not isinstance(trace.job.workload, Script))
    whole = rows["share"] == 1 if trace.job.has_servers else rows["batch_size"] > 0
    lost = ~finite & ~said & whole & always
    return check_rows(
        "losses are finite, or have a problem",
        (finite & said) | lost,
        lambda i: (
            f"worker {rows['worker'][i]}, iteration {rows['iteration'][i]}: loss {rows['loss'][i]}, problem "
            f"{rows['problem'][i]}"
        ),
    )
