"""Invariants of every trace with servers, recomputed from the tables and never from a paradigm's code.

Each function is one check. The counts of an unfinished run end at the first missing row (see `server_recount`). Three
kinds of rows may be missing there, at the end only: rows of contributions that were pending, grants of the answer
that was in progress, and contributions of the update that was being recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpcsync.audit.batch_decisions import possible
from hpcsync.audit.check import DURATIONS, SAME_TIME_S, Check, Part, check_all, check_rows, describe_columns, repeated
from hpcsync.audit.progress import (
    evaluations_agree,
    evaluations_come_when_due,
    rates_are_of_the_schedule,
    the_run_ends_by_its_rule,
    times_add_up,
)
from hpcsync.audit.server_recount import NUMBERED, Recount, last_of, other_steps
from hpcsync.audit.training import check_training
from hpcsync.config.job import Script
from hpcsync.paradigms.records import UNTIL
from hpcsync.trace.iteration_counts import NEVER, running_count
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Change, Outcome, Release, Rows

OUTCOME_CODES, CHANGE_CODES = list(Outcome), list(Change)


def check_invariants(recount: Recount) -> list[Check]:
    """Return all checks of this module but the first, `values_are_possible`, which must have passed."""
    trace = recount.trace
    return [*(check(recount) for check in INVARIANTS), evaluations_come_when_due(trace), *check_training(trace)]


def values_are_possible(trace: Trace) -> Check:
    """Check that workers exist, codes are known, durations are not negative and batches are not empty."""
    tables = trace.tables
    pushes, grants, updates, membership = (tables[t] for t in ("pushes", "grants", "updates", "membership"))
    parts: list[Part] = [_worker_and_time(tables[table], table, trace.n_workers) for table in NUMBERED]
    counted = (pushes["iteration"] >= 1) & (pushes["version_read"] >= 0)
    counted &= (pushes["batch_size"] >= 1) & (pushes["local_steps"] >= 1) & (pushes["wire_bytes"] >= 0)
    counted &= np.isin(pushes["outcome"], OUTCOME_CODES)
    numbers = ("iteration", "version_read", "batch_size", "local_steps", "wire_bytes", "outcome")
    parts.append((~counted, describe_columns("/pushes", pushes, *numbers)))
    timed = pushes["begin_s"] <= pushes["end_s"]
    for name in DURATIONS:
        timed &= pushes[name] >= 0
    parts.append((~timed, describe_columns("/pushes", pushes, "begin_s", "end_s", *DURATIONS)))
    weighed = (pushes["share"] > 0) & (pushes["share"] <= 1) & (pushes["weight"] >= 0) & np.isfinite(pushes["weight"])
    parts.append((~weighed, describe_columns("/pushes", pushes, "share", "weight")))
    predicted = ("predicted_fixed_s", "predicted_sample_s")
    parts.append((~possible(pushes, *predicted), describe_columns("/pushes", pushes, *predicted)))
    # A worker that joins late may already know its batch size, which is then 0 in the grant.
    needs = (grants["local_steps"] != 0) & ((grants["iteration"] > 1) | (grants["batch_size"] > 0))
    sized = (grants["batch_size"] >= 0) & ((grants["batch_size"] == 0) == ~needs)
    sized &= grants["first_sample"] >= -1
    parts.append((~sized, describe_columns("/grants", grants, "batch_size", "local_steps", "first_sample")))
    made = (updates["n_contributions"] >= 1) & np.isfinite(updates["now_s"])
    parts.append((~made, describe_columns("/updates", updates, "version", "n_contributions", "now_s")))
    unknown = ~np.isin(membership["change"], CHANGE_CODES)
    parts.append((unknown, describe_columns("/membership", membership, "worker", "change")))
    return check_all("values are valid", *parts)


def _worker_and_time(rows: Rows, table: str, n_workers: int) -> Part:
    right = (rows["worker"] >= 0) & (rows["worker"] < n_workers) & np.isfinite(rows["now_s"])
    return ~right, describe_columns(f"/{table}", rows, "seq", "worker", "now_s")


def seq_is_unbroken(recount: Recount) -> Check:
    """Check that `seq` numbers the rows of four tables, each number once and, in a finished trace, none missing.

    In an unfinished trace the first missing number is that of a contribution whose outcome was open at the end. It can
    be followed only by decisions in progress, departures, joins and their answers; once the run is stopping, by stop
    grants and the pushes that they answer, which are dropped; and, where grants precede updates, by the grants of the
    last answer. In the k family some workers may continue, but only with the version from before: there is no update.
    So may workers that a departure releases where the pushes of blocked workers are added to the next update. Where
    these pushes are applied when their workers are released, the others continue, too (`_without_a_holder`).
    """
    trace, seqs = recount.trace, recount.seqs
    parts: list[Part] = [(np.diff(seqs) == 0, lambda i: f"seq {seqs[i]} occurs twice")]
    for table in ("grants", "decisions", "membership"):
        column = trace.tables[table]["seq"]
        parts.append((np.diff(column) <= 0, describe_columns(f"/{table}", trace.tables[table][:-1], "seq")))
    if trace.finished:
        expected = np.arange(1, len(seqs) + 1)
        parts.append((seqs != expected, lambda i: f"seq {expected[i]} is missing"))
    elif recount.job.paradigm.applies_at_release:
        holes = _holes(seqs, trace.n_workers + 1)
        without = _without_a_holder(trace, holes)
        parts.append((without, lambda i: f"seq {holes[i]} is missing, but no worker can be blocked with that push"))
    else:
        pushes, grants = (rows[rows["seq"] >= recount.horizon] for rows in (trace.tables[t] for t in NUMBERED[:2]))
        missing = f"seq {recount.horizon} is missing, but the run continued"
        parts.append(
            (pushes["outcome"] != Outcome.DROPPED, lambda i: f"{missing} with the push of seq {pushes['seq'][i]}")
        )
        continuing = (grants["local_steps"] != 0) & ~_answers_a_return(trace, grants)
        if recount.grants_first:
            events = np.concatenate([trace.tables[table]["seq"] for table in ("pushes", "membership")])
            continuing &= grants["seq"] < events.max(initial=0)
        if recount.k is not None or recount.job.paradigm.merges:
            continuing &= grants["version"] != recount.version_at(np.array([recount.horizon]))[0]
        parts.append((continuing, lambda i: f"{missing} with the grant of seq {grants['seq'][i]}"))
    return check_all("seq numbers each row once", *parts)


def _holes(seqs: Rows, most: int) -> Rows:
    """Return the first `most` missing numbers from 1 up to the largest; `seqs` is ascending."""
    after = np.append(0, seqs)[:-1]
    n_missing = seqs - after - 1
    rows = np.flatnonzero(n_missing > 0)[:most]
    missing = [after[row] + np.arange(1, 1 + min(n_missing[row], most)) for row in rows]
    return np.concatenate([np.zeros(0, np.int64), *missing])[:most]


def _without_a_holder(trace: Trace, holes: Rows) -> Rows:
    """Return which missing numbers cannot be those of pushes that wait to the end of the trace, shape (n_holes,).

    Each push that waits is of another worker, which has no later push that is applied, and no later grant but a stop
    grant. So a number needs as many workers without later rows as numbers are missing from it on.

    Parameters
    ----------
    holes
        Missing numbers, ascending.
    """
    pushes, grants = trace.tables["pushes"], trace.tables["grants"]
    latest = np.zeros(trace.n_workers, np.int64)
    for rows in (pushes[pushes["outcome"] == Outcome.APPLIED], grants[grants["local_steps"] != 0]):
        np.maximum.at(latest, rows["worker"], rows["seq"])
    silent = np.searchsorted(np.sort(latest), holes)  # workers without later rows
    return silent < len(holes) - np.arange(len(holes))


def _answers_a_return(trace: Trace, grants: Rows) -> Rows:
    """Return which grants follow a join as their worker's last event, shape (n_grants,)."""
    pushes, changes = trace.tables["pushes"], trace.tables["membership"]
    seq, worker = (np.append(pushes[column], changes[column]) for column in ("seq", "worker"))
    joins = np.append(np.zeros(len(pushes), bool), changes["change"] == Change.JOINED)
    order = np.argsort(seq)
    before = np.searchsorted(seq[order], grants["seq"]) - 1
    last = last_of(worker[order], np.arange(len(order)), grants["worker"], before)
    return np.append(joins[order], False)[last]  # row -1, none before, is the False


