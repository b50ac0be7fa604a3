"""Checks of ASHL (Shen et al., IEEE Transactions on Computers 73(1), 2024), recounted from the rows.

They cover the stages, the plans, and whether workers follow these. Both algorithms are implemented again here, so
that nothing depends on the code that planned the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np

from hpcsync.audit.check import SAME, Check, alike, check_all, check_rows
from hpcsync.audit.server_recount import Recount, other_steps
from hpcsync.config.job import Script
from hpcsync.paradigms.ashl import AshlOptions
from hpcsync.paradigms.records import UNUSED
from hpcsync.trace.iteration_counts import NEVER, follow
from hpcsync.trace.schema import Outcome, Rows

COARSE, FINE = 1, 2
TIMES = ("iteration_s", "push_s", "pull_s", "encode_s")
LOSS_BETA, CHECKS = 0.1, 5  # weight of the newest loss in the average; checks over which a plateau lasts


class Stages:
    """Begin of each stage of an ASHL trace, and the plans in force at any time.

    Attributes
    ----------
    begins
        `seq` of the rows that begin the coarse and the fine stage; NEVER for a stage that does not begin.
    """

    def __init__(self, recount: Recount, paradigm: AshlOptions) -> None:
        self.recount = recount
        self.paradigm = paradigm
        options = recount.job.paradigm_options
        self.ratios: dict[int, float | None] = {COARSE: options["ratio_coarse"], FINE: options["ratio_fine"]}
        self.steps = {COARSE: paradigm.steps_coarse, FINE: paradigm.steps_fine}
        self.has_ratios = self.ratios[COARSE] is not None
        self.ratio_profiled = float(self.ratios[COARSE] or 1.0)  # of the sparse pushes in the profile stage
        rows = recount.decisions
        self.rows = rows[rows["controller"] == b"stage"]
        firsts = [self.rows["seq"][self.rows["chosen"] == stage] for stage in (COARSE, FINE)]
        self.begins = [int(seqs[0]) if len(seqs) else NEVER for seqs in firsts]

    @cached_property
    def applied(self) -> Rows:
        """Pushes that were applied."""
        return self.recount.pushes[self.recount.pushes["outcome"] == Outcome.APPLIED]

    @cached_property
    def fine_commits(self) -> tuple[Rows, Rows]:
        """Commits that were granted in the fine stage: of each push's worker so far, and of the slowest after an event.

        Shapes (n_pushes,) and (n_events,).
        """
        recount = self.recount
        counts = (recount.grants["seq"] > self.begins[1]) & ~recount.is_stop
        counting = np.zeros(len(recount.events), bool)
        counting[recount.push_event] = np.append(counts, False)[recount.push_permit]
        own, least = follow(recount.n_workers, recount.events, counting)
        return own[recount.push_event], least

    def n_active(self, seq: Rows) -> Rows:
        """Return the number of active workers before each seq."""
        return self.recount.n_active[self.recount.event_at(seq)]

    def is_sparse(self, iteration: Rows) -> Rows:
        """Return which pushes of the profile stage are sent at the coarse ratio, bool of shape (n,)."""
        since = iteration - self.paradigm.warmup
        return self.has_ratios & (since > 0) & (since % 2 == 0)

    def medians(self, worker: int, seq: int) -> list[float]:
        """Return the medians of a worker's newest measurements before a plan, in seconds, in the order of TIMES.

        Push and compression times come from the pushes of the profile stage. A time without measurements is 0.
        """
        pushes = self.recount.pushes  # those before a plan are applied, or kept back
        mine = pushes[(pushes["worker"] == worker) & (pushes["seq"] < seq)]
        mine = mine[mine["iteration"] > self.paradigm.warmup]
        profiled = mine[mine["seq"] < self.begins[0]]
        sparse = self.is_sparse(profiled["iteration"])
        columns = (
            (mine["load_s"] + mine["compute_s"] / mine["share"]) / mine["local_steps"],
            (profiled["comm_s"] - profiled["pull_s"])[~sparse],
            mine["pull_s"],
            profiled["encode_s"][sparse],
        )
        newest = (column[np.isfinite(column) & (column >= 0)][-self.paradigm.profiled :] for column in columns)
        return [float(np.median(column)) if len(column) else 0.0 for column in newest]


def check_stages(recount: Recount, paradigm: AshlOptions) -> list[Check]:
    """Return the checks of this module.

    `bounds` checks that no worker is blocked before the fine stage.
    """
    lacking = {*TIMES, "loss"} - set(recount.decisions.dtype.names or ())
    if lacking:
        return [Check("stages are in order", False, 0, f"/decisions lacks {', '.join(sorted(lacking))}")]
    stages = Stages(recount, paradigm)
    checks = [
        *([evaluated_losses_are_recorded(recount)] if paradigm.uses_evaluations else []),
        stages_begin_when_they_must(stages),
        plans_follow_from_measurements(stages),
        workers_do_what_is_planned(stages),
        commits_count_their_share(stages),
        *fine_leads_are_bounded(stages),
        commits_are_applied_when_they_may(stages),
    ]
    return checks if isinstance(recount.job.workload, Script) else [*checks, samples_are_allocated_once(stages)]


def evaluated_losses_are_recorded(recount: Recount) -> Check:
    """Check that each loss the paradigm was given is that of an evaluation, in their order and not before it."""
    rows, evaluations, at, wrong = recount.evaluated, recount.evaluations, 0, np.zeros(len(recount.evaluated), bool)
    latest = recount.version_at(rows["seq"])
    for i, row in enumerate(rows):
        same = (evaluations["loss"] == row["chosen"]) | (np.isnan(evaluations["loss"]) & np.isnan(row["chosen"]))
        found = same & (evaluations["now_s"] <= row["now_s"]) & (evaluations["version"] <= latest[i])
        indices = np.flatnonzero(found[at:])
        wrong[i] = not len(indices)
        at += 0 if wrong[i] else int(indices[0]) + 1
    return check_rows(
        "losses that decide are those of evaluations",
        wrong,
        lambda i: f"seq {rows['seq'][i]}: loss {rows['chosen'][i]} is not that of the next evaluation before it",
    )


# ---- stages ----------------------------------------------------------------------------------------------------------


def stages_begin_when_they_must(stages: Stages) -> Check:
    """Check when the stages begin.

    The coarse stage begins at the event after which all active workers have been profiled, the fine one at the commit
    or evaluation that makes the loss low enough. A stage is never left for an earlier one.
    """
    recount, rows = stages.recount, stages.rows
    needed = stages.paradigm.warmup + stages.paradigm.profiled
    profiled = np.flatnonzero((recount.min_iters >= needed) & (recount.n_active[:-1] > 0))
    loss, switch = _losses(stages)
    due = [int(recount.events["seq"][profiled[0]]) if len(profiled) else NEVER, switch]
    begins = np.array([seq for seq in stages.begins if seq != NEVER], np.int64)
    all_seqs = _event_seqs(recount)
    begun = np.append(all_seqs, -1)[np.searchsorted(all_seqs, begins) - 1]
    # No stage begins once the run is over. In a killed run the last answer may be incomplete.
    last = int(stages.applied["seq"].max(initial=0))
    last_event = int(recount.events["seq"].max(initial=0))
    missing = np.array(
        [seq <= last and (recount.finished or seq < last_event) for seq in due[len(begun) :][:1]], dtype=bool
    )
    expected = np.array([np.nan, loss])[: len(rows)]
    names = ("coarse", "fine")
    return check_all(
        "each stage begins once, in order, when due",
        (
            rows["chosen"] != np.arange(1, len(rows) + 1),
            lambda i: f"stage row {i} of seq {rows['seq'][i]} begins stage {rows['chosen'][i]:g}",
        ),
        (
            begun != np.array(due[: len(begun)], np.int64),
            lambda i: f"the {names[i]} stage begins with the event of seq {begun[i]}, due: {_seq(due[i])}",
        ),
        (missing, lambda i: f"the {names[len(begun)]} stage does not begin, it is due with seq {due[len(begun)]}"),
        (
            ~alike(rows["loss"][:2], expected),
            lambda i: f"the {names[i]} stage has loss {rows['loss'][i]}, the recount gives {expected[i]}",
        ),
    )


def _losses(stages: Stages) -> tuple[float, int]:
    """Return the loss at which the fine stage is due, and the seq of the push or evaluation that makes it due."""
    paradigm, loss, n_commits, checked = stages.paradigm, np.nan, 0, []
    if paradigm.uses_evaluations:
        for row in stages.recount.evaluated:
            if row["seq"] > stages.begins[0] and np.isfinite(row["chosen"]):
                checked.append(float(row["chosen"]))
                if _is_low(paradigm, checked[-1], checked):
                    return checked[-1], int(row["seq"])
        return np.nan, NEVER
    pushes = stages.applied[stages.applied["seq"] > stages.begins[0]]
    for push, n_active in zip(pushes, stages.n_active(pushes["seq"]), strict=True):
        if np.isfinite(push["loss"]):
            loss = push["loss"] if np.isnan(loss) else loss + LOSS_BETA * (push["loss"] - loss)
        n_commits += 1
        if n_commits >= n_active and not np.isnan(loss):
            n_commits = 0
            checked.append(loss)
        if _is_low(paradigm, loss, checked):
            return float(loss), int(push["seq"])
    return np.nan, NEVER


def _is_low(paradigm: AshlOptions, loss: float, checked: list[float]) -> bool:
    if paradigm.loss_preset is not None:
        return bool(loss <= paradigm.loss_preset)
    if len(checked) <= CHECKS:
        return False
    before = checked[-1 - CHECKS]
    return bool(before - checked[-1] <= paradigm.plateau * abs(before))


def _event_seqs(recount: Recount) -> Rows:
    """Return `seq` of all events of the paradigm, ascending."""
    return np.sort(np.concatenate([recount.events["seq"], recount.own_events["seq"]]))


# ---- plans -----------------------------------------------------------------------------------------------------------


def plans_follow_from_measurements(stages: Stages) -> Check:
    """Check that H, D and R follow from Algorithms 1 and 2, applied to the medians of the measurements.

    A plan is made for each stage and for each join. A departure changes only D.
    """
    name, n_rows = "plans follow from the measured times", 0
    for rows in _plans(stages):
        if wrong := _wrong(stages, rows):
            return Check(name, False, n_rows, f"plan of seq {rows['seq'][0]}: {wrong}")
        n_rows += len(rows)
    if missing := _without_new_shares(stages):
        return Check(name, False, n_rows, missing)
    return Check(name, True, n_rows)


def _plans(stages: Stages) -> Iterator[Rows]:
    """Yield the rows of /decisions of each event."""
    recount, rows = stages.recount, stages.recount.choices
    seqs = _event_seqs(recount)
    event = np.searchsorted(seqs, rows["seq"]) - 1
    edges = [0, *(np.flatnonzero(np.diff(event)) + 1).tolist(), len(rows)] if len(rows) else []
    for begin, end in pairwise(edges):
        if not recount.finished and event[begin] == len(seqs) - 1:
            return  # the trace may end within these rows
        yield rows[begin:end]


def _wrong(stages: Stages, rows: Rows) -> str:
    """Return what is wrong with the rows of one event, or ""."""
    event = int(stages.recount.event_at(rows["seq"][:1])[0])
    active, begins = stages.recount.active(event), rows["controller"][0] == b"stage"
    plans = begins or (event >= 0 and stages.recount.events["joins"][event])
    kinds = [b"share"]
    if plans:
        kinds = [b"local-steps", b"share", *[b"ratio"] * stages.has_ratios]
    expected = [(b"stage", int(rows["worker"][0]))] * begins + [(kind, int(w)) for kind in kinds for w in active]
    if list(zip(rows["controller"].tolist(), rows["worker"].tolist(), strict=True)) != expected:
        return (
            f"it does not consist of {', '.join(kind.decode() for kind in kinds)} for each of workers {active.tolist()}"
        )
    by = {kind: rows[rows["controller"] == kind] for kind in kinds}
    if not plans:
        return _wrong_shares(
            stages, by[b"share"], stages.recount.in_force("local-steps", active, rows["seq"][:1], np.nan)
        )
    steps_rows = by[b"local-steps"]
    stage = int(rows["chosen"][0]) if begins else FINE if rows["seq"][0] > stages.begins[1] else COARSE
    if stage not in stages.steps:
        return f"there is no stage {stage}"
    times = np.array([stages.medians(worker, int(rows["seq"][0])) for worker in active.tolist()])
    for kind in (b"local-steps", b"ratio")[: 1 + stages.has_ratios]:
        recorded = np.stack([by[kind][column] for column in TIMES], axis=1)
        if not alike(recorded, times).all():
            return f"{kind.decode()}: medians of {TIMES} are {times.tolist()}, recorded are {recorded.tolist()}"
    steps = algorithm_1(times, stages.steps[stage])
    if steps_rows["chosen"].tolist() != steps.tolist():
        return f"local steps are {steps_rows['chosen'].tolist()}, Algorithm 1 gives {steps.tolist()}"
    preset = stages.ratios[stage]
    if preset is not None:
        ratios = algorithm_2(times, steps, preset)
        if not alike(by[b"ratio"]["chosen"], ratios).all():
            return f"ratios are {by[b'ratio']['chosen'].tolist()}, Algorithm 2 gives {ratios.tolist()}"
    return _wrong_shares(stages, by[b"share"], steps)


def algorithm_1(times: Rows, preset: int) -> Rows:
    """Return H, the local steps that fit into the round time of the slowest worker.

    The slowest worker is the one whose round of `preset` steps takes longest.

    Parameters
    ----------
    times
        Seconds, shape (n_workers, 4), columns as in TIMES.

    References
    ----------
    Shen et al. 2024, Algorithm 1.
    """
    step_s, push_s, pull_s, _ = times.T
    comm_s = push_s + pull_s
    last_s = (step_s * preset + comm_s).max()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fitting = (last_s - comm_s) / step_s
    return np.where(np.isfinite(fitting), np.maximum(np.floor(fitting + 0.5), preset), preset)


def algorithm_2(times: Rows, steps: Rows, preset: float) -> Rows:
    """Return R, the share of elements that each worker can send before the slowest one's round ends.

    The slowest worker's round has the ratio `preset`. A sparse element takes as long as two dense ones, because its
    index is sent too.

    Parameters
    ----------
    times
        Seconds, shape (n_workers, 4), columns as in TIMES.
    steps
        Local steps H, shape (n_workers,).

    References
    ----------
    Shen et al. 2024, Algorithm 2.
    """
    step_s, push_s, pull_s, encode_s = times.T
    rest_s = step_s * steps + encode_s + pull_s
    left_s = (rest_s + push_s * (2.0 * preset)).max() - rest_s
    part = np.divide(left_s, 2.0 * push_s, out=np.ones_like(left_s), where=push_s > 0)
    return np.where(left_s < push_s, np.maximum(part, preset), 1.0)


def _wrong_shares(stages: Stages, rows: Rows, steps: Rows) -> str:
    parts = steps if stages.paradigm.share == "data" else np.ones(len(steps))
    expected = parts / parts.sum()
    if alike(rows["chosen"], expected).all() and abs(rows["chosen"].sum() - 1) < SAME:
        return ""
    return f"shares are {rows['chosen'].tolist()}, local steps give {expected.tolist()}"


def _without_new_shares(stages: Stages) -> str:
    """Return the departure or join after which D was not chosen again although the run continued, in words."""
    recount = stages.recount
    shared = set(recount.event_at(recount.decisions["seq"][recount.decisions["controller"] == b"share"]).tolist())
    last = int(stages.applied["seq"].max(initial=0))
    for event in np.flatnonzero(~recount.events["is_push"]).tolist():
        seq, worker = (int(recount.events[column][event]) for column in ("seq", "worker"))
        if stages.begins[0] < seq < last and event not in shared:
            change = "joins" if recount.events["joins"][event] else "has left"
            return f"worker {worker} {change} (seq {seq}), but the shares are not planned again"
    return ""


# ---- workers ---------------------------------------------------------------------------------------------------------


def workers_do_what_is_planned(stages: Stages) -> Check:
    """Check that grants contain the H and R in force, and that pushes have as many local steps.

    In the profile stage H is 1. The last push of a worker that leaves may have fewer steps.
    """
    recount = stages.recount
    grants = recount.grants[~recount.is_stop]
    steps = recount.in_force("local-steps", grants["worker"], grants["seq"], 1.0)
    ratio = np.full(len(grants), np.nan)
    if stages.has_ratios:
        dense = np.where(stages.is_sparse(grants["iteration"]), stages.ratio_profiled, 1.0)
        ratio = recount.in_force("ratio", grants["worker"], grants["seq"], np.nan)
        ratio = np.where(grants["seq"] < stages.begins[0], dense, ratio)
    return check_all(
        "local steps and ratios are as planned",
        (
            grants["local_steps"] != steps,
            lambda i: f"grant of seq {grants['seq'][i]}: {grants['local_steps'][i]} local steps, not {steps[i]:g}",
        ),
        (
            ~alike(grants["ratio"], ratio),
            lambda i: f"grant of seq {grants['seq'][i]}: ratio {grants['ratio'][i]}, not {ratio[i]}",
        ),
        (~np.isinf(grants["commit_s"]), lambda i: f"grant of seq {grants['seq'][i]} has a commit time"),
        other_steps(recount, 1),
    )


def commits_count_their_share(stages: Stages) -> Check:
    """Check that the weight of an applied push is D, and that of others, or of one with a skipped step, 0.

    In the profile stage it is 1 / n_active.
    """
    pushes = stages.recount.pushes
    n_active = stages.n_active(pushes["seq"])
    expected = stages.recount.in_force("share", pushes["worker"], stages.recount.applied_after + 1, np.nan)
    expected = np.where(pushes["seq"] < stages.begins[0], 1 / np.maximum(n_active, 1), expected)
    counts = (pushes["outcome"] == Outcome.APPLIED) & ~np.isin(pushes["problem"], [*UNUSED])
    expected = np.where(counts, expected, 0.0)
    return check_rows(
        "the weight of a commit is its share",
        stages.recount.settled & ~alike(pushes["weight"], expected),
        lambda i: f"push of seq {pushes['seq'][i]} has weight {pushes['weight'][i]}, its share is {expected[i]}",
    )


def samples_are_allocated_once(stages: Stages) -> Check:
    """Check that grants take consecutive parts of the run's sequence of samples."""
    recount, workload = stages.recount, stages.recount.job.workload
    assert not isinstance(workload, Script)
    size = workload.batch_size
    grants, stops = recount.grants[~recount.is_stop], recount.grants[recount.is_stop]
    n_samples = grants["batch_size"].astype(np.int64)
    begin = recount.n_workers * size + np.cumsum(n_samples) - n_samples
    return check_all(
        "each sample is allocated exactly once",
        (
            grants["first_sample"] != begin,
            lambda i: (
                f"grant of seq {grants['seq'][i]} allocates from sample {grants['first_sample'][i]}, not {begin[i]}"
            ),
        ),
        (
            n_samples != size * grants["local_steps"],
            lambda i: f"grant of seq {grants['seq'][i]} allocates {n_samples[i]} samples",
        ),
        (stops["first_sample"] != -1, lambda i: f"stop grant of seq {stops['seq'][i]} allocates samples"),
    )


