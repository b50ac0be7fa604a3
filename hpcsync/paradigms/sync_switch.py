"""Sync-Switch: BSP first, then, once and for good, an asynchronous paradigm.

The switch is made at the end of a round of BSP, when every contribution has been applied and every worker waits: all of
them continue from the same version. Either a share of the run's samples is reached, or the loss has become flat::

                 before (BSP)                       after (`then`, ASP by default)
    update       the mean of all P gradients        one gradient
    rate         eta                                eta / P, or eta n / P for an update of n gradients
    momentum     that of the optimizer              the same, or `momentum`
    batch        b per worker, P b per update       b per worker, b per update

The linear scaling of the rate is `optimizer.async_lr_scale = "1/workers"`, the default with this paradigm.

Notes
-----
The full paper was not available; its abstract and the authors' repository (cake-lab/Sync-Switch) with its instructions,
data and notes were. A letter in this file marks what follows from them and what is our reading::

    a  BSP comes first and there is one switch. The authors' runs make it after 2 to 75 % of the samples
    b  per-worker batches stay as they are, and the rate is scaled with the samples of an update: the notes resume 1024
       samples at 0.8 as 128 at 0.1, and report losses that are not a number without it
    c  the momentum stays as it is. The notes also try none, 1/P of it, and ramps from 1/P of it back to all of it, each
       with 10 % of BSP; in the authors' data most of these runs are less accurate than all that keep it
    d  the authors tried to switch on a flat training loss and did not use it in the paper; how they found it flat is
       not said. Here the mean loss of `window` rounds is compared with that of the `window` rounds before
    e  they save a checkpoint, end the processes and start them again; here the servers continue, with the state of
       the optimizer, so nothing is lost at the switch
    f  workers that left before the switch may join after it

References
----------
S. Li, O. Mangoubi, L. Xu and T. Guo, "Sync-Switch: Hybrid Parameter Synchronization for Distributed Deep Learning",
ICDCS 2021, arXiv:2104.08364.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from hpcsync.paradigms.asp import ASP, AspOptions
from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.bsp import BSP, BspOptions
from hpcsync.paradigms.events import Action, Apply, Decision, Event, Grant, Joined, Left, PushInfo
from hpcsync.paradigms.options import (
    Allowed,
    Count,
    JobTables,
    OptionError,
    ParadigmOptions,
    Share,
    computed,
    default,
)
from hpcsync.paradigms.papers import Reference, meeting
from hpcsync.planning.checks import is_number, must_be_whole


class SyncSwitch(Paradigm):
    """BSP, and another paradigm from a switch on.

    Parameters
    ----------
    n_workers
        Number of workers.
    then
        Creates the second paradigm from the number of workers. Each push must be an update of its own there.
    samples
        Samples from which the updates before the switch are computed, at least; math.inf: the loss decides alone.
    plateau
        The loss is flat if its mean over `window` rounds is at most this share of itself below the mean of the
        `window` rounds before. None: the samples decide alone.
    window
        Rounds of a mean, at least 1.
    momentum
        Momentum of the servers' optimizer after the switch. None: as before it.

    Notes
    -----
    The switch is a `Decision` "switch" of the worker whose event completed the round, with the samples so far. The
    decisions of the second paradigm follow with their own inputs.
    """

    name = "sync-switch"
    decision_fields = {
        "mean_loss": (
            "1",
            "Mean loss of the last whole window of rounds before the switch; NaN for other controllers.",
        ),
        "loss_before": ("1", "Mean loss of the window before that one; NaN if there is none."),
        "momentum": ("1", "Momentum from the switch on; NaN: as before."),
    }

    state_types = {
        "_first": BSP,
        "_then": Paradigm,
        "_switched": bool,
        "_samples": int,
        "_losses": list[float],
        "_means": list[float],
        "_mean_loss": float,
        "_loss_before": float,
    }

    def __init__(
        self,
        n_workers: int,
        *,
        then: Callable[[int], Paradigm] = ASP,
        samples: float = math.inf,
        plateau: float | None = None,
        window: int = 20,
        momentum: float | None = None,
    ) -> None:
        super().__init__(n_workers)
        if not is_number(samples) or samples < 0:
            raise ValueError(f"samples must be a number >= 0 or inf, got {samples}")
        if plateau is not None and not (is_number(plateau) and 0 < plateau < 1):
            raise ValueError(f"plateau must be a number > 0 and < 1, got {plateau}")
        must_be_whole("window", window, 1)
        if momentum is not None and not (is_number(momentum) and 0 <= momentum < 1):
            raise ValueError(f"momentum must be a number >= 0 and < 1, got {momentum}")
        self.synchronous = True
        self._first = BSP(n_workers)
        self._then = then(n_workers)
        self.decision_fields = {**SyncSwitch.decision_fields, **self._then.decision_fields}
        self._samples_wanted = samples
        self._plateau = plateau
        self._window = window
        self._momentum_after = math.nan if momentum is None else momentum
        self._switched = False
        self._samples = 0
        self._losses: list[float] = []  # of the current round
        self._means: list[float] = []  # of the rounds of the current window
        self._mean_loss = math.nan
        self._loss_before = math.nan

    @property
    def _current(self) -> Paradigm:
        return self._then if self._switched else self._first

    def handle(self, event: Event) -> list[Action]:
        """Process one event; what changes with the switch is in force from the event after it on."""
        if self._switched:
            self.synchronous, self.momentum = False, self._momentum_after
        return super().handle(event)

    def check(self) -> None:
        """Assert the invariants of every paradigm and of the present one, which sees the same blocked workers."""
        super().check()
        current = self._current
        current.check()
        assert current._progress.active == self._progress.active, "the present paradigm counts workers that have left"
        assert current._blocked_since_s == self._blocked_since_s, "the present paradigm blocks other workers"
        leads = [(self._progress.lead(worker), current._progress.lead(worker)) for worker in self._progress.active]
        assert all(own == other for own, other in leads), f"the present paradigm counts other leads: {leads}"

    def _pushed(self, event: PushInfo) -> list[Action]:
        self._block(event.worker)
        if not self._switched:
            self._samples += event.batch_size
            self._losses.append(event.loss)
        return self._answer(event)

    def _left(self, worker: int) -> list[Action]:
        return self._answer(Left(self._now_s, worker))

    def _joined(self, worker: int) -> list[Action]:
        self._block(worker)
        return self._answer(Joined(self._now_s, worker))

    def _answer(self, event: Event) -> list[Action]:
        """Pass an event on to the present paradigm, and switch if it completes the last round before the switch."""
        actions: list[Action] = []
        for action in self._current.handle(event):
            actions.append(self._as_of_the_run(action))
            if isinstance(action, Apply) and not self._switched and self._is_over():
                actions.append(self._switch(event.worker))
        return actions

    def _as_of_the_run(self, action: Action) -> Action:
        """Return an action of the present paradigm, which does not know what happened before it."""
        if isinstance(action, Grant):
            own = self._grant(action.worker)
            return action._replace(iteration=own.iteration, gap_iters=own.gap_iters, held_s=own.held_s)
        if isinstance(action, Decision):
            nan = (math.nan,) * len(SyncSwitch.decision_fields)
            return Decision(action.controller, action.worker, action.chosen, nan + action.inputs)
        return action

    def _is_over(self) -> bool:
        """Count a round, and return True if the switch follows it (a, d)."""
        self._observe(self._losses)
        self._losses = []
        flat = (
            self._plateau is not None
            and not self._means
            and self._loss_before - self._mean_loss <= self._plateau * abs(self._loss_before)
        )
        return flat or self._samples >= self._samples_wanted

    def _observe(self, losses: Sequence[float]) -> None:
        """Add the mean loss of a round to the window; a round with a loss that is not finite does not count."""
        if not all(map(math.isfinite, losses)):
            return
        loss = math.fsum(losses) / len(losses)
        self._means.append(loss)
        if len(self._means) == self._window:
            self._loss_before, self._mean_loss = self._mean_loss, math.fsum(self._means) / self._window
            self._means = []

    def _switch(self, worker: int) -> Decision:
        """Begin with the second paradigm (e); it learns which workers have left (f)."""
        self._switched = True
        for left in sorted(set(range(self.n_workers)) - self._progress.active):
            self._then.handle(Left(self._now_s, left))
        unknown = (math.nan,) * len(self._then.decision_fields)
        inputs = (self._mean_loss, self._loss_before, self._momentum_after, *unknown)
        return Decision("switch", worker, float(self._samples), inputs)


LI = Reference(
    "li2021syncswitch",
    "inproceedings",
    ("Li, Shijian", "Mangoubi, Oren", "Xu, Lijie", "Guo, Tian"),
    "Sync-Switch: Hybrid Parameter Synchronization for Distributed Deep Learning",
    2021,
    meeting("IEEE 41st International Conference on Distributed Computing Systems (ICDCS)"),
)

SHARE = 1 / 16


@dataclass(frozen=True, kw_only=True)
class SyncSwitchOptions(ParadigmOptions):
    """Sync-Switch: BSP first, then an asynchronous paradigm.

    Parameters
    ----------
    plateau
        The switch follows when the mean loss of `window` rounds is at most this share of itself below that of the
        `window` rounds before.
    window
        Rounds of such a mean.
    share
        The switch follows at this share of `stop.samples`, unless the loss was flat before.
    momentum
        Momentum of the optimizer after the switch.
    then
        The second paradigm, a table as `[paradigm]` itself.
    """

    name: Literal["sync-switch"] = "sync-switch"
    plateau: Annotated[float, Gt(0), Lt(1)] | None = None
    window: Count = 20
    share: Share | None = computed(
        lambda given: SHARE if given["plateau"] is None else None, "1/16; none with `plateau`"
    )
    momentum: Annotated[float, Ge(0), Lt(1)] | None = default(None, "as before")
    then: Annotated[ParadigmOptions, Allowed("a table of `asp`, `ssp` or `dssp`")] = default(
        AspOptions(), '`{name = "asp"}`'
    )

    policy = SyncSwitch
    lr_scale = "1/workers"
    allocates = False
    counts_workers = True
    guarantees = ("switch", "phases")
    place = 117
    colour = "#999999"
    waiting = "before the switch all workers for the slowest, in every iteration; after it as under `then`"
    update = "the mean of all gradients; after the switch every gradient is one update"
    source = "Li et al., ICDCS 2021"

    def _check_options(self) -> None:
        then = self.then
        single = then.has_servers and then.contribution == "gradient" and then.k_at_first(1) is None
        if then.merges:
            raise OptionError("paradigm.then.merge", True, "must be false, since each gradient is an update")
        if not single or then.counts_workers:
            raise OptionError(
                "paradigm.then.name",
                then.name,
                "must be a paradigm in which each gradient is an update: asp, ssp or dssp",
            )

    def check(self, job: JobTables) -> None:
        """Raise OptionError if the options do not fit the other tables of the job."""
        self.then.check(job)
        if self.share is not None and job.stop.samples is None:
            raise OptionError("paradigm.share", self.share, "needs stop.samples, of which it is a share")
        if self.momentum is not None and not job.optimizer.options.get("momentum"):
            raise OptionError("paradigm.momentum", self.momentum, "needs optimizer.momentum, which it changes")

    def samples_before(self, job: JobTables) -> float:
        """Return the samples after which the switch follows; inf: the loss decides alone."""
        return math.inf if self.share is None else self.share * job.stop.samples

    def arguments(self, job: JobTables) -> dict[str, Any]:
        """Return the keyword arguments of `policy` for this job."""
        assert self.then.policy is not None
        return {
            "then": partial(self.then.policy, **self.then.arguments(job)),
            "samples": self.samples_before(job),
            "plateau": self.plateau,
            "window": self.window,
            "momentum": self.momentum,
        }

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Keys of `[stop]` from which decisions follow."""
        return () if self.share is None else ("samples",)

    @property
    def phases(self) -> tuple[ParadigmOptions, ...]:
        """BSP and the second paradigm."""
        return (BspOptions(), self.then)

    @property
    def lead_bound(self) -> float:
        """Largest lead over the slowest worker at which a worker starts."""
        return self.then.lead_bound

    @property
    def lead_aim(self) -> float:
        """Lead that is aimed at, guaranteed or not."""
        return self.then.lead_aim

    @property
    def credits_max(self) -> int | None:
        """Most iterations that a controller of the lead can grant beyond its lower bound; None: there is none."""
        return self.then.credits_max

    @property
    def delay_correction(self) -> tuple[float, float | None] | None:
        """Strength and decay of the servers' correction of delayed gradients; None: there is none."""
        return self.then.delay_correction

    @property
    def papers(self) -> tuple[Reference, ...]:
        """Papers behind the paradigm."""
        return (LI, *self.then.papers)

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        return f"all workers wait for each other before the switch; after it, {self.then.bound}"

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        return f"BSP, then {self.then.label}"

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        return f"{BspOptions().describe(n_workers)}; after the switch {self.then.describe(n_workers)}"

    def details(self, n_workers: int) -> list[tuple[str, str]]:
        """Return further rows of `hpcsync show`, as names and values."""
        when = [] if self.share is None else [f"after {self.share:.3g} of the samples"]
        if self.plateau is not None:
            when.append(f"when {self.window} rounds improve the loss by at most {self.plateau:g} of itself")
        momentum = "" if self.momentum is None else f"; then the momentum is {self.momentum:g}"
        return [("switch", f"{' or '.join(when)}{momentum}"), *self.then.details(n_workers)]
