"""Guarantees of the k family (`paradigms.first_k`), checked on recounted numbers and not by the family's code.

k-sync and k-async take contributions of k workers, which block until their update. k-batch-sync and k-batch-async
take k mini-batches, and no worker blocks. A push that is staler on arrival than its form accepts is dropped at once:
in the synchronous forms a push that was not computed from the current version, in the others one beyond the
staleness bound. All other pushes take part in an update, unless the run ends first.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from hpcsync.audit.check import Check, check_all, check_rows, repeated
from hpcsync.audit.server_recount import Recount
from hpcsync.paradigms.first_k import FirstKOfAnyOptions, FirstKOptions
from hpcsync.trace.iteration_counts import NEVER
from hpcsync.trace.schema import Outcome, Rows

INTERVAL = 20  # updates between two choices of k
CHOSEN_FROM = ("version", "k_before", "k_state", "k_loss", "active")


def check_first_k(recount: Recount, paradigm: FirstKOptions) -> list[Check]:
    """Return all checks of this module, except that no worker is blocked in the mini-batch forms (`bounds`)."""
    checks = [updates_take_k(recount), drops_are_too_stale(recount, paradigm), k_is_chosen_right(recount, paradigm)]
    if paradigm.counts_workers:
        checks.append(contributors_wait_for_their_update(recount, paradigm))
    return checks


def updates_take_k(recount: Recount) -> Check:
    """Check that each update takes k contributions, of distinct workers where workers are counted.

    Fewer than k are allowed only if fewer workers are left.
    """
    assert recount.k is not None
    event, updated_s = recount.update_event, recount.updates["now_s"]
    n, k = recount.updates["n_contributions"][: len(event)], recount.k[: len(event)]
    distinct = recount.job.paradigm.counts_workers
    event_s = np.append(recount.events["now_s"], np.nan)[np.minimum(event, len(recount.events))]
    complete = recount.applied_version <= len(event)
    version, worker = recount.applied_version[complete], recount.pushes["worker"][recount.applied[complete]]
    contributor = version * recount.n_workers + worker
    return check_all(
        f"each update takes k {'workers' if distinct else 'mini-batches'}",
        (
            (n > k) | (event == NEVER),
            lambda i: f"version {i + 1} has {n[i]} contributions, k is {k[i]:g} and more could follow",
        ),
        (repeated(contributor) & distinct, lambda i: f"version {version[i]} takes worker {worker[i]} twice"),
        (
            (event != NEVER) & (updated_s[: len(event)] != event_s),
            lambda i: f"version {i + 1} is at {updated_s[i]} s, the event that completed it at {event_s[i]} s",
        ),
    )


def drops_are_too_stale(recount: Recount, paradigm: FirstKOptions) -> Check:
    """Check that exactly the pushes that are too stale on arrival are dropped, and those left over at the end."""
    pushes, too_stale = recount.pushes, _too_stale(recount, paradigm)
    made = recount.update_event[recount.update_event != NEVER]
    last_seq = recount.events["seq"][made].max(initial=0)
    wasted = (pushes["outcome"] == Outcome.DROPPED) & ~too_stale & (pushes["seq"] <= last_seq)
    late = paradigm.drops == "late"
    return check_all(
        f"dropped pushes {'are of an older version' if late else 'exceed the staleness bound'}",
        (
            (pushes["outcome"] == Outcome.APPLIED) & too_stale,
            lambda i: f"{recount.push_name(i)} is applied, but is {_staleness(recount)[i]} versions old on arrival",
        ),
        (
            wasted,
            lambda i: f"{recount.push_name(i)} is dropped, but is {_staleness(recount)[i]} versions old on arrival",
        ),
    )


def contributors_wait_for_their_update(recount: Recount, paradigm: FirstKOptions) -> Check:
    """Check that contributors are granted with their update, and workers with too stale pushes at once."""
    pushes, n_complete = recount.pushes, len(recount.update_event)
    expected = np.full(len(pushes), NEVER)
    taken = recount.applied_version <= n_complete
    expected[recount.applied[taken]] = recount.update_event[recount.applied_version[taken] - 1]
    at_once = _too_stale(recount, paradigm) & (pushes["outcome"] == Outcome.DROPPED)
    expected[at_once] = recount.push_event[at_once]
    known = (recount.push_grant >= 0) & (expected != NEVER)
    released = np.append(recount.grant_event, -1)[recount.push_grant]
    return check_rows(
        "only contributors block, until their update",
        known & (released != expected),
        lambda i: f"{recount.push_name(i)} is not granted {'at once' if at_once[i] else 'with its update'}",
    )


def k_is_chosen_right(recount: Recount, paradigm: FirstKOptions) -> Check:
    """Check that k is the job's, or moves by 1 towards its wanted value, only after every INTERVAL updates."""
    name = "k follows its policy within its limits"
    assert recount.k is not None
    rows = recount.decisions[recount.decisions["controller"] == b"k"]
    if isinstance(paradigm.k, int):
        return Check(f"k is {paradigm.k}", not len(rows), len(recount.updates), "it changes" if len(rows) else "")
    policy = paradigm.k
    needed = (*CHOSEN_FROM, *(["k_throughput"] if policy == "throughput" else []))
    if not set(needed) <= set(rows.dtype.names or ()):
        return Check(name, False, len(rows), f"/decisions lacks one of {', '.join(needed)}")
    chosen, k_before, version = rows["chosen"], rows["k_before"], rows["version"]
    before = np.append(recount.k[0], chosen)[:-1]
    event = recount.event_at(rows["seq"])
    made = np.append(recount.update_event, NEVER)[recount.version_at(rows["seq"]) - 1]
    active = recount.n_active[event]
    least = np.minimum(paradigm.k_min or 1, active)
    candidates = [active]
    if policy in ("state", "min"):
        candidates.append(rows["k_state"])
    if policy in ("loss", "min"):
        candidates.append(np.where(np.isnan(rows["k_loss"]), k_before, rows["k_loss"]))
    if policy == "throughput":
        candidates.append(rows["k_throughput"])
    # Half to even, as Python rounds. NaN fails.
    wanted = np.clip(np.round(np.min(candidates, axis=0)), least, active)
    at = [f"k of seq {seq}" for seq in rows["seq"]]
    return check_all(
        name,
        (
            (k_before != before) | (rows["active"] != active),
            lambda i: f"{at[i]}: k was {before[i]:g}, {active[i]} workers were active; recorded is {rows[i]}",
        ),
        (
            (version != recount.version_at(rows["seq"])) | (made != event) | (version % INTERVAL != 0),
            lambda i: f"{at[i]} does not follow every {INTERVAL}th update: version {version[i]:g}",
        ),
        (
            ~(chosen - k_before == np.sign(wanted - k_before)) | (chosen == k_before),
            lambda i: f"{at[i]} moves from {k_before[i]:g} to {chosen[i]:g}, wanted is {wanted[i]:g}",
        ),
    )


