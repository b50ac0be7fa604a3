"""What ASHL promises, counted again from the rows: stages, plans, and what workers then do.

The two algorithms are written out once more here, so that nothing rests on the code that planned the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np

from hpcsync.audit.check import Check, check_all, check_rows
from hpcsync.audit.server_recount import Recount
from hpcsync.config.job import Script
from hpcsync.config.paradigms import AshlOptions
from hpcsync.trace.iteration_counts import NEVER, follow
from hpcsync.trace.schema import Outcome

COARSE, FINE = 1, 2
TIMES = ("iteration_s", "push_s", "pull_s", "encode_s")
LOSS_BETA, CHECKS = 0.1, 5  # of the average loss: weight of the newest, and checks over which a plateau lasts
SAME = 1e-9  # relative difference of numbers that are computed in another order


class Stages:
    """Where the stages of a trace of ASHL begin, and what is in force when.

    begins: `seq` of the rows that begin the coarse and the fine stage; NEVER for one that did not begin.
    """

    def __init__(self, recount: Recount, paradigm: AshlOptions) -> None:
        self.recount = recount
        self.paradigm = paradigm
        options = recount.job.paradigm_options
        self.ratios: dict[int, float | None] = {COARSE: options["ratio_coarse"], FINE: options["ratio_fine"]}
        self.steps = {COARSE: paradigm.steps_coarse, FINE: paradigm.steps_fine}
        self.has_ratios = self.ratios[COARSE] is not None
        self.ratio_profiled = float(self.ratios[COARSE] or 1.0)  # of the sparse pushes of the profile
        rows = recount.decisions
        self.rows = rows[rows["controller"] == b"stage"]
        firsts = [self.rows["seq"][self.rows["chosen"] == stage] for stage in (COARSE, FINE)]
        self.begins = [int(seqs[0]) if len(seqs) else NEVER for seqs in firsts]

    @cached_property
    def applied(self) -> np.ndarray:
        """The pushes that the paradigm heard of."""
        return self.recount.pushes[self.recount.pushes["outcome"] == Outcome.APPLIED]

    def n_active(self, seq: np.ndarray) -> np.ndarray:
        """How many workers took part before each seq."""
        return self.recount.n_active[self.recount.event_at(seq)]

    def in_force(self, controller: bytes, worker: np.ndarray, seq: np.ndarray, first: float) -> np.ndarray:
        """What this controller had last chosen for each of these workers before these seqs; `first` before all."""
        rows = self.recount.decisions[self.recount.decisions["controller"] == controller]
        stride = max(int(self.recount.seqs.max(initial=0)), 0) + 2
        workers = np.arange(self.recount.n_workers)
        key = np.concatenate([workers * stride, rows["worker"] * stride + rows["seq"] + 1])
        order = np.argsort(key, kind="stable")
        chosen = np.concatenate([np.full(len(workers), first), rows["chosen"]])[order]
        return chosen[np.searchsorted(key[order], worker * stride + seq, side="right") - 1]

    def is_sparse(self, iteration: np.ndarray) -> np.ndarray:
        """Which pushes of the profile are sent at the coarse ratio."""
        since = iteration - self.paradigm.warmup
        return self.has_ratios & (since > 0) & (since % 2 == 0)

    def medians(self, worker: int, seq: int) -> list[float]:
        """Of the worker's newest measurements before a plan: seconds of TIMES. Those of pushing and of compressing
        are of the profile's pushes; 0 where there are none."""
        mine = self.applied[(self.applied["worker"] == worker) & (self.applied["seq"] < seq)]
        mine = mine[mine["iteration"] > self.paradigm.warmup]
        profiled = mine[mine["seq"] < self.begins[0]]
        sparse = self.is_sparse(profiled["iteration"])
        columns = (
            mine["compute_s"] / mine["share"] / mine["local_steps"],
            (profiled["comm_s"] - profiled["pull_s"])[~sparse],
            mine["pull_s"],
            profiled["encode_s"][sparse],
        )
        newest = (column[np.isfinite(column) & (column >= 0)][-self.paradigm.profiled :] for column in columns)
        return [float(np.median(column)) if len(column) else 0.0 for column in newest]


