"""What must hold in every trace, whatever the paradigm; recomputed from the tables, never from a paradigm's code.

Each function is one check. Of a run that did not finish, the counts end at the first missing row (see `counting`), and
three things may be missing there, at the tail only: rows of contributions that were still pending, the grants of the
answer that was being given, and contributions of the update that was being recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpcsync.audit.batch_decisions import possible
from hpcsync.audit.check import Check, Part, check_all, check_rows, teller
from hpcsync.audit.server_recount import Recount
from hpcsync.trace.iteration_counts import NEVER, running_count
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Change, Outcome

NUMBERED = ("pushes", "grants", "decisions", "membership")  # the tables with a `seq`
DURATIONS = ("compute_s", "wait_s", "comm_s")
OUTCOME_CODES, CHANGE_CODES = list(Outcome), list(Change)
SAME_TIME_S = 1e-6  # differences of float64 seconds agree far better; nobody means less by a time


def check_invariants(trace: Trace) -> list[Check]:
    """All checks of this module. If the first fails, the values cannot be counted with and it is the only one."""
    first = values_are_possible(trace)
    if not first.passed:
        return [first]
    recount = Recount(trace)
    return [first, seq_is_unbroken(trace, recount), *(check(recount) for check in INVARIANTS)]


def values_are_possible(trace: Trace) -> Check:
    """Workers exist, codes are known, durations are not negative, nothing is computed from nothing."""
    tables = trace.tables
    pushes, grants, updates, membership = (tables[t] for t in ("pushes", "grants", "updates", "membership"))
    parts: list[Part] = [_somebody_sometime(tables[table], table, trace.n_workers) for table in NUMBERED]
    counted = (pushes["iteration"] >= 1) & (pushes["version_read"] >= 0)
    counted &= (pushes["batch_size"] >= 1) & (pushes["local_steps"] >= 1) & np.isin(pushes["outcome"], OUTCOME_CODES)
    tell = teller("/pushes", pushes, "iteration", "version_read", "batch_size", "local_steps", "outcome")
    parts.append((~counted, tell))
    timed = pushes["begin_s"] <= pushes["end_s"]
    for name in DURATIONS:
        timed &= pushes[name] >= 0
    parts.append((~timed, teller("/pushes", pushes, "begin_s", "end_s", *DURATIONS)))
    weighed = (pushes["share"] > 0) & (pushes["share"] <= 1) & (pushes["weight"] >= 0) & np.isfinite(pushes["weight"])
    parts.append((~weighed, teller("/pushes", pushes, "share", "weight")))
    predicted = ("predicted_fixed_s", "predicted_sample_s")
    parts.append((~possible(pushes, *predicted), teller("/pushes", pushes, *predicted)))
    # Whoever joins late may know its batch size alone.
    needs = (grants["local_steps"] != 0) & ((grants["iteration"] > 1) | (grants["batch_size"] > 0))
    sized = (grants["batch_size"] >= 0) & ((grants["batch_size"] == 0) == ~needs)
    sized &= grants["first_sample"] >= -1
    parts.append((~sized, teller("/grants", grants, "batch_size", "local_steps", "first_sample")))
    made = (updates["n_contributions"] >= 1) & np.isfinite(updates["now_s"])
    parts.append((~made, teller("/updates", updates, "version", "n_contributions", "now_s")))
    unknown = ~np.isin(membership["change"], CHANGE_CODES)
    parts.append((unknown, teller("/membership", membership, "worker", "change")))
    return check_all("values are possible", *parts)


def _somebody_sometime(rows: np.ndarray, table: str, n_workers: int) -> Part:
    right = (rows["worker"] >= 0) & (rows["worker"] < n_workers) & np.isfinite(rows["now_s"])
    return ~right, teller(f"/{table}", rows, "seq", "worker", "now_s")


def seq_is_unbroken(trace: Trace, recount: Recount) -> Check:
    """One counter over four tables, each row's number its own; in a finished trace none is missing.

    In an unfinished one the first missing number is that of a contribution whose fate was open at the end. Nothing can
    follow it but choices that were just being made, departures, returns and their answers, and once the run is
    stopping, the replies that say so and the pushes that they answer, which are dropped; and where grants come first,
    those of the last answer. In the k family some may go on, but only with what was there before: there is no update.
    """
    seqs = recount.seqs
    parts: list[Part] = [(np.diff(seqs) == 0, lambda i: f"seq {seqs[i]} occurs twice")]
    for table in ("grants", "decisions", "membership"):
        column = trace.tables[table]["seq"]
        parts.append((np.diff(column) <= 0, teller(f"/{table}", trace.tables[table][:-1], "seq")))
    if trace.finished:
        expected = np.arange(1, len(seqs) + 1)
        parts.append((seqs != expected, lambda i: f"seq {expected[i]} is missing"))
    else:
        pushes, grants = (rows[rows["seq"] >= recount.horizon] for rows in (trace.tables[t] for t in NUMBERED[:2]))
        missing = f"seq {recount.horizon} is missing, but the run went on"
        parts.append(
            (pushes["outcome"] != Outcome.DROPPED, lambda i: f"{missing} with the push of seq {pushes['seq'][i]}")
        )
        going_on = (grants["local_steps"] != 0) & ~_answers_a_return(trace, grants)
        if recount.grants_first:
            events = np.concatenate([trace.tables[table]["seq"] for table in ("pushes", "membership")])
            going_on &= grants["seq"] < events.max(initial=0)
        if recount.k is not None:
            going_on &= grants["version"] != recount.version_at(np.array([recount.horizon]))[0]
        parts.append((going_on, lambda i: f"{missing} with the grant of seq {grants['seq'][i]}"))
    return check_all("seq counts every row once", *parts)


def _answers_a_return(trace: Trace, grants: np.ndarray) -> np.ndarray:
    """Which of these grants come when their workers' last event was a return. Shape (n_grants,)."""
    events = [
        (
            table["worker"],
            table["seq"],
            table["change"] == Change.JOINED if name == "membership" else np.zeros(len(table), bool),
        )
        for name in ("pushes", "membership")
        for table in [trace.tables[name]]
    ]
    worker, seq, joins = (np.concatenate(columns) for columns in zip(*events, strict=True))
    found = np.zeros(len(grants), bool)
    for i, grant in enumerate(grants):
        before = (worker == grant["worker"]) & (seq < grant["seq"])
        found[i] = before.any() and joins[before][np.argmax(seq[before])]
    return found


