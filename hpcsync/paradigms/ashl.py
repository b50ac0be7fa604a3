"""ASHL (Shen et al., IEEE Transactions on Computers 73(1), 2024): local steps as many as fit, first many, then few.

Workers make steps of their own and commit the change of their weights. Each makes so many steps, and sends such a part
of the change, that all are expected to need the same time (`planning.local_steps`). Three stages:

    profile  each push is of one step, nobody waits. What a step, a pull, a push and a compression take is measured.
    coarse   (AHL) H for `steps_coarse` and R for `ratio_coarse`, nobody waits
    fine     (SHL) H for `steps_fine` and R for `ratio_fine`; and whoever has committed more than `staleness` times
             more often than the slowest, since the stage began, waits for it

Where the paper (Algorithm 3) leaves it open, a letter in this file marks the branch that settles it:

    a  the loss is an average over commits: 0.9 of what it was and 0.1 of the newest; losses that are not finite say
       nothing, so that a run without losses stays coarse
    b  the switch to fine is for good, lest an average at the limit switch back and forth
    c  a commit counts D at the time that it is applied, whatever stage its steps were granted in
    d  what a worker commits in the fine stage counts for the gate if it began it there: one at the switch may still be
       at its coarse round, and the others wait for that round and the next rather than run away
    e  who has been profiled goes on as before until all are; the newest pushes are what is measured
    f  H and R of the fine stage are of steps and pulls as they were last measured; pushes and compressions as profiled,
       since sparse pushes do not show what a dense one takes
    g  when a worker leaves, those who stay share its part of the data; their H and R stay
    h  when one joins, all get new H, R and D of the present stage, from the newest measurements; one that has not been
       measured makes H_preset steps and sends all. In the profile it counts as profiled as far as the others
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from statistics import median

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Action, Apply, Decision, Grant, Pushed
from hpcsync.paradigms.staleness_gate import Gate
from hpcsync.paradigms.worker_counts import WorkerCounts
from hpcsync.planning.checks import is_number, is_whole
from hpcsync.planning.local_steps import INDEXED, WorkerProfile, local_steps, ratios, shares

PROFILE, COARSE, FINE = 0, 1, 2  # stages
SHARES = ("data", "equal")

LOSS_BETA = 0.1  # weight of the newest commit in the loss
CHECKS = 5  # of the loss, one every so many commits as there are workers, over which a plateau must last

_NO_TIMES = (math.nan,) * 4


class ASHL(Paradigm):
    """Local steps and compression ratios by worker, an asynchronous coarse stage and a bounded fine one.

    steps_coarse, steps_fine: local steps of the slowest worker, from 1 on and no more of them in the fine stage.
    staleness:    of the fine stage, in commits; a whole number from 0 on, or math.inf.
    ratio_coarse, ratio_fine: the share of a push's elements that the slowest worker sends, above 0 and up to 1; both
                  None: nobody is told any.
    loss_preset:  the fine stage begins as soon as the average loss is no larger. None: as soon as it is on a plateau.
    plateau:      it is when it has improved by no more than this share of itself over the last CHECKS checks.
    share:        what a commit counts. "data": D, the worker's part of the samples by its H. "equal": as many parts
                  as there are active workers, as everywhere in the profile.
    warmup:       first pushes of each worker that are not measured.
    profiled:     pushes of each worker that are. With ratios every other one, from the second on, is sent at
                  `ratio_coarse` to measure what compressing takes, and the others, all, to measure the link.

    When a stage begins, Decisions say so: "stage", of the worker whose event it was, with the loss; then for each
    active worker "local-steps" (H), for each "share" (what it counts) and, with ratios, for each "ratio" (R). H and R
    come with the medians of seconds that they were chosen from, 0 where nothing was measured. Departures from then on
    give new rows "share", and who joins new rows of all three.
    """

    name = "ashl"
    decision_fields = {
        "iteration_s": ("s", "Median duration of a local step of the worker; 0 where nothing was measured."),
        "push_s": ("s", "Median duration of sending an uncompressed push; 0 where nothing was measured."),
        "pull_s": ("s", "Median duration of reading the weights; 0 where nothing was measured."),
        "encode_s": ("s", "Median duration of compressing a push; 0 where nothing was measured."),
        "loss": ("1", "Smoothed loss at which the stage began; NaN for other controllers than stage."),
    }

    def __init__(
        self,
        n_workers: int,
        *,
        steps_coarse: int = 16,
        steps_fine: int = 4,
        staleness: float = 2,
        ratio_coarse: float | None = 0.05,
        ratio_fine: float | None = 0.1,
        loss_preset: float | None = None,
        plateau: float = 0.01,
        share: str = "data",
        warmup: int = 10,
        profiled: int = 20,
    ) -> None:
        super().__init__(n_workers)
        for name, value, least in (
            ("steps_coarse", steps_coarse, 1),
            ("steps_fine", steps_fine, 1),
            ("warmup", warmup, 0),
            ("profiled", profiled, 2),
        ):
            if not (is_whole(value) and value >= least):
                raise ValueError(f"{name} is {value}; a whole number from {least} on is needed")
        if steps_fine > steps_coarse:
            raise ValueError(f"steps_fine is {steps_fine}, more than steps_coarse, {steps_coarse}")
        for name, ratio in (("ratio_coarse", ratio_coarse), ("ratio_fine", ratio_fine)):
            if ratio is not None and not (is_number(ratio) and 0 < ratio <= 1):
                raise ValueError(f"{name} is {ratio}; a number above 0 and up to 1, or None, is needed")
        if (ratio_coarse is None) != (ratio_fine is None):
            raise ValueError(f"ratio_coarse is {ratio_coarse} and ratio_fine {ratio_fine}; both or none are needed")
        if loss_preset is not None and not is_number(loss_preset):
            raise ValueError(f"loss_preset is {loss_preset}; a number or None is needed")
        if not (is_number(plateau) and 0 < plateau < 1):
            raise ValueError(f"plateau is {plateau}; a number above 0 and below 1 is needed")
        if share not in SHARES:
            raise ValueError(f"share is {share!r}; one of {', '.join(SHARES)} is needed")
        self.stage = PROFILE
        self._presets = {COARSE: (steps_coarse, ratio_coarse), FINE: (steps_fine, ratio_fine)}
        self._loss_preset = loss_preset
        self._plateau = plateau
        self._by_data = share == "data"
        self._warmup = warmup
        self._profiled = profiled
        # The newest measurements of each worker.
        self._times_s = [
            {name: deque[float](maxlen=profiled) for name in WorkerProfile._fields} for _ in range(n_workers)
        ]
        # The plan, of the active workers, once there is one.
        self._steps: dict[int, int] = {}
        self._shares: dict[int, float] = {}
        self._ratios: dict[int, float] = {}
        self._loss = math.nan
        self._commits = 0  # since the last check
        self._checked: deque[float] = deque(maxlen=CHECKS + 1)
        self._begun: set[int] = set()  # workers that have been granted something in the fine stage
        self._fine = WorkerCounts(n_workers)  # commits of what was granted there
        self._gate = Gate(self._fine, staleness)

    def first(self, worker: int) -> Grant:
        return Grant(worker, 1, 0, 0, 0.0, local_steps=1, ratio=self._profile_ratio(1))

    def check(self) -> None:
        """Assert the invariants: those of every paradigm, the plan's, and the gate's."""
        super().check()
        self._fine.check()
        active, blocked, fine = self._progress.active, self._blocked_since_s, self._fine.pushes
        assert self._fine.active == active, "the gate waits for workers that have left"
        if self.stage != PROFILE and active:
            steps_least, ratio_least = self._presets[self.stage]
            assert self._steps.keys() == self._shares.keys() == active, "the plan is not that of the active workers"
            assert min(self._steps.values()) >= steps_least, f"steps of {self._steps}, fewer than {steps_least}"
            assert abs(math.fsum(self._shares.values()) - 1) < 1e-9, f"shares of {self._shares} are not 1 in all"
            if ratio_least is not None:
                assert self._ratios.keys() == active, "the ratios are not those of the active workers"
                assert all(ratio_least <= ratio <= 1 for ratio in self._ratios.values()), f"ratios of {self._ratios}"
        if self.stage != FINE:
            assert not blocked, f"workers {sorted(blocked)} are held outside of the fine stage"
            assert not any(fine), f"commits of {fine} outside of the fine stage"
        self._gate.check(blocked, self._gate.staleness)

    def _pushed(self, event: Pushed) -> list[Action]:
        worker = event.worker
        self._measure(event)
        share = 1 / len(self._progress.active) if self.stage == PROFILE else self._shares[worker]  # (c)
        if self.stage == COARSE:
            self._observe_loss(event.loss)
        if worker in self._begun:  # (d)
            self._fine.push(worker)
        rows = self._advance(worker)
        return [Apply((worker,), (share,)), *rows, *self._answer(worker), *self._gate.release(self._continue)]

    def _left(self, worker: int) -> list[Action]:
        self._fine.leave(worker)
        self._gate.leave(worker)
        for plan in (self._steps, self._shares, self._ratios):
            plan.pop(worker, None)
        if not self._progress.active:
            return []
        rows = self._advance(worker) if self.stage == PROFILE else self._share()  # (g)
        return [*rows, *self._gate.release(self._continue)]

    def _joined(self, worker: int) -> list[Action]:
        self._fine.join(worker)
        rows = [] if self.stage == PROFILE else self._plan()  # (h)
        return [*rows, *self._answer(worker)]

    def _answer(self, worker: int) -> list[Action]:
        """Grant or hold the worker that has just pushed, or joined."""
        if self._gate.is_open(worker):
            return [self._continue(worker)]
        self._hold(worker)
        self._gate.hold(worker)
        return []

    def _continue(self, worker: int) -> Grant:
        if self.stage == PROFILE:
            ratio = self._profile_ratio(self._progress.pushes[worker] + 1)  # (e)
            return replace(self._grant(worker), local_steps=1, ratio=ratio)
        if self.stage == FINE:
            self._begun.add(worker)
        ratio = self._ratios.get(worker, math.nan)
        return replace(self._grant(worker), local_steps=self._steps[worker], ratio=ratio)

    def _is_sparse(self, iteration: int) -> bool:
        """Whether this push of the profile measures compressing and not the link."""
        since = iteration - self._warmup
        return self._presets[COARSE][1] is not None and since > 0 and since % 2 == 0

    def _profile_ratio(self, iteration: int) -> float:
        _, ratio = self._presets[COARSE]
        if ratio is None:
            return math.nan
        return ratio if self._is_sparse(iteration) else 1.0

    def _measure(self, event: Pushed) -> None:
        iteration = self._progress.pushes[event.worker]
        if iteration <= self._warmup:
            return
        measured = {"iteration_s": event.iteration_s / event.local_steps, "pull_s": event.pull_s}
        if self.stage == PROFILE:  # (f)
            sparse = self._is_sparse(iteration)
            measured |= {"encode_s": event.encode_s} if sparse else {"push_s": event.push_s}
        for name, time_s in measured.items():
            if 0 <= time_s < math.inf:
                self._times_s[event.worker][name].append(time_s)

    def _observe_loss(self, loss: float) -> None:
        """(a) A commit of the coarse stage."""
        if math.isfinite(loss):
            self._loss = loss if math.isnan(self._loss) else self._loss + LOSS_BETA * (loss - self._loss)
        self._commits += 1
        if self._commits >= len(self._progress.active) and not math.isnan(self._loss):
            self._commits = 0
            self._checked.append(self._loss)

    def _advance(self, worker: int) -> list[Decision]:
        """Begin the next stage if it is time, by this worker's event. (b) There is no way back."""
        if self.stage == PROFILE and self._progress.min_iters >= self._warmup + self._profiled:
            return self._begin(COARSE, worker)
        if self.stage == COARSE and self._is_low():
            return self._begin(FINE, worker)
        return []

    def _is_low(self) -> bool:
        if self._loss_preset is not None:
            return self._loss <= self._loss_preset
        if len(self._checked) <= CHECKS:
            return False
        return self._checked[0] - self._checked[-1] <= self._plateau * abs(self._checked[0])

    def _begin(self, stage: int, worker: int) -> list[Decision]:
        self.stage = stage
        return [Decision("stage", worker, float(stage), (*_NO_TIMES, self._loss)), *self._plan()]

    def _plan(self) -> list[Decision]:
        """Make the plan of this stage from the newest measurements."""
        steps_preset, ratio_preset = self._presets[self.stage]
        active = sorted(self._progress.active)
        profiles = [
            WorkerProfile(**{name: median(times_s) if times_s else 0.0 for name, times_s in self._times_s[i].items()})
            for i in active
        ]
        steps = local_steps(profiles, steps_preset)
        self._steps = dict(zip(active, steps, strict=True))
        rows = [
            Decision("local-steps", i, float(n), (*profile, math.nan))
            for i, n, profile in zip(active, steps, profiles, strict=True)
        ]
        rows += self._share()
        if ratio_preset is not None:
            self._ratios = dict(zip(active, ratios(profiles, steps, ratio_preset, INDEXED), strict=True))
            rows += [
                Decision("ratio", i, self._ratios[i], (*profile, math.nan))
                for i, profile in zip(active, profiles, strict=True)
            ]
        return rows

    def _share(self) -> list[Decision]:
        """Give the active workers, whose steps are known, their parts of the data."""
        active = sorted(self._steps)
        parts = shares([self._steps[i] if self._by_data else 1 for i in active])
        self._shares = dict(zip(active, parts, strict=True))
        return [Decision("share", i, part, (*_NO_TIMES, math.nan)) for i, part in self._shares.items()]
