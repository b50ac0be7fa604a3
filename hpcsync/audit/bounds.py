"""Guarantees of each paradigm, checked on recounted numbers and not by the paradigm's code.

With the staleness s of SSP, or s_U of DSSP, a worker starts an iteration at most s iterations ahead of the slowest
worker (start lead); right after its push it is at most s + 1 ahead (push lead).

With elastic averaging a push covers a whole period of iterations. Its staleness is that of the centre that the
worker met last: at least 1, the worker's own update, except for its first push.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcsync.audit.adsp import check_commits
from hpcsync.audit.ashl import Stages, check_stages
from hpcsync.audit.check import Check, check_all, check_rows
from hpcsync.audit.first_k import cancelled_is_dropped, check_first_k
from hpcsync.audit.outer_steps import check_outer_steps
from hpcsync.audit.phases import by_phase
from hpcsync.audit.server_recount import Recount
from hpcsync.audit.switch import check_switch
from hpcsync.paradigms.ashl import AshlOptions
from hpcsync.paradigms.dssp import DsspOptions
from hpcsync.paradigms.easgd import EasgdOptions
from hpcsync.paradigms.ssp import SspOptions
from hpcsync.trace.iteration_counts import NEVER
from hpcsync.trace.schema import Outcome


def check_bounds(recount: Recount) -> list[Check]:
    """Return the checks of the guarantees that the trace's paradigm gives, and those that hold for all."""
    return [*_guarantees(recount), cancelled_is_dropped(recount)]


def _guarantees(recount: Recount) -> list[Check]:
    paradigm = recount.job.paradigm
    return [check for name in paradigm.guarantees for check in GUARANTEES[name](recount, paradigm)]


def moves_are_as_often_and_as_far(recount: Recount, paradigm: EasgdOptions) -> Check:
    """Check that a push covers `period` iterations and that an update moves the centre by alpha."""
    pushes, grants, updates = recount.pushes, recount.grants[~recount.is_stop], recount.updates
    period, alpha = paradigm.period, paradigm.moving_rate(recount.n_workers)
    return check_all(
        f"{period} iterations per push, moving rate {alpha:.3g}",
        (
            pushes["local_steps"] != period,
            lambda i: f"push of seq {pushes['seq'][i]}: {pushes['local_steps'][i]} local steps",
        ),
        (
            grants["local_steps"] != period,
            lambda i: f"grant of seq {grants['seq'][i]}: {grants['local_steps'][i]} local steps",
        ),
        (updates["lr"] != alpha, lambda i: f"version {updates['version'][i]}: lr {updates['lr'][i]}"),
    )


def no_wait_before_the_fine_stage(recount: Recount, paradigm: AshlOptions) -> Check:
    """Check that ASHL blocks no worker before its fine stage."""
    return no_worker_is_blocked(recount, Stages(recount, paradigm).begins[1])


def leads_are_bounded(recount: Recount, bound_iters: float, required: bool = True) -> list[Check]:
    """Check the largest start lead and push lead.

    Parameters
    ----------
    bound_iters
        Largest start lead, in iterations. The largest push lead is one more.
    required
        False if the paradigm does not guarantee the bound. Both checks then pass and report the largest lead.
    """
    grants, pushes = recount.grants[~recount.is_stop], recount.pushes  # a stop grant starts nothing
    start_lead, push_lead = recount.grant_lead[~recount.is_stop], recount.push_lead
    largest = [int(lead.max(initial=0)) for lead in (start_lead, push_lead)]
    names = [f"start lead is at most {bound_iters}", f"push lead is at most {bound_iters + 1}"]
    if not required:
        return [
            Check(
                name.replace(" is at most", ", compared with"),
                True,
                len(lead),
                f"not bounded; largest {most}",
            )
            for name, lead, most in zip(names, (start_lead, push_lead), largest, strict=True)
        ]
    return [
        check_rows(
            names[0],
            start_lead > bound_iters,
            lambda i: (
                f"worker {grants['worker'][i]} starts iteration {grants['iteration'][i]} "
                f"{start_lead[i]} ahead of the slowest"
            ),
        ),
        check_rows(
            names[1],
            push_lead > bound_iters + 1,
            lambda i: (
                f"worker {pushes['worker'][i]} is {push_lead[i]} ahead after its push of iteration "
                f"{pushes['iteration'][i]}"
            ),
        ),
    ]


def slowest_is_never_blocked(recount: Recount) -> Check:
    """Check that a blocked worker leads the slowest from its push until the event that releases it."""
    last = len(recount.events) - 1
    release = np.append(recount.grant_event, last)[recount.push_grant]  # -1: no grant, blocked to the end
    release = np.minimum(release, recount.left_after(recount.pushes["worker"], recount.push_event))
    blocked = np.flatnonzero(release > recount.push_event)
    # The lead of a blocked worker only shrinks, so it is smallest just before the release.
    gap_iters = recount.push_iters[blocked] - recount.min_iters[release[blocked] - 1]
    pushes = recount.pushes[blocked]
    return check_rows(
        "the slowest worker is never blocked",
        gap_iters <= 0,
        lambda i: (
            f"worker {pushes['worker'][i]} is blocked after iteration {pushes['iteration'][i]} "
            f"although no worker is behind it"
        ),
    )