def times_never_decrease(recount: Recount) -> Check:
    """Check that times follow `seq`.

    Each update also lies between its last contribution and the first grant that names it.
    """
    tables = [recount.pushes, recount.grants, recount.decisions, recount.membership]
    seq, now_s = (np.concatenate([table[column] for table in tables]) for column in ("seq", "now_s"))
    order = np.argsort(seq, kind="stable")
    seq, now_s = seq[order], now_s[order]
    updated_s, complete = recount.updates["now_s"], recount.complete_seq
    pushed_s = now_s[np.searchsorted(seq, complete)]
    versions = np.maximum.accumulate(recount.grants["version"])
    granted = np.searchsorted(versions, np.arange(1, len(updated_s) + 1))
    granted_s = np.append(recount.grants["now_s"], np.inf)[granted]
    return check_all(
        "times never decrease",
        (np.diff(now_s) < 0, lambda i: f"seq {seq[i + 1]} is at {now_s[i + 1]} s, the one before at {now_s[i]} s"),
        (
            np.diff(updated_s) < 0,
            lambda i: f"version {i + 2} is at {updated_s[i + 1]} s, the one before at {updated_s[i]} s",
        ),
        (
            updated_s[: len(complete)] < pushed_s,
            lambda i: f"version {i + 1} is at {updated_s[i]} s, its last contribution at {pushed_s[i]} s",
        ),
        (granted_s < updated_s, lambda i: f"version {i + 1} is at {updated_s[i]} s, its grant at {granted_s[i]} s"),
    )