def check_stages(recount: Recount, paradigm: AshlOptions) -> list[Check]:
    """The checks of this module. Whether nobody is held before the fine stage is for `bounds`."""
    lacking = {*TIMES, "loss"} - set(recount.decisions.dtype.names or ())
    if lacking:
        return [Check("stages are in order", False, 0, f"/decisions lacks {', '.join(sorted(lacking))}")]
    stages = Stages(recount, paradigm)
    checks = [
        stages_begin_when_they_must(stages),
        plans_follow_from_measurements(stages),
        workers_do_what_is_planned(stages),
        commits_count_their_share(stages),
        *fine_leads_are_bounded(stages),
    ]
    return checks if isinstance(recount.job.workload, Script) else [*checks, samples_are_allocated_once(stages)]


# ---- stages ----------------------------------------------------------------------------------------------------------


def stages_begin_when_they_must(stages: Stages) -> Check:
    """Coarse at the event by which all active workers have been profiled, fine at the commit that makes the loss low
    enough; there is no way back."""
    recount, rows = stages.recount, stages.rows
    needed = stages.paradigm.warmup + stages.paradigm.profiled
    profiled = np.flatnonzero((recount.min_iters >= needed) & (recount.n_active[:-1] > 0))
    loss, switch = _losses(stages)
    due = [int(recount.events["seq"][profiled[0]]) if len(profiled) else NEVER, switch]
    begins = np.array([seq for seq in stages.begins if seq != NEVER], np.int64)
    begun = np.append(recount.events["seq"], -1)[recount.event_at(begins)]
    # Once the run is over nothing begins any more; of one that was killed the last answer may be incomplete.
    last = int(stages.applied["seq"].max(initial=0))
    last_event = int(recount.events["seq"].max(initial=0))
    missing = np.array(
        [seq <= last and (recount.finished or seq < last_event) for seq in due[len(begun) :][:1]], dtype=bool
    )
    told = np.array([np.nan, loss])[: len(rows)]
    names = ("coarse", "fine")
    return check_all(
        "each stage begins once, in order, when it must",
        (
            rows["chosen"] != np.arange(1, len(rows) + 1),
            lambda i: f"stage row {i} of seq {rows['seq'][i]} begins stage {rows['chosen'][i]:g}",
        ),
        (
            begun != np.array(due[: len(begun)], np.int64),
            lambda i: f"the {names[i]} stage begins with the event of seq {begun[i]}, due is {_seq(due[i])}",
        ),
        (missing, lambda i: f"the {names[len(begun)]} stage does not begin, due with seq {due[len(begun)]}"),
        (
            ~_alike(rows["loss"][:2], told),
            lambda i: f"the {names[i]} stage tells a loss of {rows['loss'][i]}, a recount gives {told[i]}",
        ),
    )


def _losses(stages: Stages) -> tuple[float, int]:
    """The average loss of the coarse stage's commits as it was when the fine one is due, and its push's seq."""
    paradigm, loss, n_commits, checked = stages.paradigm, np.nan, 0, []
    pushes = stages.applied[stages.applied["seq"] > stages.begins[0]]
    for push, n_active in zip(pushes, stages.n_active(pushes["seq"]), strict=True):
        if np.isfinite(push["loss"]):
            loss = push["loss"] if np.isnan(loss) else loss + LOSS_BETA * (push["loss"] - loss)
        n_commits += 1
        if n_commits >= n_active and not np.isnan(loss):
            n_commits = 0
            checked.append(loss)
        if paradigm.loss_preset is not None:
            is_low = loss <= paradigm.loss_preset
        else:
            before = checked[-1 - CHECKS] if len(checked) > CHECKS else np.nan
            is_low = before - checked[-1] <= paradigm.plateau * abs(before) if checked else False
        if is_low:
            return float(loss), int(push["seq"])
    return np.nan, NEVER


