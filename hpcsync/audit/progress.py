"""Checks of a run's course, recounted from job and rows: learning rates, times, evaluations and the end.

Only the learning rate comes from the product's own code; it follows from the job.
"""

from __future__ import annotations

import numpy as np

from hpcsync.audit.check import SAME_TIME_S, Check, Part, check_all, check_rows, describe_columns
from hpcsync.audit.clock_errors import DRIFT
from hpcsync.audit.server_recount import Recount
from hpcsync.config.job import Script
from hpcsync.config.workloads import Function, Linear, Timing
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Change, Rows
from hpcsync.training.lr_schedule import learning_rate

TIMED = ("pushes", "grants", "updates", "exchanges", "membership")
RATE = 1e-12  # largest relative difference between equal rates


def rates_are_of_the_schedule(recount: Recount) -> Check:
    """Check the learning rate of each update, with `async_lr_scale`.

    It follows from the samples and updates before it, and its number of contributions, which count as one where pushes
    that met are summed. A script's own rates are the
    mean of those that its contributions state; the job's schedule is a factor of it.
    """
    job, updates = recount.job, recount.updates
    count = updates["n_contributions"].astype(np.int64)
    if job.paradigm.steps_on_workers:
        expected = np.full(len(updates), job.paradigm.moving_rate(job.cluster.workers))
    else:
        rate, before = learning_rate(job), np.append(0, updates["samples"])[:-1].tolist()
        clocks = zip(before, (np.ones_like(count) if job.paradigm.merges else count).tolist(), strict=True)
        expected = np.array([rate(samples, version, n) for version, (samples, n) in enumerate(clocks)])
        if isinstance(job.workload, Script):
            expected = expected[: len(recount.complete_seq)] * _own_rates(recount, count[: len(recount.complete_seq)])
    lr = updates["lr"][: len(expected)]
    return check_rows(
        "learning rates follow the schedule",
        ~np.isclose(lr, expected, rtol=RATE, atol=0.0),
        lambda i: f"version {i + 1} has learning rate {lr[i]}, the schedule gives {expected[i]}",
    )


def _own_rates(recount: Recount, count: Rows) -> Rows:
    """Return the mean rate that the contributions to each update state; 1 where the first one states none."""
    stated = recount.pushes["lr"][recount.applied]
    first = np.cumsum(count) - count
    return np.where(np.isnan(stated[first]), 1.0, np.add.reduceat(stated, first) / count) if len(count) else count


