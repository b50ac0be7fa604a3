"""Asynchronous parallel (ASP): every push is an update of its own, and no worker is ever blocked.

With delay compensation (DC-ASGD) the servers correct every gradient g of weights w_read for the updates that others
made since, before the optimizer uses it. All operations are element by element::

    constant  g + lambda g^2 (w - w_read)
    adaptive  the same with lambda / sqrt(m + 1e-7) in place of lambda, where m becomes d m + (1 - d) g^2

g^2 approximates the diagonal of the Hessian. If no other worker has updated w, nothing is corrected.

Notes
-----
The full paper was not available. These formulas are from its abstract and the authors' code (Microsoft's updaters for
Multiverso). There each worker has its own m, and w_read is the copy made when that worker's gradient was last added;
here it is the version that the worker was granted, which is the same version for a worker that reads right after its
push. Their updater of the constant form has |g| in place of g^2; here both forms have g^2, the published approximation.
They correct plain SGD; here any optimizer takes the corrected gradient.

References
----------
S. Zheng, Q. Meng, T. Wang, W. Chen, N. Yu, Z.-M. Ma and T.-Y. Liu, "Asynchronous Stochastic Gradient Descent with Delay
Compensation", ICML 2017, arXiv:1609.08326.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Action, Apply, PushInfo
from hpcsync.paradigms.options import NotNegative, OptionError, ParadigmOptions, computed
from hpcsync.paradigms.papers import ICML, Reference, meeting, neurips


class ASP(Paradigm):
    """Asynchronous parallel: no synchronisation.

    The lead of a worker over the slowest one is recorded and has no bound.

    Parameters
    ----------
    n_workers
        Number of workers.
    """

    name = "asp"

    def check(self) -> None:
        """Assert the invariants of every paradigm, and that no worker is blocked."""
        super().check()
        assert not self._blocked_since_s, f"workers {sorted(self._blocked_since_s)} are blocked"

    def _pushed(self, event: PushInfo) -> list[Action]:
        return [Apply((event.worker,)), self._grant(event.worker)]

    def _left(self, worker: int) -> list[Action]:
        return []

    def _joined(self, worker: int) -> list[Action]:
        return [self._grant(worker)]


DEAN = Reference(
    "dean2012large",
    "inproceedings",
    (
        "Dean, Jeffrey",
        "Corrado, Greg S.",
        "Monga, Rajat",
        "Chen, Kai",
        "Devin, Matthieu",
        "Le, Quoc V.",
        "Mao, Mark Z.",
        "Ranzato, Marc'Aurelio",
        "Senior, Andrew",
        "Tucker, Paul",
        "Yang, Ke",
        "Ng, Andrew Y.",
    ),
    "Large Scale Distributed Deep Networks",
    2012,
    neurips(25),
)

ZHENG = Reference(
    "zheng2017asynchronous",
    "inproceedings",
    (
        "Zheng, Shuxin",
        "Meng, Qi",
        "Wang, Taifeng",
        "Chen, Wei",
        "Yu, Nenghai",
        "Ma, Zhi-Ming",
        "Liu, Tie-Yan",
    ),
    "Asynchronous Stochastic Gradient Descent with Delay Compensation",
    2017,
    meeting(ICML.format("34th"), "4120--4129", "70"),
)

STRENGTHS = {"none": None, "constant": 0.04, "adaptive": 2.0}  # of the compensation, by default
MEAN_DECAY = 0.95


@dataclass(frozen=True, kw_only=True)
class AspOptions(ParadigmOptions):
    """Asynchronous parallel: no synchronisation.

    Parameters
    ----------
    compensation
        Correction of a gradient for its delay ([DC-ASGD](../paradigms/dc-asgd.md)), of constant or adaptive strength.
    strength
        Strength of the compensation, lambda; with 0 nothing is corrected.
    mean_decay
        With `compensation = "adaptive"`: factor by which the moving average of squared gradients decays with each
        gradient.
    """

    name: Literal["asp"] = "asp"
    compensation: Literal["none", "constant", "adaptive"] = "none"
    strength: NotNegative | None = computed(
        lambda given: STRENGTHS[given["compensation"]], "0.04, or 2 if adaptive; none without compensation"
    )
    mean_decay: Annotated[float, Ge(0), Lt(1)] | None = computed(
        lambda given: MEAN_DECAY if given["compensation"] == "adaptive" else None, "0.95 if adaptive, none otherwise"
    )

    policy = ASP
    guarantees = ("nobody-waits", "slowest-runs")
    place = 20
    colour = "#D55E00"
    waiting = "none"
    update = "every gradient is one update"

    def _check_options(self) -> None:
        for key, value, needs in (
            ("strength", self.strength, ("constant", "adaptive")),
            ("mean_decay", self.mean_decay, ("adaptive",)),
        ):
            if value is not None and self.compensation not in needs:
                raise OptionError(
                    f"paradigm.{key}", value, f'must be left out with paradigm.compensation = "{self.compensation}"'
                )

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `policy`: none, since the servers' rule carries out the compensation."""
        return {}

    @property
    def delay_correction(self) -> tuple[float, float | None] | None:
        """Strength and decay of the compensation; None if nothing is corrected."""
        return (self.strength, self.mean_decay) if self.strength else None

    @property
    def papers(self) -> tuple[Reference, ...]:
        """Papers behind the paradigm."""
        return (DEAN,) if self.compensation == "none" else (DEAN, ZHENG)

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        return "ASP" if self.compensation == "none" else f"DC-ASGD, {self.compensation}"

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        how = "" if self.compensation == "none" else f" corrected for its delay ({self.compensation})"
        return f"each gradient{how} is an update; no worker waits"

    def details(self, n_workers: int) -> list[tuple[str, str]]:
        """Return further rows of `hpcsync show`, as names and values."""
        if self.strength is None:
            return []
        mean = "" if self.mean_decay is None else f", over the root of a mean square that decays by {self.mean_decay:g}"
        return [("compensation", f"lambda {self.strength:g}{mean}")]
