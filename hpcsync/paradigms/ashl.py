"""ASHL: local steps and compression ratios fitted to each worker, first many steps without a bound, then few with one.

Workers make local steps and commit the change of their weights. The number of steps H and the share R of the change
that each worker sends are chosen so that all workers are expected to take the same time
(`hpcsync.planning.local_steps`). There are three stages::

    profile  each push is of one step, no worker blocks. Steps, pulls, pushes and compressions are timed.
    coarse   (AHL) H for `steps_coarse` and R for `ratio_coarse`, no worker blocks
    fine     (SHL) H for `steps_fine` and R for `ratio_fine`; a worker that, since the stage began, has committed more
             than `staleness` times more often than the slowest blocks until the slowest has caught up; its commit is
             applied on arrival or, with commit = "after-gate", when it is released

Notes
-----
Where the paper (Algorithm 3) leaves it open, a letter in this file marks the branch that settles it::

    a  the loss is a moving average over commits, 0.9 of the old value and 0.1 of the newest; losses that are not finite
       are ignored, so a run without losses stays coarse
    b  the switch to fine is final, so that an average near the limit does not switch back and forth
    c  a commit counts D at the time that it is applied, whatever stage its steps were granted in; one that is kept back
       counts for the gate and is measured on arrival
    d  a commit counts for the gate of the fine stage if its worker began it there: a worker may still be in its coarse
       round at the switch, and the others wait for that round and the next
    e  a profiled worker continues as before until all are profiled; the newest pushes are measured
    f  H and R of the fine stage use the latest times of steps and pulls; pushes and compressions are those of the
       profile, since sparse pushes do not show the time of a dense one
    g  when a worker leaves, the others share its part of the data; their H and R stay
    h  when a worker joins, all get new H, R and D of the present stage from the newest measurements; an unmeasured
       worker makes H_preset steps and sends everything. In the profile it counts as profiled as far as the slowest
    i  with loss = "evaluation" the loss is that of the servers' model on held-out data, as evaluated latest since the
       coarse stage began; a plateau is one over CHECKS evaluations, and the fine stage begins when an evaluation ends
    j  in lines 4 to 11 a worker of the fine stage that is too far ahead waits, and only then its commit is applied and
       sent: commit = "after-gate". With "on-arrival" the commit is applied at once and only the grant waits, so that
       others read it earlier than there
    k  a worker that leaves waits no more: its commit is applied at once, with the D from before

References
----------
Shen et al., IEEE Transactions on Computers 73(1), 2024, doi:10.1109/TC.2023.3315847. Algorithm 1 gives H and D,
Algorithm 2 gives R, Algorithm 3 the stages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Action, Apply, Decision, Evaluated, Grant, PushInfo
from hpcsync.paradigms.options import Count, Finite, OptionError, ParadigmOptions, Share, Whole, computed
from hpcsync.paradigms.papers import Reference, journal
from hpcsync.paradigms.worker_counts import Gate, WorkerCounts
from hpcsync.planning.checks import is_number, must_be_one_of, must_be_whole
from hpcsync.planning.local_steps import INDEXED, WorkerProfile, local_steps, ratios, shares

PROFILE, COARSE, FINE = 0, 1, 2  # stages

LOSS_BETA = 0.1  # weight of the newest commit in the loss
CHECKS = 5  # length of a plateau in checks of the loss, one check per n_workers commits or per evaluation

_NO_TIMES = (math.nan,) * 4
_NO_LOSS = (math.nan,)

_new_decision = partial(tuple.__new__, Decision)  # from all fields, in half the time that `Decision` takes


class ASHL(Paradigm):
    """ASHL: local steps and compression ratios per worker, an asynchronous coarse stage and a bounded fine stage.

    Parameters
    ----------
    n_workers
        Number of workers.
    steps_coarse, steps_fine
        Local steps of the slowest worker in each stage: integers >= 1, `steps_fine` at most `steps_coarse`.
    staleness
        Bound of the fine stage, in commits: an integer >= 0, or math.inf.
    ratio_coarse, ratio_fine
        Share of a push's elements that the slowest worker sends in each stage, above 0 and at most 1. Both None: grants
        have no ratio.
    loss_preset
        The fine stage begins once the loss is at most this value. None: once it is on a plateau.
    plateau
        The loss is on a plateau if it has improved by at most this share of itself over the last CHECKS checks.
    loss
        Loss that is compared: "commits", the average of the workers' losses; "evaluation", the latest evaluated one of
        the servers' model.
    share
        Weight of a commit. "data": D, the worker's share of the samples according to its H. "equal": one over the
        number of active workers, as always in the profile.
    commit
        When the commit of a worker that blocks is applied (j): "on-arrival", or "after-gate", right before its grant.
    warmup
        Number of first pushes of each worker that are not measured.
    profiled
        Number of measured pushes of each worker, at least 2. With ratios every second one is sent at `ratio_coarse` to
        time the compression, and the others are sent whole to time the link.

    Notes
    -----
    The begin of a stage is recorded as `Decision` actions: "stage" for the worker whose event began it, with the loss;
    then for each active worker "local-steps" (H), "share" (weight of a commit) and, with ratios, "ratio" (R). H and R
    come with the median seconds that they were chosen from, 0 where nothing was measured. Later, a departure adds rows
    "share", and a join adds rows of all three.

    With commit = "after-gate" each release is an update and a grant, so that a push may be answered by several updates.
    """

    name = "ashl"
    decision_fields = {
        "iteration_s": ("s", "Median duration of a local step of the worker; 0 where nothing was measured."),
        "push_s": ("s", "Median duration of sending an uncompressed push; 0 where nothing was measured."),
        "pull_s": ("s", "Median duration of reading the weights; 0 where nothing was measured."),
        "encode_s": ("s", "Median duration of compressing a push; 0 where nothing was measured."),
        "loss": ("1", "Loss at which the stage began; NaN for other controllers than stage."),
    }
    state_types = {
        "stage": int,
        "_times_s": list[dict[str, deque[float]]],
        "_steps": dict[int, int],
        "_shares": dict[int, float],
        "_ratios": dict[int, float],
        "_loss": float,
        "_commits": int,
        "_checked": deque[float],
        "_begun": set[int],
        "_fine": WorkerCounts,
        "_gate": Gate,
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
        loss: str = "commits",
        share: str = "data",
        commit: str = "on-arrival",
        warmup: int = 10,
        profiled: int = 20,
    ) -> None:
        super().__init__(n_workers)
        must_be_whole("steps_coarse", steps_coarse, 1)
        must_be_whole("steps_fine", steps_fine, 1)
        must_be_whole("warmup", warmup, 0)
        must_be_whole("profiled", profiled, 2)
        if steps_fine > steps_coarse:
            raise ValueError(f"steps_fine must be at most steps_coarse = {steps_coarse}, got {steps_fine}")
        for name, ratio in (("ratio_coarse", ratio_coarse), ("ratio_fine", ratio_fine)):
            if ratio is not None and not (is_number(ratio) and 0 < ratio <= 1):
                raise ValueError(f"{name} must be a number > 0 and <= 1, or None, got {ratio}")
        if (ratio_coarse is None) != (ratio_fine is None):
            raise ValueError(
                f"ratio_coarse and ratio_fine must both be given or both be None, got {ratio_coarse} and {ratio_fine}"
            )
        if loss_preset is not None and not is_number(loss_preset):
            raise ValueError(f"loss_preset must be a number or None, got {loss_preset}")
        if not (is_number(plateau) and 0 < plateau < 1):
            raise ValueError(f"plateau must be a number > 0 and < 1, got {plateau}")
        must_be_one_of("loss", loss, ("commits", "evaluation"))
        must_be_one_of("share", share, ("data", "equal"))
        must_be_one_of("commit", commit, ("on-arrival", "after-gate"))
        self.stage = PROFILE
        self._presets = {COARSE: (steps_coarse, ratio_coarse), FINE: (steps_fine, ratio_fine)}
        self._loss_preset = loss_preset
        self._plateau = plateau
        self.uses_evaluations = loss == "evaluation"
        self._by_data = share == "data"
        self._after_gate = commit == "after-gate"
        self._warmup = warmup
        self._profiled = profiled
        # The newest measurements of each worker.
        self._times_s = [
            {name: deque[float](maxlen=profiled) for name in WorkerProfile._fields} for _ in range(n_workers)
        ]
        # H, D and R of the active workers, empty in the profile.
        self._steps: dict[int, int] = {}
        self._shares: dict[int, float] = {}
        self._ratios: dict[int, float] = {}
        self._loss = math.nan
        self._commits = 0  # since the last check
        self._checked: deque[float] = deque(maxlen=CHECKS + 1)
        self._begun: set[int] = set()  # active workers with a grant of the fine stage since their latest join
        self._fine = WorkerCounts(n_workers)  # commits of these grants
        self._gate = Gate(self._fine, staleness)

    def first(self, worker: int) -> Grant:
        """Return the grant with which the worker starts iteration 1: one local step."""
        return Grant(worker, 1, local_steps=1, ratio=self._profile_ratio(1))

    def check(self) -> None:
        """Assert the invariants of every paradigm, of the plan and of the gate."""
        super().check()
        self._fine.check()
        active, blocked, fine = self._progress.active, self._blocked_since_s, self._fine.pushes
        assert self._fine.active == active, "the gate counts workers that have left"
        if self.stage != PROFILE and active:
            steps_least, ratio_least = self._presets[self.stage]
            assert self._steps.keys() == self._shares.keys() == active, (
                "the plan does not cover exactly the active workers"
            )
            assert min(self._steps.values()) >= steps_least, f"steps are {self._steps}, fewer than {steps_least}"
            assert abs(math.fsum(self._shares.values()) - 1) < 1e-9, f"shares {self._shares} do not sum to 1"
            if ratio_least is not None:
                assert self._ratios.keys() == active, "the ratios do not cover exactly the active workers"
                assert all(ratio_least <= ratio <= 1 for ratio in self._ratios.values()), (
                    f"ratios are {self._ratios}, not from {ratio_least} to 1"
                )
        if self.stage != FINE:
            assert not blocked, f"workers {sorted(blocked)} are blocked outside of the fine stage"
            assert not any(fine), f"commits {fine} are counted outside of the fine stage"
        self._gate.check(blocked, self._gate.staleness)

    def _pushed(self, event: PushInfo) -> list[Action]:
        worker = event.worker
        self._measure(event)
        share = 1 / len(self._progress.active) if self.stage == PROFILE else self._shares[worker]  # (c)
        if self.stage == COARSE and not self.uses_evaluations:
            self._observe_loss(event.loss)
        if worker in self._begun:  # (d)
            self._fine.push(worker)
        rows, answer = self._advance(worker), self._answer(worker)
        waits = self._after_gate and not answer  # (j)
        return [*([] if waits else [Apply((worker,), (share,))]), *rows, *answer, *self._release()]

    def _left(self, worker: int) -> list[Action]:
        self._fine.leave(worker)
        kept = self._kept(worker) if self._gate.leave(worker) else []  # (k)
        self._begun.discard(worker)
        for plan in (self._steps, self._shares, self._ratios):
            plan.pop(worker, None)
        if not self._progress.active:
            return [*kept]
        rows = self._advance(worker) if self.stage == PROFILE else self._share()  # (g)
        return [*kept, *rows, *self._release()]

    def _joined(self, worker: int) -> list[Action]:
        self._fine.join(worker)
        rows = [] if self.stage == PROFILE else self._plan()  # (h)
        return [*rows, *self._answer(worker)]

    def _evaluated(self, event: Evaluated) -> list[Action]:
        """Compare an evaluated loss of the coarse stage (i)."""
        if self.stage != COARSE or not math.isfinite(event.loss):
            return []
        self._loss = event.loss
        self._checked.append(event.loss)
        return [*self._advance(event.worker)]

    def _answer(self, worker: int) -> list[Action]:
        """Grant or block the worker that has just pushed or joined."""
        if self._gate.is_open(worker):
            return [self._continue(worker)]
        self._block(worker)
        self._gate.block(worker)
        return []

    def _release(self) -> list[Action]:
        """Answer the workers that the gate lets pass now."""
        return [action for actions in self._gate.release(self._let_pass) for action in actions]

    def _let_pass(self, worker: int) -> list[Action]:
        """Apply the commit of a blocked worker, if it is kept back, and grant it."""
        return [*self._kept(worker), self._continue(worker)]

    def _kept(self, worker: int) -> list[Apply]:
        """Return the update with the commit of a blocked worker that is kept back; none if it blocks since a join."""
        return [Apply((worker,), (self._shares[worker],))] if self._after_gate and worker in self._begun else []

    def _continue(self, worker: int) -> Grant:
        if self.stage == PROFILE:
            ratio = self._profile_ratio(self._progress.pushes[worker] + 1)  # (e)
            return self._grant(worker, local_steps=1, ratio=ratio)
        if self.stage == FINE:
            self._begun.add(worker)
        ratio = self._ratios.get(worker, math.nan)
        return self._grant(worker, local_steps=self._steps[worker], ratio=ratio)

    def _is_sparse(self, iteration: int) -> bool:
        """Return True if this push of the profile times the compression instead of the link."""
        since = iteration - self._warmup
        return self._presets[COARSE][1] is not None and since > 0 and since % 2 == 0

    def _profile_ratio(self, iteration: int) -> float:
        _, ratio = self._presets[COARSE]
        if ratio is None:
            return math.nan
        return ratio if self._is_sparse(iteration) else 1.0

    def _measure(self, event: PushInfo) -> None:
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
        """Count a commit of the coarse stage and its loss (a)."""
        if math.isfinite(loss):
            self._loss = loss if math.isnan(self._loss) else self._loss + LOSS_BETA * (loss - self._loss)
        self._commits += 1
        if self._commits >= len(self._progress.active) and not math.isnan(self._loss):
            self._commits = 0
            self._checked.append(self._loss)

    def _advance(self, worker: int) -> list[Decision]:
        """Begin the next stage if its condition holds. (b) No stage returns."""
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
        """Compute H, D and R of this stage from the newest measurements."""
        steps_preset, ratio_preset = self._presets[self.stage]
        active = sorted(self._progress.active)
        # For a thousand workers these are three thousand rows, so loops are left to C where they can be.
        medians = [_median(times_s) for i in active for times_s in self._times_s[i].values()]
        profiles = [*map(WorkerProfile._make, zip(*[iter(medians)] * len(WorkerProfile._fields), strict=True))]
        inputs = [profile + _NO_LOSS for profile in profiles]
        steps = local_steps(profiles, steps_preset)
        self._steps = dict(zip(active, steps, strict=True))
        rows = [*map(_new_decision, zip(repeat("local-steps"), active, map(float, steps), inputs))]
        rows += self._share()
        if ratio_preset is not None:
            parts = ratios(profiles, steps, ratio_preset, INDEXED)
            self._ratios = dict(zip(active, parts, strict=True))
            rows += map(_new_decision, zip(repeat("ratio"), active, parts, inputs))
        return rows

    def _share(self) -> list[Decision]:
        """Divide the data among the active workers according to their steps."""
        active = sorted(self._steps)
        parts = shares([self._steps[i] if self._by_data else 1 for i in active])
        self._shares = dict(zip(active, parts, strict=True))
        return [*map(_new_decision, zip(repeat("share"), active, parts, repeat((*_NO_TIMES, math.nan))))]


def _median(times_s: Collection[float]) -> float:
    """Return the median, 0 of nothing; as `statistics.median`, which takes twice as long for so few."""
    ordered, n = sorted(times_s), len(times_s)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2 if n else 0.0


SHEN = Reference(
    "shen2024ashl",
    "article",
    (
        "Shen, Zhaoyan",
        "Tang, Qingxiang",
        "Zhou, Tianren",
        "Zhang, Yuhao",
        "Jia, Zhiping",
        "Yu, Dongxiao",
        "Zhang, Zhiyong",
        "Li, Bingzhe",
    ),
    "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for Heterogeneous Environments",
    2024,
    {**journal("IEEE Transactions on Computers", "73", "30--43", "1"), "doi": "10.1109/TC.2023.3315847"},
)


@dataclass(frozen=True, kw_only=True)
class AshlOptions(ParadigmOptions):
    """ASHL: numbers of local steps with which all workers are expected to push at the same time.

    After profiling, one step per push, workers make many local steps (coarse stage), and later few (fine stage).

    Parameters
    ----------
    steps_coarse
        Local steps of the slowest worker in the coarse stage.
    steps_fine
        Local steps of the slowest worker in the fine stage; at most `steps_coarse`.
    staleness
        Largest lead, in commits, in the fine stage.
    ratio_coarse
        Share of a commit that the last worker sends in the coarse stage, with `top-k` or `random-k`.
    ratio_fine
        The same in the fine stage.
    loss_preset
        Loss at which the fine stage begins.
    plateau
        Without `loss_preset`: relative improvement over five rounds of commits, or five evaluations, below which the
        fine stage begins.
    loss
        Loss for the switch: the average of commits, or the latest evaluation of the servers' model.
    share
        Weight of a commit: its share of the data, or 1 / workers.
    commit
        When the commit of a worker that waits is applied: on arrival, or after the wait.
    warmup
        Pushes of each worker before the profile.
    profiled
        Pushes of each worker that are timed.
    """

    name: Literal["ashl"] = "ashl"
    steps_coarse: Count = 16
    steps_fine: Count = computed(lambda given: min(4, given["steps_coarse"]), "4, at most `steps_coarse`")
    staleness: Whole = 2
    ratio_coarse: Share = 0.05
    ratio_fine: Share = 0.1
    loss_preset: Finite | None = None
    plateau: Annotated[float, Gt(0), Lt(1)] = 0.01
    loss: Literal["commits", "evaluation"] = "commits"
    share: Literal["data", "equal"] = "data"
    commit: Literal["on-arrival", "after-gate"] = "on-arrival"
    warmup: Whole = 10
    profiled: Annotated[int, Ge(2)] = 20

    policy = ASHL
    contribution = "change"
    shares_samples = True
    ratios = ("ratio_coarse", "ratio_fine")
    guarantees = ("stages",)
    papers = (SHEN,)
    place = 100
    colour = "#44AA99"
    waiting = "none at first; in the fine stage, a bound on the lead in commits"
    update = "the change of the weights over many local steps"
    source = "Shen et al., IEEE TC, 2024"

    def _check_options(self) -> None:
        if self.steps_fine > self.steps_coarse:
            must = f"must be at most paradigm.steps_coarse = {self.steps_coarse}"
            raise OptionError("paradigm.steps_fine", self.steps_fine, must)

    @property
    def uses_evaluations(self) -> bool:
        """True if the switch follows the evaluated loss."""
        return self.loss == "evaluation"

    @property
    def applies_at_release(self) -> bool:
        """True if the push of a blocked worker is an update of its own, made when the worker is released."""
        return self.commit == "after-gate"

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        return f"in the fine stage a worker more than {self.staleness} pushes ahead of the slowest waits for it"

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        weight = "in proportion to its share of the data" if self.share == "data" else "equally"
        return f"workers push the weight change of their local steps, all at the same time; a push counts {weight}"

    def details(self, n_workers: int) -> list[tuple[str, str]]:
        """Return further rows of `hpcsync show`, as names and values."""
        until = f"is {self.loss_preset:g}" if self.loss_preset is not None else ""
        over = "evaluations" if self.uses_evaluations else "rounds"
        until = until or f"improves by less than {100 * self.plateau:g} % over five {over}"
        loss = "evaluated loss" if self.uses_evaluations else "average loss"
        ahead = f"no worker starts more than {self.staleness} pushes ahead of the slowest"
        ahead += "; a push that is farther ahead is applied after its worker's wait" * self.applies_at_release
        return [
            (
                "initial pushes",
                f"{self.warmup + self.profiled} pushes of one local step, the last {self.profiled} timed",
            ),
            ("coarse stage", f"{_steps(self.steps_coarse)}; no worker waits; until the {loss} {until}"),
            ("fine stage", f"{_steps(self.steps_fine)}; {ahead}"),
        ]

    def sent(self, nominal: Callable[[float], str], takes_ratio: bool, compression: str) -> str:
        """Return the bytes of a compressed push in words."""
        if not takes_ratio:
            return super().sent(nominal, takes_ratio, compression)
        coarse, fine = nominal(self.ratio_coarse), nominal(self.ratio_fine)
        return f"{coarse} ({compression}; in the fine stage {fine}) or more"


def _steps(n: int) -> str:
    return f"{n} local steps by the slowest worker, and by the others as many as take the same time"
