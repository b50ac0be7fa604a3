"""What must hold in every trace of a run without servers, recounted from its rows.

Only whom a worker exchanges with, and its learning rate, are asked of the product's own code: both follow from the job.
Where a check counts iterations, or needs to know of an exchange, it does so from the order of the rows and the job, not
from a column that another check is about. Seconds of different workers are compared up to the uncertainty of their
clocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpcsync.audit.batch_agreement import check_agreed_sizes
from hpcsync.audit.check import Check, Part, check_all, check_rows, teller
from hpcsync.audit.peer_recount import SAME_TIME_S, PeerRecount, previous
from hpcsync.audit.stanza import check_separation
from hpcsync.config.compression import DgcOptions, TopKOptions
from hpcsync.config.job import Script
from hpcsync.config.paradigms import GossipOptions, StanzaOptions
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import ALL_PEERS, NO_PEER, Change
from hpcsync.training.lr_schedule import learning_rate, worker_rate

OF_SERVERS = ("pushes", "grants")
TIMES = ("now_s", "begin_s", "end_s")
DURATIONS = ("compute_s", "wait_s", "comm_s")
SAME_WEIGHT = 1e-9


def check_exchanges(trace: Trace) -> list[Check]:
    """All checks of this module. If the first fails, the values cannot be counted with and it is the only one."""
    first = values_are_possible(trace)
    if not first.passed:
        return [first]
    run = PeerRecount(trace)
    in_step = [exchanges_of_all_keep_in_step(run)] if run.together else []
    shares = [] if run.job.batches.policy == "equal" else check_agreed_sizes(run)
    separated = [] if run.groups is None else check_separation(run, run.groups)
    return [first, *(check(run) for check in CHECKS), *in_step, *shares, *separated]


def values_are_possible(trace: Trace) -> Check:
    """Workers exist, durations and counts are not negative, and there is nothing that only servers do."""
    rows, updates, membership = (trace.tables[table] for table in ("exchanges", "updates", "membership"))
    n_workers = trace.n_workers
    parts: list[Part] = [
        (np.array([len(trace.tables[table]) > 0]), lambda _, table=table: f"/{table} has rows, without a server")  # type: ignore[misc]
        for table in (*OF_SERVERS, *(["decisions"] if trace.job.batches.policy == "equal" else []))
    ]
    paradigm = trace.job.paradigm
    unresolved = isinstance(paradigm, StanzaOptions) and paradigm.fc_workers == "auto"
    parts.append((np.array([unresolved]), lambda _: "the job does not say how many workers are fully-connected ones"))
    exist = (rows["worker"] >= 0) & (rows["worker"] < n_workers) & (rows["iteration"] >= 0)
    exist &= (rows["peer"] >= NO_PEER) & (rows["peer"] < n_workers)
    for name in TIMES:
        exist &= np.isfinite(rows[name])
    parts.append((~exist, teller("/exchanges", rows, "worker", "iteration", "peer", *TIMES)))
    counted = (rows["batch_size"] >= 0) & (rows["wire_bytes"] >= 0) & (rows["n_received"] >= 0)
    parts.append((~counted, teller("/exchanges", rows, "batch_size", "wire_bytes", "n_received")))
    measured = (rows["weight"] > 0) & np.isfinite(rows["weight"])
    for name in DURATIONS:
        measured &= (rows[name] >= 0) & np.isfinite(rows[name])
    parts.append((~measured, teller("/exchanges", rows, "weight", *DURATIONS)))
    made = (updates["n_contributions"] >= 1) & np.isfinite(updates["now_s"])
    parts.append((~made, teller("/updates", updates, "version", "n_contributions", "now_s")))
    told = (membership["worker"] >= 0) & (membership["worker"] < n_workers) & np.isfinite(membership["now_s"])
    told &= np.isin(membership["change"], list(Change))
    parts.append((~told, teller("/membership", membership, "worker", "now_s", "change")))
    return check_all("values are possible", *parts)


def iterations_count_steps(run: PeerRecount) -> Check:
    """A worker's iterations are 1, 2, 3, ..., and after its last one it can only take in what others pushed."""
    before = previous(run.rows["worker"])
    resumed = (before >= 0) & run.is_step & ~run.is_step[before]
    absorbing = ~run.is_step & (run.mode not in ("push", "push-sum"))
    return check_all(
        "iterations count a worker's steps",
        (
            run.steps["iteration"] != run.count,
            lambda i: f"{run.told(i)} is number {run.count[i]} of its worker",
        ),
        (resumed, lambda i: f"/exchanges row {i}: worker {run.rows['worker'][i]} goes on after its end"),
        (absorbing, lambda i: f"/exchanges row {i} has batch size 0, where nothing comes for one that has ended"),
    )