def times_add_up(recount: Recount) -> Check:
    """Check the times of each iteration against each other and against its grant.

    Between `begin_s` and `end_s` a worker loads and computes, and nothing else. From one iteration to the next it
    encodes and pushes, waits for the grant and reads the weights. It begins to read after the grant; the error of its
    clock is in /clocks. It waits at least as long as it is blocked, and not since before the run. Its push is handled
    after it has been sent.
    """
    pushes, error_s = recount.pushes, recount.clock_error_s + SAME_TIME_S
    took_s = pushes["end_s"] - pushes["begin_s"]
    spent_s = pushes["load_s"] + pushes["compute_s"]
    order = np.lexsort((pushes["seq"], pushes["worker"]))
    own = pushes[order]
    follows = (own["worker"][1:] == own["worker"][:-1]) & ~recount.begins_anew[order][1:] & ~_resumed(recount, order)
    before, after = own[:-1][follows], own[1:][follows]
    idle_s = after["begin_s"] - before["end_s"]
    busy_s = before["encode_s"] + before["comm_s"] - before["pull_s"] + after["wait_s"] + after["pull_s"]
    granted_s = np.append(recount.grants["now_s"], -np.inf)[recount.push_permit]  # row -1, no grant, is -inf
    read_s = pushes["begin_s"] - pushes["pull_s"]
    early_s = granted_s - read_s
    sent_s = pushes["end_s"] + pushes["encode_s"] + pushes["comm_s"] - pushes["pull_s"]
    asked_s = np.where(recount.events["is_push"], recount.events["now_s"], np.inf)  # not by joins
    held_s = recount.grants["now_s"] - np.append(asked_s, np.inf)[recount.answered]
    held_s = np.append(held_s, 0.0)[recount.push_permit][order][1:][follows]
    return check_all(
        "times of an iteration add up",
        (
            ~(np.abs(took_s - spent_s) < SAME_TIME_S),
            lambda i: (
                f"worker {pushes['worker'][i]}, iteration {pushes['iteration'][i]}: from begin_s to end_s "
                f"{took_s[i]:.6f} s, load_s and compute_s {spent_s[i]:.6f} s"
            ),
        ),
        (
            ~(busy_s <= idle_s + SAME_TIME_S),
            lambda i: (
                f"worker {after['worker'][i]}, iteration {after['iteration'][i]} begins {idle_s[i]:.6f} s after the "
                f"one before, but pushing, waiting and reading took {busy_s[i]:.6f} s"
            ),
        ),
        (
            ~(early_s <= error_s),
            lambda i: (
                f"worker {pushes['worker'][i]}, iteration {pushes['iteration'][i]}: reads {early_s[i]:.6f} s before "
                "its grant"
            ),
        ),
        (
            ~(pushes["wait_s"] <= read_s + error_s),
            lambda i: (
                f"worker {pushes['worker'][i]}, iteration {pushes['iteration'][i]}: waited {pushes['wait_s'][i]:.6f} s "
                f"until {read_s[i]:.6f} s"
            ),
        ),
        (
            ~(sent_s <= pushes["now_s"] + error_s),
            lambda i: (
                f"worker {pushes['worker'][i]}, iteration {pushes['iteration'][i]}: pushed until {sent_s[i]:.6f} s, "
                f"but is handled at {pushes['now_s'][i]:.6f} s"
            ),
        ),
        (
            ~(after["wait_s"] >= held_s * (1 - DRIFT) - SAME_TIME_S),
            lambda i: (
                f"worker {after['worker'][i]}, iteration {after['iteration'][i]}: waited {after['wait_s'][i]:.6f} s, "
                f"but was blocked for {held_s[i]:.6f} s"
            ),
        ),
    )


def _resumed(recount: Recount, order: Rows) -> Rows:
    """Return between which pushes of the same worker the run resumed, bool of shape (n_pushes - 1,).

    A push that was held back for the checkpoint was granted and measured before the resume, and handled after it.

    Parameters
    ----------
    order
        Sorts the pushes by worker.
    """
    starts_seq = recount.trace.tables["starts"]["seq"]
    granted_seq = np.append(recount.grants["seq"], 1)[recount.push_permit]  # row -1, no grant, is in the first start
    handled = np.searchsorted(starts_seq, recount.pushes["seq"])[order]
    held_back = np.searchsorted(starts_seq, granted_seq)[order] != handled
    return (handled[1:] != handled[:-1]) | held_back[:-1]