def times_never_decrease(recount: Recount) -> Check:
    """In the order of `seq`; and each update lies between its last contribution and the first grant that names it."""
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
    """A worker's iterations are 1, 2, 3, ..."""
    expected = recount.push_count
    return check_rows(
        "iterations count a worker's pushes",
        recount.pushes["iteration"] != expected,
        lambda i: f"{_push(recount, i)} is its push number {expected[i]}",
    )


def each_push_is_granted_once(recount: Recount) -> Check:
    """A worker pushes, is granted, pushes, ...: its grant after k pushes names iteration k + 1. A return is as a push.

    Without a grant is one whose worker left while it was held, or the last of a run that did not finish.
    """
    events, grants, follows = recount.events, recount.grants, recount.grant_count
    again = np.ones(len(grants), bool)
    again[np.unique(recount.answered, return_index=True)[1]] = False
    wrong = again | (recount.answered < 0) | (grants["iteration"] != follows + 1)
    unanswered = ~recount.leaves & ~recount.is_last
    unanswered[recount.answered[recount.answered >= 0]] = False
    return check_all(
        "each push is answered by exactly one grant",
        (wrong, lambda i: f"{_grant(recount, i)} follows {follows[i]} pushes of its worker"),
        (unanswered, lambda i: f"worker {events['worker'][i]} has no grant for seq {events['seq'][i]}"),
    )