def fine_leads_are_bounded(stages: Stages) -> list[Check]:
    """Check the leads of commits that were granted in the fine stage.

    A push is at most staleness + 1 commits ahead of the slowest worker. A blocked worker is more than staleness ahead
    until it is released.
    """
    recount, bound = stages.recount, stages.paradigm.staleness
    pushes = recount.pushes
    own, least = stages.fine_commits
    lead = own - least[recount.push_event]
    release = np.append(recount.grant_event, len(recount.events) - 1)[recount.push_grant]
    release = np.minimum(release, recount.left_after(pushes["worker"], recount.push_event))
    blocked = np.flatnonzero((release > recount.push_event) & (pushes["seq"] > stages.begins[1]))
    blocking_lead = own[blocked] - least[release[blocked] - 1]
    return [
        check_rows(
            f"push lead in the fine stage is at most {bound + 1}",
            lead > bound + 1,
            lambda i: f"worker {pushes['worker'][i]} is {lead[i]} ahead after its push of seq {pushes['seq'][i]}",
        ),
        check_rows(
            "no worker is blocked needlessly in the fine stage",
            blocking_lead <= bound,
            lambda i: (
                f"worker {pushes['worker'][blocked[i]]} is blocked {blocking_lead[i]} ahead, "
                f"seq {pushes['seq'][blocked[i]]}"
            ),
        ),
    ]