def evaluations_come_when_due(trace: Trace) -> Check:
    """Check that evaluations follow each other as `evaluation.every_samples` says.

    Between two evaluations lies a multiple of it, except before the one at the end of the run, which every workload of
    hpcsync has that computes losses. A due evaluation is skipped while another one is running. In a simulation with
    servers where evaluations take no time, each is made, of the last version where one event makes several.
    A resumed run may have another `every_samples` than before, and continues the schedule of its checkpoint: its
    evaluations are checked from the second one after the last resume. An evaluation that reaches the job's target ends
    the run, after which only that of the last version follows. A version is evaluated before the next one is made.
    A paradigm may ask for further evaluations, which the checks of its guarantees compare with its needs.
    Every workload of hpcsync that classifies has an accuracy, and least squares has none.
    """
    job, rows = trace.job, trace.tables["evaluations"]
    every = job.evaluation.every_samples
    samples = np.append(0, trace.tables["updates"]["samples"])
    last = len(samples) - 1
    n_resumed = version_at_last_start(trace)
    during = rows[:-1]  # the last one may be that at the end
    due = is_scheduled(during["samples"], every) | job.paradigm.requests_evaluations
    if n_resumed is not None:
        due[: np.count_nonzero(during["version"] <= n_resumed) + 1] = True
    reached = np.flatnonzero(samples[1:] // every > samples[:-1] // every) + 1 if every else np.zeros(0, int)
    each = trace.attributes.get("engine") == "simulator" and job.has_servers and job.evaluation.seconds is None
    missing = reached[~_is_evaluated(trace, reached)] if each and len(rows) else np.zeros(0, int)
    missing = missing if trace.finished else missing[missing < rows["version"].max(initial=0)]
    share = rows["accuracy"]
    impossible = ~np.isnan(share) & ~((share >= 0) & (share <= 1))
    if not isinstance(job.workload, Function | Script | Timing):
        impossible |= np.isnan(share) != isinstance(job.workload, Linear)
    # NaN may be followed by numbers: the user's evaluation may return anything, a worker that joins brings its weights.
    joins = trace.tables["membership"]["change"] == Change.JOINED
    may_recover = isinstance(job.workload, Function | Script) or bool(joins.any())
    until_s = _next_update_s(trace, rows["version"])
    reaches = np.array([job.stop.satisfied(*row) for row in during[["loss", "accuracy"]].tolist()], bool)
    reaches[: 0 if n_resumed is None else np.count_nonzero(rows["now_s"] <= trace.tables["starts"]["now_s"][-1])] = (
        False
    )
    return check_all(
        "evaluations come when they are due",
        (
            ~due,
            lambda i: f"/evaluations row {i}, of {during['samples'][i]} samples, is not due: every {every} samples",
        ),
        (np.ones(len(missing), bool), lambda i: f"version {missing[i]} was due, and has no evaluation"),
        (
            rows["version"][-1:] != last if trace.finished else np.zeros(0, bool),
            lambda _: f"the last evaluation is of version {rows['version'][-1]}, not of {last}, the last one",
        ),
        (
            np.array([trace.finished and not len(rows) and not isinstance(job.workload, Function | Script | Timing)]),
            lambda _: "/evaluations has no row, but the last version is always evaluated",
        ),
        (impossible, describe_columns("/evaluations", rows, "version", "accuracy")),
        (_is_lost(rows["loss"]) & (not may_recover), describe_columns("/evaluations", rows, "version", "loss")),
        (
            ~(rows["now_s"] <= until_s),
            lambda i: (
                f"/evaluations row {i}, of version {rows['version'][i]}, is at {rows['now_s'][i]} s, the next update "
                f"or the end at {until_s[i]} s"
            ),
        ),
        (
            reaches[:-1],
            lambda i: f"/evaluations row {i} reaches the target, but {len(rows) - i - 1} evaluations follow",
        ),
    )


def is_scheduled(samples: Rows, every: int) -> Rows:
    """Return which evaluations after so many samples have a multiple of `every` since the one before; 0: none has."""
    if not every:
        return np.zeros(len(samples), bool)
    return samples // every > np.append(0, samples)[:-1] // every


def evaluations_agree(evaluations: Rows, updates: Rows, made_s: Rows) -> Part:
    """Return the property that each evaluation has the samples of its version and does not come before it was made.

    `made_s` has the time of each version from 1 on.
    """
    known = (evaluations["version"] >= 0) & (evaluations["version"] <= len(updates))
    at = np.where(known, evaluations["version"], 0)
    samples = np.append(0, updates["samples"])[at]
    least_s = np.append(-np.inf, made_s)[at]
    return (
        ~known | (evaluations["samples"] != samples) | (evaluations["now_s"] < least_s),
        lambda i: (
            f"/evaluations row {i} (version {evaluations['version'][i]}, {evaluations['samples'][i]} samples, "
            f"{evaluations['now_s'][i]} s) does not match the update: {samples[i]} samples, {least_s[i]} s"
        ),
    )


def _is_evaluated(trace: Trace, version: Rows) -> Rows:
    """Return which versions are evaluated, or, where an event may make several, a later one of the same time."""
    evaluated, until = np.sort(trace.tables["evaluations"]["version"]), version
    if trace.job.paradigm.applies_at_release:
        updated_s = trace.tables["updates"]["now_s"]
        until = np.searchsorted(updated_s, updated_s[version - 1], side="right")
    return np.searchsorted(evaluated, version) < np.searchsorted(evaluated, until, side="right")


def _is_lost(losses: Rows) -> Rows:
    """Return which losses are NaN before one that is a number: weights that are not finite do not become so again."""
    known = np.flatnonzero(~np.isnan(losses))
    lost = np.isnan(losses)
    lost[known[-1] if len(known) else 0 :] = False
    return lost


def _next_update_s(trace: Trace, version: Rows) -> Rows:
    """Return the time until which each version was the current one: of the next update, or of the last row.

    Workers in step with weights of their own count the steps of a whole round when they publish, but some may have
    recorded the next one by then: the version is passed when rank 0's worker, which publishes first, exchanges again.
    In an unfinished trace the rows at the end may be missing, and the time is inf.
    """
    job, tables = trace.job, trace.tables
    updated_s = tables["updates"]["now_s"]
    last_s = max(float(rows["now_s"].max(initial=0.0)) for rows in map(tables.__getitem__, TIMED))
    later = 0
    if not job.has_servers and not job.paradigm.one_model and job.paradigm.lead_bound < np.inf:
        later = trace.n_workers * job.paradigm.exchange_every
    next_s = np.append(updated_s, last_s if trace.finished else np.inf)
    return next_s[np.clip(version + later, 0, len(updated_s))]


def version_at_last_start(trace: Trace) -> int | None:
    """Return the version with which a run last resumed; None if it never resumed."""
    starts = trace.tables["starts"]
    if len(starts) < 2:
        return None
    return int(np.count_nonzero(trace.tables["updates"]["now_s"] <= starts["now_s"][-1]))


def the_run_ends_by_its_rule(recount: Recount) -> Check:
    """Check that a finished run ended because of the job's stopping rule, or because all workers had left.

    There is no update after the one that reaches a limit. A resumed run may have another limit than before: only the
    updates after the last resume are compared with it.
    """
    stop, updates, rows = recount.job.stop, recount.updates, recount.evaluations
    n_updates, n_samples = len(updates), int(updates["samples"][-1]) if len(updates) else 0
    course = zip(*(updates[key].tolist() for key in ("samples", "version", "now_s")), strict=True)
    reached = np.array([stop.reached(samples=s, updates=version, seconds=now_s) for s, version, now_s in course], bool)
    too_many = reached[:-1].copy()
    too_many[: version_at_last_start(recount.trace) or 0] = False
    on_target = any(stop.satisfied(*row) for row in zip(rows["loss"].tolist(), rows["accuracy"].tolist(), strict=True))
    last_s = max(float(table["now_s"].max(initial=0.0)) for table in (recount.grants, recount.events))
    all_left = not recount.is_stop.any() and not len(recount.active(len(recount.events) - 1))
    over = reached.any() or on_target or stop.reached(seconds=last_s) or all_left
    rule = ", ".join(f"{key} = {value:g}" for key, value in stop.conditions.items()) or "when all workers have left"
    return check_all(
        "the stopping rule ended the run",
        (too_many, lambda i: f"version {i + 1} ends the run, but {n_updates} were made"),
        (
            np.array([recount.finished and not over]),
            lambda _: f"it ended after {n_updates:,} updates and {n_samples:,} samples; its job ends it by {rule}",
        ),
    )