def cancelled_is_dropped(recount: Recount) -> Check:
    """Check that only with cancel = "abort" an iteration ends early, and only one that is dropped as stale."""
    pushes, aborts = recount.pushes, recount.job.paradigm.aborts
    early = pushes["share"] < 1
    right = (pushes["outcome"] == Outcome.DROPPED) & (_staleness(recount) > 0)
    return check_rows(
        "cancelled iterations are of an older version" if aborts else "no iteration is cancelled",
        early & ~(right & aborts),
        lambda i: f"{recount.push_name(i)} has share {pushes['share'][i]}, {_staleness(recount)[i]} versions old",
    )


def _staleness(recount: Recount) -> Rows:
    """Return the updates between the version read and the arrival of each push, shape (n_pushes,)."""
    return recount.version_at(recount.pushes["seq"]) - recount.pushes["version_read"]


def _too_stale(recount: Recount, paradigm: FirstKOptions) -> Rows:
    """Return which pushes are staler on arrival than their form accepts, shape (n_pushes,)."""
    bound: Rows | float = 0
    if paradigm.drops == "stale":
        staleness_max = cast(FirstKOfAnyOptions, paradigm).staleness_max
        bound = math.inf if staleness_max is None else staleness_max
        if staleness_max is None:
            assert recount.k is not None
            current = np.minimum(recount.version_at(recount.pushes["seq"]), len(recount.k) - 1)
            bound = np.ceil(2 * recount.n_workers / recount.k[current])
    return _staleness(recount) > bound