def iterations_count_pushes(recount: Recount) -> Check:
    """Check that a worker's iterations are 1, 2, 3, ..."""
    expected = recount.push_count
    return check_rows(
        "iteration is the worker's push count",
        recount.pushes["iteration"] != expected,
        lambda i: f"{recount.push_name(i)} is the worker's push number {expected[i]}",
    )


def each_push_is_granted_once(recount: Recount) -> Check:
    """Check that pushes and grants of a worker alternate: its grant after k pushes names iteration k + 1.

    A join is answered like a push. No grant follows a push whose worker left while it was blocked, or the last push of
    an unfinished run.
    """
    events, grants, follows = recount.events, recount.grants, recount.grant_count
    wrong = repeated(recount.answered) | (recount.answered < 0) | (grants["iteration"] != follows + 1)
    unanswered = ~recount.leaves & ~recount.is_last
    unanswered[recount.answered[recount.answered >= 0]] = False
    return check_all(
        "each push is answered by exactly one grant",
        (wrong, lambda i: f"{recount.grant_name(i)} follows {follows[i]} pushes of its worker"),
        (unanswered, lambda i: f"worker {events['worker'][i]} has no grant for seq {events['seq'][i]}"),
    )


def granted_version_is_read(recount: Recount) -> Check:
    """Check that a worker reads the granted version, and version 0 for its first iteration, which needs no grant."""
    pushes, permit = recount.pushes, recount.push_permit
    expected = np.append(recount.grants["version"], 0)[permit]  # row -1, no grant, is the 0
    known = (permit >= 0) | (pushes["iteration"] == 1)
    return check_rows(
        "version_read is the granted version",
        known & (pushes["version_read"] != expected),
        lambda i: f"{recount.push_name(i)} read version {pushes['version_read'][i]}, the granted one is {expected[i]}",
    )


def granted_version_is_current(recount: Recount) -> Check:
    """Check that a grant names the number of updates made before it."""
    grants, current = recount.grants, recount.current_version
    return check_rows(
        "each grant names the current version",
        grants["version"] != current,
        lambda i: f"{recount.grant_name(i)} names version {grants['version'][i]}, the current one is {current[i]}",
    )