# ---- plans -----------------------------------------------------------------------------------------------------------


def plans_follow_from_measurements(stages: Stages) -> Check:
    """H, D and R are those of Algorithms 1 and 2 for the medians of what was measured, also when somebody joins; after
    departures D is anew."""
    name, n_rows = "plans follow from what was measured", 0
    for rows in _plans(stages):
        if wrong := _wrong(stages, rows):
            return Check(name, False, n_rows, f"plan of seq {rows['seq'][0]}: {wrong}")
        n_rows += len(rows)
    if missing := _without_new_shares(stages):
        return Check(name, False, n_rows, missing)
    return Check(name, True, n_rows)


def _plans(stages: Stages) -> Iterator[np.ndarray]:
    """The rows of /decisions by the event that brought them."""
    recount, rows = stages.recount, stages.recount.decisions
    event = recount.event_at(rows["seq"])
    edges = [0, *(np.flatnonzero(np.diff(event)) + 1).tolist(), len(rows)] if len(rows) else []
    for begin, end in pairwise(edges):
        if not recount.finished and event[begin] == len(recount.events) - 1:
            return  # the end of the trace may have come while it was being recorded
        yield rows[begin:end]


def _wrong(stages: Stages, rows: np.ndarray) -> str:
    """What is wrong with one event's rows, or nothing."""
    event = int(stages.recount.event_at(rows["seq"][:1])[0])
    active, begins = stages.recount.active(event), rows["controller"][0] == b"stage"
    plans = begins or (event >= 0 and stages.recount.events["joins"][event])
    kinds = [b"share"]
    if plans:
        kinds = [b"local-steps", b"share", *[b"ratio"] * stages.has_ratios]
    expected = [(b"stage", int(rows["worker"][0]))] * begins + [(kind, int(w)) for kind in kinds for w in active]
    if list(zip(rows["controller"].tolist(), rows["worker"].tolist(), strict=True)) != expected:
        return f"it is not of {', '.join(kind.decode() for kind in kinds)} of each of workers {active.tolist()}"
    by = {kind: rows[rows["controller"] == kind] for kind in kinds}
    if not begins and rows["seq"][0] < stages.begins[0]:
        return "nothing is shared in the profile"
    if not plans:
        return _wrong_shares(stages, by[b"share"], stages.in_force(b"local-steps", active, rows["seq"][0], np.nan))
    steps_rows = by[b"local-steps"]
    stage = int(rows["chosen"][0]) if begins else FINE if rows["seq"][0] > stages.begins[1] else COARSE
    if stage not in stages.steps:
        return f"there is no stage {stage}"
    times = np.array([stages.medians(worker, int(rows["seq"][0])) for worker in active.tolist()])
    for kind in (b"local-steps", b"ratio")[: 1 + stages.has_ratios]:
        told = np.stack([by[kind][column] for column in TIMES], axis=1)
        if not _alike(told, times).all():
            return f"{kind.decode()}: medians of {TIMES} are {times.tolist()}, told are {told.tolist()}"
    steps = algorithm_1(times, stages.steps[stage])
    if steps_rows["chosen"].tolist() != steps.tolist():
        return f"local steps are {steps_rows['chosen'].tolist()}, Algorithm 1 gives {steps.tolist()}"
    preset = stages.ratios[stage]
    if preset is not None:
        ratios = algorithm_2(times, steps, preset)
        if not _alike(by[b"ratio"]["chosen"], ratios).all():
            return f"ratios are {by[b'ratio']['chosen'].tolist()}, Algorithm 2 gives {ratios.tolist()}"
    return _wrong_shares(stages, by[b"share"], steps)