def times_are_in_order(run: PeerRecount) -> Check:
    """A worker computes, reports, and only then begins again; reports are heard one after the other. Only where layers
    are separated does it wait while it computes."""
    steps, rows = run.steps, run.rows
    before = previous(steps["worker"])
    begun = steps["begin_s"] < np.append(steps["end_s"], -np.inf)[before] - SAME_TIME_S  # row -1, none before, is -inf
    took_s = steps["end_s"] - steps["begin_s"]
    idle_s = took_s - steps["compute_s"]
    return check_all(
        "times are in order",
        (
            np.diff(rows["now_s"]) < 0,
            lambda i: f"/exchanges row {i + 1} is at {rows['now_s'][i + 1]} s, the one before at {rows['now_s'][i]} s",
        ),
        (
            (took_s < 0) | (idle_s <= -SAME_TIME_S) | ((idle_s >= SAME_TIME_S) & (run.groups is None)),
            lambda i: f"{run.told(i)} computes for {steps['compute_s'][i]} s in {took_s[i]} s",
        ),
        (
            steps["end_s"] > steps["now_s"] + run.uncertain_s,
            lambda i: f"{run.told(i)} ends at {steps['end_s'][i]} s and is reported at {steps['now_s'][i]} s",
        ),
        (begun, lambda i: f"{run.told(i)} begins at {steps['begin_s'][i]} s, before the one before has ended"),
    )


def peers_are_as_drawn(run: PeerRecount) -> Check:
    """Everybody exchanges when the job says so, and with whom its seed says."""
    peer, absorbed = run.steps["peer"], run.rows[~run.is_step]
    return check_all(
        "peers are those of the job and its seed",
        (peer != run.peer, lambda i: f"{run.told(i)} is with {_peer(peer[i])}, not with {_peer(run.peer[i])}"),
        (absorbed["peer"] != NO_PEER, lambda i: f"worker {absorbed['worker'][i]} exchanges after its end"),
    )


