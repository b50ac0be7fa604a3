"""Invariants of every trace without servers, recounted from its rows.

Only peers and learning rates come from the product's own code: both follow from the job. A check that counts
iterations, or needs to know of an exchange, uses the order of the rows and the job, not a column that another check
examines. Times of different workers are compared up to the uncertainty of their clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hpcsync.audit.averages import averages_are_atomic, averages_are_noticed
from hpcsync.audit.batch_agreement import check_agreed_sizes
from hpcsync.audit.check import DURATIONS, SAME, SAME_TIME_S, Check, Part, check_all, check_rows, describe_columns
from hpcsync.audit.peer_recount import PeerRecount, previous
from hpcsync.audit.progress import evaluations_agree, evaluations_come_when_due
from hpcsync.audit.stanza import check_separation
from hpcsync.audit.training import check_training
from hpcsync.config.compression import DgcOptions, TopKOptions
from hpcsync.config.job import Script
from hpcsync.paradigms.records import ALL_PEERS, NO_PEER
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Change, Rows
from hpcsync.training.lr_schedule import learning_rate, worker_rate

OF_SERVERS = ("pushes", "grants")
TIMES = ("now_s", "begin_s", "end_s")


def check_exchanges(trace: Trace) -> list[Check]:
    """Return all checks of this module.

    If the first one fails, the values cannot be used in computations, and it is the only one returned.
    """
    first = values_are_possible(trace)
    if not first.passed:
        return [first]
    run = PeerRecount(trace)
    in_step = [exchanges_of_all_keep_in_step(run)] if run.together else []
    alone = [] if run.together or run.pairwise else [no_worker_waits(run)]
    shares = [] if run.job.batches.policy == "equal" else check_agreed_sizes(run)
    separated = [] if run.groups is None else check_separation(run, run.groups)
    of_rows = [*(check(run) for check in CHECKS), *in_step, *alone, *shares, *separated]
    return [first, *of_rows, evaluations_come_when_due(trace), *check_training(trace)]


def values_are_possible(trace: Trace) -> Check:
    """Check that workers exist, that durations and counts are not negative, and that tables of servers are empty."""
    rows, updates, membership = (trace.tables[table] for table in ("exchanges", "updates", "membership"))
    n_workers = trace.n_workers
    parts: list[Part] = [
        (np.array([len(trace.tables[table]) > 0]), lambda _, table=table: f"/{table} has rows without a server")  # type: ignore[misc]
        for table in (*OF_SERVERS, *(["decisions"] if trace.job.batches.policy == "equal" else []))
    ]
    unresolved = "fc_workers" in trace.job.paradigm.open_keys
    parts.append(
        (np.array([unresolved]), lambda _: 'paradigm.fc_workers is "auto", but the job of a trace must give the number')
    )
    exist = (rows["worker"] >= 0) & (rows["worker"] < n_workers) & (rows["iteration"] >= 0)
    exist &= (rows["peer"] >= NO_PEER) & (rows["peer"] < n_workers)
    for name in TIMES:
        exist &= np.isfinite(rows[name])
    parts.append((~exist, describe_columns("/exchanges", rows, "worker", "iteration", "peer", *TIMES)))
    counted = (rows["batch_size"] >= 0) & (rows["wire_bytes"] >= 0) & (rows["n_received"] >= 0)
    parts.append((~counted, describe_columns("/exchanges", rows, "batch_size", "wire_bytes", "n_received")))
    measured = (rows["weight"] > 0) & np.isfinite(rows["weight"])
    for name in DURATIONS:
        measured &= (rows[name] >= 0) & np.isfinite(rows[name])
    parts.append((~measured, describe_columns("/exchanges", rows, "weight", *DURATIONS)))
    made = (updates["n_contributions"] >= 1) & np.isfinite(updates["now_s"])
    parts.append((~made, describe_columns("/updates", updates, "version", "n_contributions", "now_s")))
    valid = (membership["worker"] >= 0) & (membership["worker"] < n_workers) & np.isfinite(membership["now_s"])
    valid &= np.isin(membership["change"], [Change.LEFT, Change.DIED])  # without servers no worker joins again
    parts.append((~valid, describe_columns("/membership", membership, "worker", "now_s", "change")))
    return check_all("values are valid", *parts)


def iterations_count_steps(run: PeerRecount) -> Check:
    """Check that a worker's iterations are 1, 2, 3, ..., followed only by the intake of others' pushes.

    That has the number of the last iteration, takes no time, and computes nothing.
    """
    before = previous(run.rows["worker"])
    resumed = (before >= 0) & run.is_step & ~run.is_step[before]
    absorbing = ~run.is_step & (not run.pushes) & (not run.pairwise)
    rest = run.rows[~run.is_step]
    works = (rest["iteration"] != run.made[rest["worker"]]) | (rest["begin_s"] != rest["end_s"])
    works |= ~np.isnan(rest["loss"])
    for name in (*DURATIONS, "problem"):
        works |= rest[name] != 0
    return check_all(
        "iteration is the worker's step count",
        (
            run.steps["iteration"] != run.count,
            lambda i: f"{run.step_name(i)} is the worker's step number {run.count[i]}",
        ),
        (resumed, lambda i: f"/exchanges row {i}: worker {run.rows['worker'][i]} continues after its end"),
        (
            absorbing,
            lambda i: f"/exchanges row {i} has batch size 0, but a worker that has ended receives nothing in this mode",
        ),
        (
            works,
            lambda i: (
                f"/exchanges: a row with batch size 0, of iteration {rest['iteration'][i]} of worker "
                f"{rest['worker'][i]}, which made {run.made[rest['worker'][i]]}, takes time, or is of another iteration"
            ),
        ),
    )


def times_are_in_order(run: PeerRecount) -> Check:
    """Check the order of times.

    A worker loads and computes, exchanges, sends its step info and only then begins again; rows are in the order of
    `now_s`. A worker waits between `begin_s` and `end_s` only under layer separation. After a resume its clock differs
    from before.
    """
    steps, rows = run.steps, run.rows
    before = previous(steps["worker"])
    start = np.searchsorted(run.starts["now_s"], steps["now_s"])
    begin_s = steps["begin_s"] + np.where(start != start[before], 2 * run.uncertain_s, 0.0)  # by the clock before
    begun = begin_s < np.append(steps["end_s"], -np.inf)[before] - SAME_TIME_S  # row -1, none before, is -inf
    took_s = steps["end_s"] - steps["begin_s"]
    spent_s = steps["load_s"] + steps["compute_s"]
    idle_s = took_s - spent_s
    exchanged_s = np.where(run.groups is None, steps["wait_s"] + steps["comm_s"], 0.0)
    until_s = steps["now_s"] + run.uncertain_s  # its step info has arrived, and it may have begun again
    until_s[before[before >= 0]] = np.minimum(until_s[before[before >= 0]], begin_s[before >= 0])
    return check_all(
        "times are in order",
        (
            np.diff(rows["now_s"]) < 0,
            lambda i: f"/exchanges row {i + 1} is at {rows['now_s'][i + 1]} s, the one before at {rows['now_s'][i]} s",
        ),
        (
            (took_s < 0) | (idle_s <= -SAME_TIME_S) | ((idle_s >= SAME_TIME_S) & (run.groups is None)),
            lambda i: f"{run.step_name(i)} loads and computes for {spent_s[i]} s in {took_s[i]} s",
        ),
        (
            steps["end_s"] > steps["now_s"] + run.uncertain_s,
            lambda i: f"{run.step_name(i)} ends at {steps['end_s'][i]} s but is recorded at {steps['now_s'][i]} s",
        ),
        (
            begun,
            lambda i: f"{run.step_name(i)} begins at {steps['begin_s'][i]} s, before the previous iteration has ended",
        ),
        (
            steps["end_s"] + exchanged_s > until_s + SAME_TIME_S,
            lambda i: (
                f"{run.step_name(i)} waits and exchanges for {exchanged_s[i]} s, but there are only "
                f"{until_s[i] - steps['end_s'][i]} s until its row or the next one"
            ),
        ),
    )


def peers_are_as_drawn(run: PeerRecount) -> Check:
    """Check that workers exchange when the job requires it, with the peers that follow from its seed."""
    peer, absorbed = run.steps["peer"], run.rows[~run.is_step]
    return check_all(
        "peers follow from the job and its seed",
        (peer != run.peer, lambda i: f"{run.step_name(i)} has {_peer(peer[i])} as its peer, not {_peer(run.peer[i])}"),
        (absorbed["peer"] != NO_PEER, lambda i: f"worker {absorbed['worker'][i]} exchanges after its end"),
    )


def sent_is_received(run: PeerRecount) -> Check:
    """Check that as many models, or gradients, are received as were sent."""
    name, steps = "as many models are received as sent", run.steps
    if run.pairwise:
        return averages_are_noticed(run, name)
    if not run.pushes:
        sent = run.exchanged.astype(np.int64)
        if run.draws_peers and run.together:
            due = run.count % run.period == 0
            sent = np.where(due, run.sent_together[run.count // run.period, steps["worker"]], 0)
        elif run.groups is not None:
            sent *= np.where(run.is_fc, run.groups.n_fc, run.groups.n_convolution) - 1
        elif not run.draws_peers:
            sent *= run.n_contributing[run.count] - 1
        # In an unfinished run, rows of other workers in an exchange of all may be missing.
        sure = run.finished | run.known(run.count) | ~run.exchanged | run.draws_peers | (run.groups is not None)
        return check_rows(
            name,
            np.where(sure, steps["n_received"] != sent, steps["n_received"] < sent),
            lambda i: f"{run.step_name(i)} received {steps['n_received'][i]}, {sent[i]} were sent",
        )
    # Count only workers that survived: models sent to the others may be lost with them.
    survive = ~np.isin(np.arange(run.n_workers), run.died["worker"])
    n_sent = np.bincount(run.peer[run.exchanged], minlength=run.n_workers) * survive
    n_received = np.bincount(run.rows["worker"], run.rows["n_received"], minlength=run.n_workers).astype(int) * survive
    # In an unfinished run, the row of each worker whose last model was already received may be missing.
    unrecorded = int(run.unrecorded.sum()) + (0 if run.finished else run.n_workers)
    wrong = (n_received > n_sent + unrecorded) | ((n_received < n_sent) & run.finished)
    total = f"{n_sent.sum():,} were pushed, {n_received.sum():,} received"
    check = check_all(
        name,
        (wrong, lambda w: f"{n_sent[w]:,} were pushed to worker {w}, {n_received[w]:,} received"),
        (np.array([n_received.sum() > n_sent.sum() + unrecorded]), lambda _: total),
    )
    return replace(check, n_checked=len(run.rows))


def weights_add_up(run: PeerRecount) -> Check:
    """Check the push-sum weights; without push-sum, that each weight is 1, or the numbers of averages of pairs.

    A push sends half of the weight, and only received models add to it. At the end the weights sum to the number of
    workers, except for the weight of workers that died and of models sent to them.
    """
    if run.pairwise:
        return averages_are_atomic(run)
    rows, weight = run.rows, run.rows["weight"]
    if not run.method.push_sum:
        return check_rows("weights are 1", weight != 1.0, lambda i: f"/exchanges row {i} has weight {weight[i]}")
    if run.together:
        expected = run.weights_together[run.count // run.period, run.steps["worker"]]
        return check_rows(
            "push-sum weights add up",
            weight[run.is_step] != expected,
            lambda i: f"{run.step_name(i)} has weight {run.steps['weight'][i]}, it follows that it is {expected[i]}",
        )
    pushed = np.zeros(len(rows), bool)
    pushed[run.is_step] = run.exchanged
    kept = np.append(weight, 1.0)[previous(rows["worker"])] * np.where(pushed, 0.5, 1.0)  # before its first row it is 1
    wrong = np.where(rows["n_received"] == 0, weight != kept, weight <= kept)
    last = np.ones(run.n_workers)
    last[rows["worker"]] = weight  # the last row of a worker wins
    dead = run.died["worker"]
    died = np.isin(np.arange(run.n_workers), dead)
    total = float(last[~died].sum())
    # The survivors have their initial weights and what the dead workers sent them, without what they sent to these. The
    # pushes of the dead workers that have no row may have arrived too: the last one of each, or any part of what is
    # missing.
    sent_by_dead, sent_to_dead = np.isin(run.steps["worker"], dead), np.isin(run.peer, dead)
    gained = (sent_by_dead.astype(float) - sent_to_dead)[run.exchanged] @ kept[run.is_step][run.exchanged]
    expected = [np.count_nonzero(~died) + float(gained)]
    for half in last[died] / 2:
        expected += [weight + half for weight in expected]
    lost = min(abs(total - weight) for weight in expected)
    if (run.unrecorded > 1).any():
        lost = max(expected[0] - total, total - run.n_workers)
    return check_all(
        "push-sum weights add up",
        (wrong, lambda i: f"/exchanges row {i}: worker {rows['worker'][i]} has weight {weight[i]}, it kept {kept[i]}"),
        (
            np.array([run.finished and lost > SAME * run.n_workers]),
            lambda _: f"at the end the sum of the workers' weights is {total}, not {expected[0]}",
        ),
    )


def bytes_are_those_of_an_exchange(run: PeerRecount) -> Check:
    """Check the bytes of each exchange: none without an exchange, and equal ones, more than none, for equal exchanges.

    A worker that is alone moves none. With a codec whose number of sent elements varies, equally many elements, of at
    least four bytes each, go to each of the other workers.
    """
    moved, exchanged = run.steps["wire_bytes"], run.exchanged
    labels = np.zeros(len(moved), np.int64)
    if not run.draws_peers:
        labels = run.steps["worker"] * (run.n_workers + 1) + np.minimum(run.steps["n_received"], run.n_workers)
    labels = np.where(exchanged, labels, -1)
    _, first, place = np.unique(labels, return_index=True, return_inverse=True)
    expected = np.where(exchanged, moved[first[place]], 0) if len(moved) else moved
    n_others = run.n_workers - np.searchsorted(run.died["now_s"], run.steps["now_s"], side="right") - 1
    if isinstance(run.job.compression, TopKOptions | DgcOptions):
        unit = 4 * np.maximum(n_others, 1)
        expected = np.where(n_others > 0, np.maximum(moved - moved % unit, unit), expected)
    absorbed = run.rows[~run.is_step]
    return check_all(
        "exchanges of one kind have equal wire_bytes",
        (moved != expected, lambda i: f"{run.step_name(i)} moved {moved[i]} bytes, expected {expected[i]}"),
        (exchanged & (n_others > 0) & (moved <= 0), lambda i: f"{run.step_name(i)} exchanged, but moved no bytes"),
        (
            absorbed["wire_bytes"] != 0,
            lambda i: f"worker {absorbed['worker'][i]} moved {absorbed['wire_bytes'][i]} bytes after its end",
        ),
    )


def exchanges_of_all_keep_in_step(run: PeerRecount) -> Check:
    """Check that no worker computes on the result of an exchange of all before all have computed their parts.

    Under layer separation, an exchange is of all workers of a group.
    """
    group = run.is_fc.astype(int)
    latest_s = np.full((2, len(run.n_contributing)), -np.inf)
    np.maximum.at(latest_s, (group, run.count), run.steps["end_s"] - run.uncertain_s)
    before = run.count - 1
    wrong = (before % run.period == 0) & (run.steps["begin_s"] + run.uncertain_s < latest_s[group, before])
    return check_rows(
        "no worker begins before all have exchanged",
        wrong,
        lambda i: (
            f"{run.step_name(i)} begins at {run.steps['begin_s'][i]} s, before all have ended iteration {before[i]}"
        ),
    )


def no_worker_waits(run: PeerRecount) -> Check:
    """Check that no worker waits for others at an exchange.

    It tells asynchronous gossip from synchronous gossip, whose workers record how long they wait for the last one.
    """
    wait_s = run.rows["wait_s"]
    return check_rows(
        "no worker waits for others",
        wait_s > 0,
        lambda i: f"/exchanges row {i}: worker {run.rows['worker'][i]} waits for {wait_s[i]} s",
    )


def updates_are_the_steps(run: PeerRecount) -> Check:
    """Check that versions are 1, 2, 3, ... and that each is made when its steps are recorded.

    A version of all-reduce is an iteration of all workers, any other one a step of one worker.
    """
    updates, due_s = run.updates, run.updated_s
    n = min(len(updates), len(due_s))
    taken = np.bincount(run.update_of, run.samples > 0, minlength=n + 1)[1 : n + 1].astype(int)
    last_s = max(float(table["now_s"].max(initial=-np.inf)) for table in (run.rows, run.membership))
    missing_s = due_s[n:]
    return check_all(
        "updates are the workers' steps",
        (
            updates["version"] != np.arange(1, len(updates) + 1),
            lambda i: f"/updates row {i} has version {updates['version'][i]}",
        ),
        (
            updates["n_contributions"][:n] != taken,
            lambda i: f"version {i + 1} has {updates['n_contributions'][i]} contributions, {taken[i]} were recorded",
        ),
        (
            updates["now_s"][:n] != due_s[:n],
            lambda i: f"version {i + 1} is at {updates['now_s'][i]} s, its contributions were recorded at {due_s[i]} s",
        ),
        (np.ones(len(updates) - n, bool), lambda i: f"no recorded step made version {n + i + 1}"),
        (
            (missing_s < last_s) | run.finished,
            lambda i: f"version {n + i + 1} is missing, its contributions were recorded at {missing_s[i]} s",
        ),
    )


def rates_are_of_the_schedule(run: PeerRecount) -> Check:
    """Check the learning rate of each update.

    Without one common model, each worker counts its own samples and iterations.
    """
    if run.one_model:
        return _rates_are_of_one_model(run)
    rate, steps, first = worker_rate(run.job), run.steps, run.first_step_of[: len(run.updates)]
    own = np.zeros(len(steps), np.int64)  # samples of the worker before the step
    order = np.argsort(steps["worker"], kind="stable")
    summed = np.cumsum(steps["batch_size"][order], dtype=np.int64) - steps["batch_size"][order]
    begins = np.searchsorted(steps["worker"][order], np.arange(run.n_workers))
    own[order] = summed - np.append(summed, 0)[begins][steps["worker"][order]]
    clocks = zip(own[first].tolist(), (run.count[first] - 1).tolist(), strict=True)
    expected = np.array([rate(samples, iterations) for samples, iterations in clocks]) * _own_rates(run, steps[first])
    return _same_rates(run.updates["lr"][: len(expected)], expected)


def _rates_are_of_one_model(run: PeerRecount) -> Check:
    rate, samples = learning_rate(run.job), np.append(0, run.updates["samples"])[:-1].tolist()
    expected = np.array([rate(before, version, run.n_workers) for version, before in enumerate(samples)])
    n = len(run.first_step_of[: len(run.updates)])
    own = np.bincount(run.update_of, _own_rates(run, run.steps)) / np.maximum(np.bincount(run.update_of), 1)
    return _same_rates(run.updates["lr"][:n], expected[:n] * own[1 : n + 1])


def _own_rates(run: PeerRecount, steps: Rows) -> Rows:
    """Return the rates of the scripts' optimizers, of which the schedule gives a factor; 1 without a script.

    Where it is not recorded, it is the rate at the begin.
    """
    if not isinstance(run.job.workload, Script):
        return np.ones(len(steps))
    return np.where(np.isnan(steps["lr"]), run.job.optimizer.lr, steps["lr"])


def _same_rates(lr: Rows, expected: Rows) -> Check:
    return check_rows(
        "learning rates follow the schedule",
        ~np.isclose(lr, expected, rtol=1e-12, atol=0.0),
        lambda i: f"version {i + 1} has learning rate {lr[i]}, the schedule gives {expected[i]}",
    )


def samples_add_up(run: PeerRecount) -> Check:
    """Check that /updates sums the batch sizes of its steps and that /evaluations agrees with /updates.

    Synchronous workers publish their replicas when they have made them; their rows are recorded later, or in an
    unfinished run not at all.
    """
    updates, evaluations = run.updates, run.evaluations
    order = np.argsort(run.update_of, kind="stable")
    last = np.searchsorted(run.update_of[order], np.arange(1, min(len(updates), len(run.updated_s)) + 1), side="right")
    counted = np.cumsum(run.samples[order], dtype=np.int64)[last - 1]
    if run.together and not run.finished:
        evaluations = evaluations[evaluations["version"] <= len(updates)]
    return check_all(
        "sample counts add up",
        (
            updates["samples"][: len(counted)] != counted,
            lambda i: f"version {i + 1} has {updates['samples'][i]} samples, its steps have {counted[i]}",
        ),
        evaluations_agree(evaluations, updates, run.possible_s if run.together else updates["now_s"]),
    )


def distances_are_possible(run: PeerRecount) -> Check:
    """Check that a distance is not negative, known where a loss is, and 0 where all replicas get the same updates.

    With separated layers only that of the last evaluation of a finished run is known.
    """
    distance, agree = run.evaluations["consensus_distance"], run.one_model
    unknown = np.isnan(distance) & np.isfinite(run.evaluations["loss"])
    if run.job.paradigm.separates_layers:
        unknown[: -1 if run.finished else None] = False
    return check_rows(
        "all replicas have equal weights" if agree else "consensus distances are valid",
        (distance < 0) | unknown | ((distance > 0) & agree),
        lambda i: f"/evaluations row {i} has consensus distance {distance[i]}",
    )


def no_worker_acts_after_leaving(run: PeerRecount) -> Check:
    """Check that a worker leaves at most once and makes no iteration afterwards. It may still die."""
    steps, seq, departures = run.steps, run.membership["seq"], run.membership["worker"]
    change, before = run.membership["change"], previous(departures)
    again = (before >= 0) & ~((change == Change.DIED) & (change[before] == Change.LEFT))
    both = np.sort(np.append(seq, run.decisions["seq"]))
    return check_all(
        "no worker acts after it leaves",
        (np.diff(seq) <= 0, lambda i: f"/membership row {i + 1} has seq {seq[i + 1]}"),
        (
            np.diff(run.membership["now_s"]) < 0,
            lambda i: f"/membership row {i + 1} is before row {i}: {run.membership['now_s'][i + 1]} s",
        ),
        (both != np.arange(1, len(both) + 1), lambda i: f"seq {i + 1} has no row, or more than one"),
        (again, lambda i: f"worker {departures[i]} leaves twice"),
        (
            steps["now_s"] > run.left_s[steps["worker"]],
            lambda i: f"{run.step_name(i)} is recorded after its worker left",
        ),
    )


def _made_before_last_start(run: PeerRecount) -> int:
    """Return the iterations that each worker had made when a synchronous run last resumed; 0 if it never did."""
    if len(run.starts) < 2:
        return 0
    return int(run.steps["iteration"][run.steps["now_s"] <= run.starts["now_s"][-1]].max(initial=0))


def stopping_rule_ends_the_run(run: PeerRecount) -> Check:
    """Check the end of the run.

    All workers have left in the end: when the stopping rule held, or earlier if the job or its script ends a worker.
    Synchronous workers end after the same iteration, the first one whose counts satisfy the rule. A resumed run may
    have another rule than before: only iterations after the last resume are compared with it.
    """
    name, job = "the stopping rule ended the run", run.job
    if not run.finished:
        return Check(name, True, 0)
    stop, updates, evaluations = job.stop, run.updates, run.evaluations
    remains = np.full(run.n_workers, not isinstance(job.workload, Script))  # workers that stay until the rule holds
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
        uneven, late = remains & (run.made != most), any(enough[_made_before_last_start(run) : -1])
    else:
        ended = ended or stop.reached(samples=int(updates["samples"].max(initial=0)), updates=len(updates))
    return check_all(
        name,
        (run.remaining, lambda i: f"worker {i} has not left"),
        (np.array([remains.any() and not ended]), lambda _: "the run ended before the stopping rule held"),
        (uneven, lambda i: f"worker {i} ended after iteration {run.made[i]}, others after {most}"),
        (np.array([late]), lambda _: f"the workers made iteration {most}, but the rule held after the previous one"),
    )


CHECKS: tuple[Callable[[PeerRecount], Check], ...] = (
    iterations_count_steps,
    times_are_in_order,
    peers_are_as_drawn,
    sent_is_received,
    weights_add_up,
    bytes_are_those_of_an_exchange,
    updates_are_the_steps,
    samples_add_up,
    rates_are_of_the_schedule,
    distances_are_possible,
    no_worker_acts_after_leaving,
    stopping_rule_ends_the_run,
)


def _peer(peer: int) -> str:
    return {ALL_PEERS: "all workers", NO_PEER: "no worker"}.get(int(peer), f"worker {peer}")