def algorithm_1(times: np.ndarray, preset: int) -> np.ndarray:
    """H: as many steps as fit into the time of the worker that is last with `preset`. times: (n_workers, 4), TIMES."""
    step_s, push_s, pull_s, _ = times.T
    comm_s = push_s + pull_s
    last_s = (step_s * preset + comm_s).max()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fitting = (last_s - comm_s) / step_s
    return np.where(np.isfinite(fitting), np.maximum(np.floor(fitting + 0.5), preset), preset)


def algorithm_2(times: np.ndarray, steps: np.ndarray, preset: float) -> np.ndarray:
    """R: what can be sent in the time that is left until the worker is through that is last with `preset`; an element
    with its index takes as long as two."""
    step_s, push_s, pull_s, encode_s = times.T
    rest_s = step_s * steps + encode_s + pull_s
    left_s = (rest_s + push_s * min(2.0 * preset, 1.0)).max() - rest_s
    part = np.divide(left_s, 2.0 * push_s, out=np.ones_like(left_s), where=push_s > 0)
    return np.where(left_s < push_s, np.maximum(part, preset), 1.0)


def _wrong_shares(stages: Stages, rows: np.ndarray, steps: np.ndarray) -> str:
    parts = steps if stages.paradigm.share == "data" else np.ones(len(steps))
    expected = parts / parts.sum()
    if _alike(rows["chosen"], expected).all() and abs(rows["chosen"].sum() - 1) < SAME:
        return ""
    return f"shares are {rows['chosen'].tolist()}, local steps give {expected.tolist()}"


def _without_new_shares(stages: Stages) -> str:
    """The departure, or return, after which D was not chosen anew though the run went on, in words."""
    recount = stages.recount
    shared = set(recount.event_at(recount.decisions["seq"][recount.decisions["controller"] == b"share"]).tolist())
    last = int(stages.applied["seq"].max(initial=0))
    for event in np.flatnonzero(~recount.events["is_push"]).tolist():
        seq, worker = (int(recount.events[column][event]) for column in ("seq", "worker"))
        if stages.begins[0] < seq < last and event not in shared:
            what = "joins" if recount.events["joins"][event] else "has left"
            return f"worker {worker} {what} (seq {seq}), its share is not given anew"
    return ""


# ---- what workers do -------------------------------------------------------------------------------------------------


def workers_do_what_is_planned(stages: Stages) -> Check:
    """Grants say the H and R in force, in the profile one step; and so many steps are in the push then.

    The last push of a worker that leaves may be of fewer.
    """
    recount = stages.recount
    grants, pushes = recount.grants[~recount.is_stop], recount.pushes
    steps = stages.in_force(b"local-steps", grants["worker"], grants["seq"], 1.0)
    ratio = np.full(len(grants), np.nan)
    if stages.has_ratios:
        dense = np.where(stages.is_sparse(grants["iteration"]), stages.ratio_profiled, 1.0)
        ratio = stages.in_force(b"ratio", grants["worker"], grants["seq"], np.nan)
        ratio = np.where(grants["seq"] < stages.begins[0], dense, ratio)
    granted = np.append(recount.grants["local_steps"], 1)[recount.push_permit]  # -1, no grant: the first iteration
    known = (recount.push_permit >= 0) | (pushes["iteration"] == 1)
    return check_all(
        "workers make and send what is planned for them",
        (
            grants["local_steps"] != steps,
            lambda i: f"grant of seq {grants['seq'][i]}: {grants['local_steps'][i]} local steps, not {steps[i]:g}",
        ),
        (
            ~_alike(grants["ratio"], ratio),
            lambda i: f"grant of seq {grants['seq'][i]}: a ratio of {grants['ratio'][i]}, not {ratio[i]}",
        ),
        (~np.isinf(grants["commit_s"]), lambda i: f"grant of seq {grants['seq'][i]} says when to commit"),
        (
            known & (pushes["local_steps"] != granted) & ~(recount.may_be_cut & (pushes["local_steps"] < granted)),
            lambda i: f"push of seq {pushes['seq'][i]}: {pushes['local_steps'][i]} local steps, granted {granted[i]}",
        ),
    )