def updates_are_of_pushes_that_met(recount: Recount, paradigm: SspOptions | DsspOptions) -> Check:
    """Check that each update is of one push, or of the pushes of blocked workers and the next push that is not."""
    last = np.zeros(len(recount.applied), bool)
    ends = np.cumsum(recount.updates["n_contributions"]) - 1
    last[ends[ends < len(last)]] = True
    pushes, event = recount.pushes[recount.applied], recount.push_event[recount.applied]
    release = np.append(recount.grant_event, NEVER)[recount.push_grant[recount.applied]]
    waits = (release > event) & paradigm.merge
    # In an unfinished trace the grants of the last event may be missing.
    known = recount.finished | (event < len(recount.events) - 1)
    return check_rows(
        "an update is of one push" + " and of those that wait" * paradigm.merge,
        known & (last == waits),
        lambda i: (
            f"push of seq {pushes['seq'][i]}, whose worker {'waits' if waits[i] else 'continues'}, "
            f"{'completes an' if last[i] else 'does not complete its'} update"
        ),
    )


def no_worker_is_blocked(recount: Recount, until_seq: int = NEVER) -> Check:
    """Check that each push before `until_seq` is granted in the answer to itself."""
    answered = (recount.push_grant >= 0) & (recount.pushes["seq"] < until_seq)
    pushes = recount.pushes[answered]
    release = recount.grant_event[recount.push_grant[answered]]
    held_s = recount.grants["held_s"][recount.push_grant[answered]]
    return check_rows(
        "no worker is blocked" if until_seq == NEVER else "no worker is blocked before the fine stage",
        (release != recount.push_event[answered]) | (held_s > 0),
        lambda i: f"worker {pushes['worker'][i]} is blocked after iteration {pushes['iteration'][i]} for {held_s[i]} s",
    )


def no_staleness(recount: Recount) -> Check:
    """Check that no other update happens between a worker's read and the update with its contribution."""
    pushes = recount.pushes[recount.pushes["outcome"] == Outcome.APPLIED]
    own = 1 if recount.grants_first else 0  # the update of the previous round, made after its grants
    return check_rows(
        f"staleness is {own}" + (", 0 in a first iteration" if own else ""),
        pushes["staleness"] != np.where((recount.push_permit < 0) | recount.begins_anew, 0, own)[recount.applied],
        lambda i: (
            f"worker {pushes['worker'][i]}, iteration {pushes['iteration'][i]}: staleness {pushes['staleness'][i]}"
        ),
    )


def rounds_are_complete(recount: Recount) -> Check:
    """Check that update k takes the k-th contribution of every active worker.

    A worker that joins counts as having made as many as the others.
    """
    n_updates = len(recount.complete_seq)
    applied = recount.pushes[recount.applied][recount.applied_version <= n_updates]
    version = recount.applied_version[recount.applied_version <= n_updates]
    missing = np.ones((n_updates, recount.n_workers), bool)
    missing[version - 1, applied["worker"]] = False
    last = recount.event_at(recount.complete_seq + 1)
    made, updated_s = recount.update_event, recount.updates["now_s"][:n_updates]
    made_s = np.append(recount.events["now_s"], np.nan)[np.minimum(made, len(recount.events))]
    update, worker = np.nonzero(missing & ~((made > last) & (made_s == updated_s))[:, None])
    active = recount.is_active(worker, last[update])
    update, worker = update[active], worker[active]
    iters = recount.push_iters[recount.applied][recount.applied_version <= n_updates]
    return check_all(
        "rounds are complete",
        (
            iters != version,
            lambda i: f"update {version[i]} takes iteration {applied['iteration'][i]} of worker {applied['worker'][i]}",
        ),
        (np.ones(len(update), bool), lambda i: f"update {update[i] + 1} lacks worker {worker[i]}, which had not left"),
    )


# Guarantees that a paradigm may name, as functions of the recount and of the options that state their extent.
GUARANTEES: dict[str, Callable[[Recount, Any], list[Check]]] = {
    "no-staleness": lambda recount, _: [no_staleness(recount)],
    "complete-rounds": lambda recount, _: [rounds_are_complete(recount)],
    "slowest-runs": lambda recount, _: [slowest_is_never_blocked(recount)],
    "nobody-waits": lambda recount, _: [no_worker_is_blocked(recount)],
    "merged": lambda recount, options: [updates_are_of_pushes_that_met(recount, options)],
    "lead": lambda recount, options: leads_are_bounded(
        recount, options.lead_aim, required=options.lead_aim == options.lead_bound
    ),
    "switch": check_switch,
    "phases": lambda recount, _: by_phase(recount, _guarantees),
    "first-k": check_first_k,
    "moves": lambda recount, options: [moves_are_as_often_and_as_far(recount, options)],
    "stages": lambda recount, options: [
        *check_stages(recount, options),
        no_wait_before_the_fine_stage(recount, options),
    ],
    "commits": check_commits,
    "outer-steps": check_outer_steps,
}