def given_is_received(run: PeerRecount) -> Check:
    """As many models, or gradients, are received as were given."""
    name, steps = "what is given is received", run.steps
    if run.mode not in ("push", "push-sum"):
        given = run.exchanged.astype(np.int64)
        if run.mode == "permutation":
            gives = np.argsort(run.permutations, axis=1)[run.count // run.period, steps["worker"]]
            given *= gives != steps["worker"]
        elif run.groups is not None:
            given *= np.where(run.is_fc, run.groups.n_fc, run.groups.n_convolution) - 1
        elif run.mode != "pull":
            given *= run.n_contributing[run.count] - 1
        # Of all workers' exchange in a run that did not finish, not everybody's report need be there.
        sure = run.finished | run.known(run.count) | ~run.exchanged | (run.mode in ("pull", "permutation", "stanza"))
        return check_rows(
            name,
            np.where(sure, steps["n_received"] != given, steps["n_received"] < given),
            lambda i: f"{run.told(i)} received {steps['n_received'][i]}, {given[i]} were given",
        )
    # By those who have lived to the end: what went to others may be lost with them.
    n_given = int((run.exchanged & ~np.isin(run.peer, run.died["worker"])).sum())
    n_received = int(run.rows["n_received"][~np.isin(run.rows["worker"], run.died["worker"])].sum())
    # Each worker that died may have given once more than it could report; of a run that did not finish, each worker's
    # report of what was received already may be missing.
    most = n_given + (len(run.died) if run.finished else run.n_workers)
    right = (n_given if run.finished else 0) <= n_received <= most
    return Check(name, right, len(run.rows), "" if right else f"{n_given:,} were pushed, {n_received:,} received")


def weights_add_up(run: PeerRecount) -> Check:
    """Push-sum: a push gives half away, only what is received adds, and at the end nothing is lost but what those who
    died had, and what was on its way to them. Otherwise 1."""
    rows, weight = run.rows, run.rows["weight"]
    if run.mode != "push-sum":
        return check_rows("weights are 1", weight != 1.0, lambda i: f"/exchanges row {i} has weight {weight[i]}")
    pushed = np.zeros(len(rows), bool)
    pushed[run.is_step] = run.exchanged
    kept = np.append(weight, 1.0)[previous(rows["worker"])] * np.where(pushed, 0.5, 1.0)  # before its first row it is 1
    wrong = np.where(rows["n_received"] == 0, weight != kept, weight <= kept)
    last = np.ones(run.n_workers)
    last[rows["worker"]] = weight  # of several rows the last one stays
    dead = run.died["worker"]
    died = np.isin(np.arange(run.n_workers), dead)
    total = float(last[~died].sum())
    # Those who live have what they began with and what the dead gave them, without what they gave the dead. The last
    # pushes of the dead, which they could not report, may have come too.
    gave, got = np.isin(run.steps["worker"], dead), np.isin(run.peer, dead)
    given = (gave.astype(float) - got)[run.exchanged] @ kept[run.is_step][run.exchanged]
    expected = [np.count_nonzero(~died) + float(given)]
    for half in last[died] / 2:
        expected += [weight + half for weight in expected]
    lost = min(abs(total - weight) for weight in expected)
    return check_all(
        "push-sum weights add up",
        (wrong, lambda i: f"/exchanges row {i}: worker {rows['worker'][i]} kept {kept[i]}, it has {weight[i]}"),
        (
            np.array([run.finished and lost > SAME_WEIGHT * run.n_workers]),
            lambda _: f"at the end the workers' weights are {total} together, not {expected[0]}",
        ),
    )


def bytes_are_those_of_an_exchange(run: PeerRecount) -> Check:
    """Nothing moves without an exchange, and like exchanges move as much as each other. From a codec that sends more of
    one gradient than of another, as many elements, of four bytes or more, go to each of the others."""
    moved, exchanged = run.steps["wire_bytes"], run.exchanged
    labels = np.zeros(len(moved), np.int64)
    if not isinstance(run.job.paradigm, GossipOptions):
        labels = run.steps["worker"] * (run.n_workers + 1) + np.minimum(run.steps["n_received"], run.n_workers)
    labels = np.where(exchanged, labels, -1)
    _, first, place = np.unique(labels, return_index=True, return_inverse=True)
    expected = np.where(exchanged, moved[first[place]], 0) if len(moved) else moved
    if isinstance(run.job.compression, TopKOptions | DgcOptions):
        n_others = run.n_workers - np.searchsorted(run.died["now_s"], run.steps["now_s"], side="right") - 1
        unit = 4 * np.maximum(n_others, 1)
        expected = np.where(n_others > 0, np.maximum(moved - moved % unit, unit), expected)
    absorbed = run.rows[~run.is_step]
    return check_all(
        "like exchanges move as many bytes",
        (moved != expected, lambda i: f"{run.told(i)} moved {moved[i]} bytes, such a one moves {expected[i]}"),
        (
            absorbed["wire_bytes"] != 0,
            lambda i: f"worker {absorbed['worker'][i]} moved {absorbed['wire_bytes'][i]} bytes after its end",
        ),
    )


def exchanges_of_all_keep_in_step(run: PeerRecount) -> Check:
    """After an exchange of all, or of all of a group, nobody of them computes before everybody of them has computed
    what was exchanged."""
    group = run.is_fc.astype(int)
    latest_s = np.full((2, len(run.n_contributing)), -np.inf)
    np.maximum.at(latest_s, (group, run.count), run.steps["end_s"] - run.uncertain_s)
    before = run.count - 1
    wrong = (before % run.period == 0) & (run.steps["begin_s"] + run.uncertain_s < latest_s[group, before])
    return check_rows(
        "nobody begins before all have exchanged",
        wrong,
        lambda i: (
            f"{run.told(i)} begins at {run.steps['begin_s'][i]} s, when not everybody has ended iteration {before[i]}"
        ),
    )


def updates_are_the_steps(run: PeerRecount) -> Check:
    """Versions are 1, 2, 3, ...: all-reduce's are iterations of all, others a worker's step, made when reported."""
    updates, due_s = run.updates, run.updated_s
    n = min(len(updates), len(due_s))
    taken = np.bincount(run.update_of, run.samples > 0, minlength=n + 1)[1 : n + 1].astype(int)
    last_s = max(float(table["now_s"].max(initial=-np.inf)) for table in (run.rows, run.membership))
    missing_s = due_s[n:]
    return check_all(
        "updates are the workers' steps",
        (
            updates["version"] != np.arange(1, len(updates) + 1),
            lambda i: f"/updates row {i} is of version {updates['version'][i]}",
        ),
        (
            updates["n_contributions"][:n] != taken,
            lambda i: f"version {i + 1} has {updates['n_contributions'][i]} contributions, {taken[i]} were reported",
        ),
        (
            updates["now_s"][:n] != due_s[:n],
            lambda i: f"version {i + 1} is at {updates['now_s'][i]} s, what it takes was reported at {due_s[i]} s",
        ),
        (np.ones(len(updates) - n, bool), lambda i: f"nothing was reported that made version {n + i + 1}"),
        (
            (missing_s < last_s) | run.finished,
            lambda i: f"what was reported at {missing_s[i]} s made no version {n + i + 1}",
        ),
    )


def rates_are_of_the_schedule(run: PeerRecount) -> Check:
    """An update's learning rate is that of its worker, which counts its own samples and iterations."""
    if run.one_model:
        return _rates_are_of_one_model(run)
    rate, steps, first = worker_rate(run.job), run.steps, run.first_step_of[: len(run.updates)]
    own = np.zeros(len(steps), np.int64)  # samples of the worker before the step
    order = np.argsort(steps["worker"], kind="stable")
    summed = np.cumsum(steps["batch_size"][order], dtype=np.int64) - steps["batch_size"][order]
    begins = np.searchsorted(steps["worker"][order], np.arange(run.n_workers))
    own[order] = summed - np.append(summed, 0)[begins][steps["worker"][order]]
    clocks = zip(own[first].tolist(), (run.count[first] - 1).tolist(), strict=True)
    expected = np.array([rate(samples, iterations) for samples, iterations in clocks])
    return _same_rates(run.updates["lr"][: len(expected)], expected)


def _rates_are_of_one_model(run: PeerRecount) -> Check:
    rate, samples = learning_rate(run.job), np.append(0, run.updates["samples"])[:-1].tolist()
    expected = [rate(before, version, run.n_workers) for version, before in enumerate(samples)]
    return _same_rates(run.updates["lr"], np.array(expected))


def _same_rates(lr: np.ndarray, expected: np.ndarray) -> Check:
    return check_rows(
        "learning rates are those of the schedule",
        ~np.isclose(lr, expected, rtol=1e-12, atol=0.0),
        lambda i: f"version {i + 1} has learning rate {lr[i]}, the schedule gives {expected[i]}",
    )


def samples_add_up(run: PeerRecount) -> Check:
    """/updates counts the batches of its steps; /evaluations says what /updates says of that version.

    Workers in step show their weights when they have made them; reports are heard later, or in a run that did not
    finish not at all.
    """
    updates, evaluations = run.updates, run.evaluations
    order = np.argsort(run.update_of, kind="stable")
    last = np.searchsorted(run.update_of[order], np.arange(1, min(len(updates), len(run.updated_s)) + 1), side="right")
    counted = np.cumsum(run.samples[order], dtype=np.int64)[last - 1]
    if run.together and not run.finished:
        evaluations = evaluations[evaluations["version"] <= len(updates)]
    known = (evaluations["version"] >= 0) & (evaluations["version"] <= len(updates))
    at = np.where(known, evaluations["version"], 0)
    samples = np.append(0, updates["samples"])[at]
    updated_s = np.append(-np.inf, np.where(run.together, -np.inf, updates["now_s"]))[at]
    return check_all(
        "samples add up",
        (
            updates["samples"][: len(counted)] != counted,
            lambda i: f"version {i + 1} has {updates['samples'][i]} samples, its steps have {counted[i]}",
        ),
        (
            ~known | (evaluations["samples"] != samples) | (evaluations["now_s"] < updated_s),
            lambda i: (
                f"/evaluations row {i} (version {evaluations['version'][i]}, {evaluations['samples'][i]} samples, "
                f"{evaluations['now_s'][i]} s) is not of an update: {samples[i]} samples, {updated_s[i]} s"
            ),
        ),
    )


def distances_are_possible(run: PeerRecount) -> Check:
    """A distance is not negative, known where a loss is, and 0 where all make the same updates of one model."""
    distance, agree = run.evaluations["consensus_distance"], run.one_model
    unknown = np.isnan(distance) & np.isfinite(run.evaluations["loss"])
    return check_rows(
        "the workers' weights are the same" if agree else "consensus distances are possible",
        (distance < 0) | unknown | ((distance > 0) & agree),
        lambda i: f"/evaluations row {i} has consensus distance {distance[i]}",
    )


def nobody_acts_after_leaving(run: PeerRecount) -> Check:
    """A worker leaves at most once, and makes no iteration after that; it may still die."""
    steps, seq, departures = run.steps, run.membership["seq"], run.membership["worker"]
    change, before = run.membership["change"], previous(departures)
    again = (before >= 0) & ~((change == Change.DIED) & (change[before] == Change.LEFT))
    both = np.sort(np.append(seq, run.decisions["seq"]))
    return check_all(
        "nobody acts after leaving",
        (np.diff(seq) <= 0, lambda i: f"/membership row {i + 1} has seq {seq[i + 1]}"),
        (both != np.arange(1, len(both) + 1), lambda i: f"of seq {i + 1} there is nothing, or more than one row"),
        (again, lambda i: f"worker {departures[i]} leaves twice"),
        (
            steps["now_s"] > run.left_s[steps["worker"]],
            lambda i: f"{run.told(i)} is reported after its worker left",
        ),
    )


def the_rule_ends_the_run(run: PeerRecount) -> Check:
    """In the end all have left: when the stopping rule held, or earlier if the job or its script says so.

    Workers in step then end with the same iteration, the first one that was enough as they count.
    """
    name, job = "the stopping rule ended the run", run.job
    if not run.finished:
        return Check(name, True, 0)
    stop, updates, evaluations = job.stop, run.updates, run.evaluations
    remains = np.full(run.n_workers, not isinstance(job.workload, Script))  # until the rule holds
    remains[[event.worker for event in job.cluster.events if event.change == "leave"]] = False
    remains[run.died["worker"]] = False
    last_s = max(float(table["now_s"].max(initial=0.0)) for table in (run.rows, updates, evaluations, run.membership))
    outcomes = zip(evaluations["loss"].tolist(), evaluations["accuracy"].tolist(), strict=True)
    ended = stop.reached(seconds=last_s) or any(stop.satisfied(*outcome) for outcome in outcomes)
    most, uneven, late = int(run.made.max(initial=0)), np.zeros(run.n_workers, bool), False
    if run.together and remains.any():
        n_updates = np.arange(1, most + 1) if run.one_model else run.steps_as_counted[1:]
        counts = zip(run.samples_as_counted[1:].tolist(), n_updates.tolist(), strict=True)
        enough = [stop.reached(samples=samples, updates=updates) for samples, updates in counts]
        ended = ended or any(enough[-1:])
        uneven, late = remains & (run.made != most), any(enough[:-1])
    else:
        ended = ended or stop.reached(samples=int(updates["samples"].max(initial=0)), updates=len(updates))
    return check_all(
        name,
        (run.going_on, lambda i: f"worker {i} has not left"),
        (np.array([remains.any() and not ended]), lambda _: "its end was not yet due"),
        (uneven, lambda i: f"worker {i} ended after iteration {run.made[i]}, others after {most}"),
        (np.array([late]), lambda _: f"the workers made iteration {most}, when the one before had been enough"),
    )


CHECKS: tuple[Callable[[PeerRecount], Check], ...] = (
    iterations_count_steps,
    times_are_in_order,
    peers_are_as_drawn,
    given_is_received,
    weights_add_up,
    bytes_are_those_of_an_exchange,
    updates_are_the_steps,
    samples_add_up,
    rates_are_of_the_schedule,
    distances_are_possible,
    nobody_acts_after_leaving,
    the_rule_ends_the_run,
)


def _peer(peer: int) -> str:
    return {ALL_PEERS: "everybody", NO_PEER: "nobody"}.get(int(peer), f"worker {peer}")