def commits_count_their_share(stages: Stages) -> Check:
    """An applied push counts D, in the profile one part of as many as there are active workers; others nothing."""
    pushes = stages.recount.pushes
    n_active = stages.n_active(pushes["seq"])
    expected = stages.in_force(b"share", pushes["worker"], pushes["seq"], np.nan)
    expected = np.where(pushes["seq"] < stages.begins[0], 1 / np.maximum(n_active, 1), expected)
    expected = np.where(pushes["outcome"] == Outcome.APPLIED, expected, 0.0)
    return check_rows(
        "commits count their share",
        ~(np.abs(pushes["weight"] - expected) <= SAME * expected),
        lambda i: f"push of seq {pushes['seq'][i]} counts {pushes['weight'][i]}, its share is {expected[i]}",
    )


def samples_are_allocated_once(stages: Stages) -> Check:
    """The run's sequence of samples goes to whoever is granted, none is left out and none given twice."""
    recount, workload = stages.recount, stages.recount.job.workload
    assert not isinstance(workload, Script)
    size = workload.batch_size
    grants, stops = recount.grants[~recount.is_stop], recount.grants[recount.is_stop]
    n_samples = grants["batch_size"].astype(np.int64)
    begin = recount.n_workers * size + np.cumsum(n_samples) - n_samples
    pushes = recount.pushes
    return check_all(
        "samples are dealt out once, and none is left out",
        (
            grants["first_sample"] != begin,
            lambda i: f"grant of seq {grants['seq'][i]} gives from {grants['first_sample'][i]} on, not {begin[i]}",
        ),
        (n_samples != size * grants["local_steps"], lambda i: f"grant of seq {grants['seq'][i]} gives {n_samples[i]}"),
        (stops["first_sample"] != -1, lambda i: f"stop grant of seq {stops['seq'][i]} gives samples"),
        (
            pushes["batch_size"] != size * pushes["local_steps"],
            lambda i: f"push of seq {pushes['seq'][i]} is of {pushes['batch_size'][i]} samples",
        ),
    )


def fine_leads_are_bounded(stages: Stages) -> list[Check]:
    """Of what was granted in the fine stage nobody commits more than staleness + 1 times more often than the slowest;
    and who is held there is further ahead than staleness until it is released."""
    recount, bound = stages.recount, stages.paradigm.staleness
    grants, pushes = recount.grants, recount.pushes
    counts = np.append((grants["seq"] > stages.begins[1]) & ~recount.is_stop, False)[recount.push_permit]
    counting = np.zeros(len(recount.events), bool)
    counting[recount.push_event] = counts
    own, least = follow(recount.n_workers, recount.events, counting)
    own = own[recount.push_event]
    lead = own - least[recount.push_event]
    release = np.append(recount.grant_event, len(recount.events) - 1)[recount.push_grant]
    release = np.minimum(release, recount.left_after(pushes["worker"], recount.push_event))
    blocked = np.flatnonzero((release > recount.push_event) & (pushes["seq"] > stages.begins[1]))
    blocking_lead = own[blocked] - least[release[blocked] - 1]
    return [
        check_rows(
            f"push gap in the fine stage is at most {bound + 1}",
            lead > bound + 1,
            lambda i: f"worker {pushes['worker'][i]} is {lead[i]} ahead after its push of seq {pushes['seq'][i]}",
        ),
        check_rows(
            "nobody is held needlessly in the fine stage",
            blocking_lead <= bound,
            lambda i: (
                f"worker {pushes['worker'][blocked[i]]} is blocked {blocking_lead[i]} ahead, "
                f"seq {pushes['seq'][blocked[i]]}"
            ),
        ),
    ]


def _alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (np.abs(a - b) <= SAME * np.abs(b)) | (np.isnan(a) & np.isnan(b))


def _seq(seq: int) -> str:
    return "never" if seq == NEVER else f"that of seq {seq}"