def updates_use_the_applied_pushes(recount: Recount) -> Check:
    """Check that versions are 1, 2, 3, ... and that their contributions are the applied pushes, each used once."""
    updates, n_applied = recount.updates, len(recount.applied)
    expected = np.arange(1, len(updates) + 1)
    used = np.cumsum(updates["n_contributions"])
    total = int(used[-1]) if len(used) else 0
    # The row of an update is written before those of its contributions, so a trace may end between them.
    at_least = total if recount.finished or not len(used) else total - int(updates["n_contributions"][-1])
    return check_all(
        "updates consist of the applied pushes",
        (updates["version"] != expected, lambda i: f"/updates row {i} has version {updates['version'][i]}"),
        (
            np.array([not at_least <= n_applied <= total]),
            lambda _: f"{total} contributions in /updates, {n_applied} applied rows in /pushes",
        ),
    )


def staleness_is_recounted(recount: Recount) -> Check:
    """Check `staleness`.

    It is the number of updates between the version read and the update that applied the push, or the drop.
    """
    pushes = recount.pushes
    version = pushes["staleness"] + pushes["version_read"]  # current before the update, or at the drop
    low = recount.version_at(pushes["seq"])
    high = recount.version_at(np.append(recount.grants["seq"], NEVER)[recount.push_grant])  # -1: no grant, the end
    low[recount.applied] = high[recount.applied] = recount.applied_version - 1
    return check_rows(
        "staleness equals the recount",
        recount.settled & ((version < low) | (version > high)),
        lambda i: (
            f"{recount.push_name(i)} has staleness {pushes['staleness'][i]}, the recount gives "
            f"{low[i] - pushes['version_read'][i]}"
        ),
    )


def samples_add_up(recount: Recount) -> Check:
    """Check that /updates sums the batch sizes of its contributions and that /evaluations agrees with /updates.

    A push has as many local steps as its grant says, and where all batches have equal sizes their samples. Scripts
    choose their batches. Without a grant it has the steps of the job, unless workers push the change of their weights:
    there the paradigm says how many.
    """
    updates, pushes, job = recount.updates, recount.pushes, recount.job
    other = np.zeros(len(pushes), bool)
    if job.batches.policy == "equal" and not isinstance(job.workload, Script):
        other = pushes["batch_size"] != job.workload.batch_size * pushes["local_steps"]
    of_applied = np.cumsum(recount.pushes["batch_size"][recount.applied].astype(np.int64))
    last = np.cumsum(updates["n_contributions"]) - 1
    counted = of_applied[last[last < len(of_applied)]]
    return check_all(
        "sample counts add up",
        (
            updates["samples"][: len(counted)] != counted,
            lambda i: f"version {i + 1} has {updates['samples'][i]} samples, its pushes have {counted[i]}",
        ),
        evaluations_agree(recount.evaluations, updates, updates["now_s"]),
        other_steps(recount, UNTIL if job.commits else job.local_steps),
        (
            other,
            lambda i: (
                f"{recount.push_name(i)} has {pushes['batch_size'][i]} samples, {pushes['local_steps'][i]} local steps"
            ),
        ),
    )


def blocked_is_recounted(recount: Recount) -> Check:
    """Check that `held_s` is the time from the push, or the join, to the grant."""
    grants = recount.grants
    expected_s = grants["now_s"] - np.append(recount.events["now_s"], np.nan)[recount.answered]
    return check_rows(
        "held_s is the time from push to grant",
        (recount.answered >= 0) & ~(np.abs(grants["held_s"] - expected_s) < SAME_TIME_S),
        lambda i: (
            f"{recount.grant_name(i)} has held_s {grants['held_s'][i]}, its worker was blocked for {expected_s[i]} s"
        ),
    )


def lead_is_recounted(recount: Recount) -> Check:
    """Check that `gap_iters` is the worker's lead over the slowest active one (`trace.iteration_counts.follow`)."""
    grants, gap_iters = recount.grants, recount.grant_lead
    return check_rows(
        "gap_iters equals the recount",
        grants["gap_iters"] != gap_iters,
        lambda i: f"{recount.grant_name(i)} has gap_iters {grants['gap_iters'][i]}, the recount gives {gap_iters[i]}",
    )