def commits_are_applied_when_they_may(stages: Stages) -> Check:
    """Check at which event each commit is applied, by the version and the time of its update.

    It is its push. With commit = "after-gate", a commit that is more than staleness ahead of the slowest worker waits
    for the event after which it is not, or for the departure of its worker. One that waits at the end is dropped.
    """
    recount, updates = stages.recount, stages.recount.updates
    pushes, event = recount.pushes, recount.push_event
    own, least = stages.fine_commits
    if stages.paradigm.commit == "after-gate":
        opens = np.searchsorted(least, own - stages.paradigm.staleness)  # it only grows
        event = np.maximum(event, np.minimum(opens, recount.left_after(pushes["worker"], event)))
    dropped = pushes["outcome"] == Outcome.DROPPED
    applied = recount.settled & ~dropped
    version = pushes["version_read"] + pushes["staleness"] + 1  # that its update makes
    known = applied & (version >= 1) & (version <= len(updates))
    due_s = np.append(recount.events["now_s"], np.inf)[np.minimum(event, len(recount.events))]
    made_s = np.append(updates["now_s"], np.nan)[np.where(known, version - 1, len(updates))]
    order = np.flatnonzero(known)[np.argsort(version[known], kind="stable")]
    early = np.zeros(len(pushes), bool)
    early[order[1:]] = np.diff(event[order]) < 0
    return check_all(
        "commits are applied " + ("on arrival" if stages.paradigm.commit == "on-arrival" else "once the gate is open"),
        (
            applied & (made_s != due_s),
            lambda i: f"push of seq {pushes['seq'][i]} is applied at {made_s[i]} s, it may be at {due_s[i]} s",
        ),
        (early, lambda i: f"push of seq {pushes['seq'][i]} is applied after one that has waited for a later event"),
        (
            dropped & (event < event[applied].max(initial=-1)),
            lambda i: f"push of seq {pushes['seq'][i]} is not applied at {due_s[i]} s, although the run continues",
        ),
    )


def _seq(seq: int) -> str:
    return "never" if seq == NEVER else f"that of seq {seq}"