def granted_version_is_read(recount: Recount) -> Check:
    """A worker reads the version that its grant names; for its first iteration, which needs no grant, version 0."""
    pushes, permit = recount.pushes, recount.push_permit
    expected = np.append(recount.grants["version"], 0)[permit]  # row -1, no grant, is the 0
    known = (permit >= 0) | (pushes["iteration"] == 1)
    return check_rows(
        "version_read is the granted version",
        known & (pushes["version_read"] != expected),
        lambda i: f"{_push(recount, i)} read version {pushes['version_read'][i]}, granted was {expected[i]}",
    )


def granted_version_is_current(recount: Recount) -> Check:
    """A grant names the number of updates made before it."""
    grants, current = recount.grants, recount.current_version
    return check_rows(
        "each grant names the current version",
        grants["version"] != current,
        lambda i: f"{_grant(recount, i)} names version {grants['version'][i]}, current was {current[i]}",
    )


def updates_use_the_applied_pushes(recount: Recount) -> Check:
    """Versions are 1, 2, 3, ..., and their contributions are the applied pushes, none twice and none left over."""
    updates, n_applied = recount.updates, len(recount.applied)
    expected = np.arange(1, len(updates) + 1)
    used = np.cumsum(updates["n_contributions"])
    total = int(used[-1]) if len(used) else 0
    # The row of an update is written before those of its contributions: an end in between is an end at the last update.
    at_least = total if recount.finished or not len(used) else total - int(updates["n_contributions"][-1])
    return check_all(
        "updates use the applied pushes",
        (updates["version"] != expected, lambda i: f"/updates row {i} is of version {updates['version'][i]}"),
        (
            np.array([not at_least <= n_applied <= total]),
            lambda _: f"{total} contributions in /updates, {n_applied} applied rows in /pushes",
        ),
    )


def staleness_is_recounted(recount: Recount) -> Check:
    """Updates between the version read and the update that applied it, or the moment at which it was dropped."""
    pushes = recount.pushes
    version = pushes["staleness"] + pushes["version_read"]  # before the update, or at the drop
    low = recount.version_at(pushes["seq"])
    high = recount.version_at(np.append(recount.grants["seq"], NEVER)[recount.push_grant])  # -1: no grant, the end
    low[recount.applied] = high[recount.applied] = recount.applied_version - 1
    return check_rows(
        "staleness equals a recount",
        (version < low) | (version > high),
        lambda i: (
            f"{_push(recount, i)} has staleness {pushes['staleness'][i]}, a recount gives "
            f"{low[i] - pushes['version_read'][i]}"
        ),
    )


def samples_add_up(recount: Recount) -> Check:
    """/updates counts the batches of its contributions; /evaluations says what /updates says of that version."""
    updates, evaluations = recount.updates, recount.evaluations
    of_applied = np.cumsum(recount.pushes["batch_size"][recount.applied].astype(np.int64))
    last = np.cumsum(updates["n_contributions"]) - 1
    counted = of_applied[last[last < len(of_applied)]]
    known = (evaluations["version"] >= 0) & (evaluations["version"] <= len(updates))
    at = np.where(known, evaluations["version"], 0)
    samples = np.append(0, updates["samples"])[at]
    updated_s = np.append(-np.inf, updates["now_s"])[at]
    return check_all(
        "samples add up",
        (
            updates["samples"][: len(counted)] != counted,
            lambda i: f"version {i + 1} has {updates['samples'][i]} samples, its pushes have {counted[i]}",
        ),
        (
            ~known | (evaluations["samples"] != samples) | (evaluations["now_s"] < updated_s),
            lambda i: (
                f"/evaluations row {i} (version {evaluations['version'][i]}, {evaluations['samples'][i]} samples, "
                f"{evaluations['now_s'][i]} s) is not of an update: {samples[i]} samples, {updated_s[i]} s"
            ),
        ),
    )