def release_is_recounted(recount: Recount) -> Check:
    """Check that `released_by` names the last event before the grant, or the worker's own.

    A stop grant may also name the end of the run, which is no row, unless it answers a later push. Grants of format
    version 7 name nothing.
    """
    grants, events, own_events = recount.grants, recount.events, recount.own_events
    seq = np.concatenate([events["seq"], own_events["seq"]])
    own = np.concatenate([np.where(recount.leaves, -1, events["worker"]), np.full(len(own_events), -1)])
    order = np.argsort(seq)
    last = np.searchsorted(seq[order], grants["seq"]) - 1
    at_once = np.append(own[order], -1)[last] == grants["worker"]
    expected = np.where(at_once, Release.OWN, np.append(seq[order], 0)[last])
    found = grants["released_by"]
    known = (found != Release.UNKNOWN) | (recount.trace.attributes["format_version"] > 7)
    asked = np.append(events["seq"], 0)[recount.answered]
    ended = recount.is_stop & (found == Release.END) & (asked < recount.stop_seq)
    return check_rows(
        "released_by is the event that released the worker",
        known & ~ended & (found != expected),
        lambda i: f"{recount.grant_name(i)} has released_by {found[i]}, the recount gives {expected[i]}",
    )


def no_worker_acts_after_leaving(recount: Recount) -> Check:
    """Check that a worker leaves and joins in turn, and has no push and no grant in between."""
    pushes, grants, changes = recount.pushes, recount.grants, recount.membership
    joins = changes["change"] == Change.JOINED
    is_odd = running_count(changes["worker"]) % 2 == 1
    return check_all(
        "no worker acts after it leaves",
        (
            joins == is_odd,
            lambda i: (
                f"worker {changes['worker'][i]} {'joins' if joins[i] else 'leaves'} twice, seq {changes['seq'][i]}"
            ),
        ),
        (
            ~recount.is_active(pushes["worker"], recount.push_event),
            lambda i: f"{recount.push_name(i)} comes after its worker left",
        ),
        (
            ~recount.is_active(grants["worker"], recount.grant_event),
            lambda i: f"{recount.grant_name(i)} comes after its worker left",
        ),
    )


def stop_grants_end_the_run(recount: Recount) -> Check:
    """Check that every grant after the first stop grant is one, and that later pushes are dropped.

    In a finished run each worker gets one and then leaves, or has left before; no worker joins afterwards.
    """
    pushes, grants, is_stop = recount.pushes, recount.grants, recount.is_stop
    stopped = np.full(recount.n_workers, NEVER)
    np.minimum.at(stopped, grants["worker"][is_stop], grants["seq"][is_stop])
    endless = np.isin(np.arange(recount.n_workers), recount.active(len(recount.events) - 1)) & recount.finished
    joined = recount.events[recount.events["joins"]]
    late = pushes["seq"] > recount.stop_seq
    return check_all(
        "stop grants end the run",
        (is_stop & (grants["credits"] != 0), lambda i: f"{recount.grant_name(i)} is a stop grant with credits"),
        (
            (grants["seq"] > recount.stop_seq) & ~is_stop,
            lambda i: f"{recount.grant_name(i)} lets a worker continue after seq {recount.stop_seq} ended the run",
        ),
        (
            late & (pushes["outcome"] != Outcome.DROPPED),
            lambda i: f"{recount.push_name(i)} is applied after seq {recount.stop_seq} ended the run",
        ),
        (
            pushes["seq"] > stopped[pushes["worker"]],
            lambda i: f"{recount.push_name(i)} comes after its worker's stop grant",
        ),
        (joined["seq"] > recount.stop_seq, lambda i: f"worker {joined['worker'][i]} joins after the run has ended"),
        (endless, lambda i: f"worker {i} has not left"),
    )


INVARIANTS: tuple[Callable[[Recount], Check], ...] = (
    seq_is_unbroken,
    times_never_decrease,
    iterations_count_pushes,
    each_push_is_granted_once,
    granted_version_is_read,
    granted_version_is_current,
    updates_use_the_applied_pushes,
    staleness_is_recounted,
    samples_add_up,
    blocked_is_recounted,
    lead_is_recounted,
    release_is_recounted,
    rates_are_of_the_schedule,
    times_add_up,
    no_worker_acts_after_leaving,
    stop_grants_end_the_run,
    the_run_ends_by_its_rule,
)