def blocked_is_recounted(recount: Recount) -> Check:
    """`held_s` is the time from the push to its grant, or from the return."""
    grants = recount.grants
    expected_s = grants["now_s"] - np.append(recount.events["now_s"], np.nan)[recount.answered]
    return check_rows(
        "held_s is the time from push to grant",
        (recount.answered >= 0) & ~(np.abs(grants["held_s"] - expected_s) < SAME_TIME_S),
        lambda i: f"{_grant(recount, i)} says {grants['held_s'][i]} s, its worker was held {expected_s[i]} s",
    )


def lead_is_recounted(recount: Recount) -> Check:
    """`gap_iters` is how far the worker is ahead of the slowest that takes part: see `counting.follow`."""
    grants, gap_iters = recount.grants, recount.grant_lead
    return check_rows(
        "gap_iters equals a recount",
        grants["gap_iters"] != gap_iters,
        lambda i: f"{_grant(recount, i)} has gap_iters {grants['gap_iters'][i]}, a recount gives {gap_iters[i]}",
    )


def nobody_acts_after_leaving(recount: Recount) -> Check:
    """A worker leaves, joins, leaves, ..., and has no push and no grant while it is away."""
    pushes, grants, changes = recount.pushes, recount.grants, recount.membership
    joins = changes["change"] == Change.JOINED
    is_odd = running_count(changes["worker"]) % 2 == 1
    return check_all(
        "nobody acts after leaving",
        (
            joins == is_odd,
            lambda i: (
                f"worker {changes['worker'][i]} {'joins' if joins[i] else 'leaves'} twice, seq {changes['seq'][i]}"
            ),
        ),
        (
            ~recount.is_active(pushes["worker"], recount.push_event),
            lambda i: f"{_push(recount, i)} comes after its worker left",
        ),
        (
            ~recount.is_active(grants["worker"], recount.grant_event),
            lambda i: f"{_grant(recount, i)} comes after its worker left",
        ),
    )


def the_end_is_the_end(recount: Recount) -> Check:
    """From the first stop grant on all are; what is pushed then is dropped; everybody who has not left gets one; and
    nobody joins any more."""
    pushes, grants, is_stop = recount.pushes, recount.grants, recount.is_stop
    stopped = np.full(recount.n_workers, NEVER)
    np.minimum.at(stopped, grants["worker"][is_stop], grants["seq"][is_stop])
    there = np.isin(np.arange(recount.n_workers), recount.active(len(recount.events) - 1))
    endless = (stopped == NEVER) & there & recount.finished
    joined = recount.events[recount.events["joins"]]
    late = pushes["seq"] > recount.stop_seq
    return check_all(
        "stop grants end the run",
        (is_stop & (grants["credits"] != 0), lambda i: f"{_grant(recount, i)} is a stop with credits"),
        (
            (grants["seq"] > recount.stop_seq) & ~is_stop,
            lambda i: f"{_grant(recount, i)} lets a worker go on after seq {recount.stop_seq} ended the run",
        ),
        (
            late & (pushes["outcome"] != Outcome.DROPPED),
            lambda i: f"{_push(recount, i)} is applied after seq {recount.stop_seq} ended the run",
        ),
        (
            pushes["seq"] > stopped[pushes["worker"]],
            lambda i: f"{_push(recount, i)} comes after its worker's stop grant",
        ),
        (joined["seq"] > recount.stop_seq, lambda i: f"worker {joined['worker'][i]} joins after the run has ended"),
        (endless, lambda i: f"worker {i} has neither a stop grant nor left"),
    )


INVARIANTS: tuple[Callable[[Recount], Check], ...] = (
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
    nobody_acts_after_leaving,
    the_end_is_the_end,
)


def _push(recount: Recount, row: int) -> str:
    push = recount.pushes[row]
    return f"push of worker {push['worker']}, iteration {push['iteration']}, seq {push['seq']}"


def _grant(recount: Recount, row: int) -> str:
    grant = recount.grants[row]
    return f"grant to worker {grant['worker']}, iteration {grant['iteration']}, seq {grant['seq']}"
