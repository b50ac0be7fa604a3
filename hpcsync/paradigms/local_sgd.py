"""Local SGD and DiLoCo: workers train alone, and from time to time their weights become their mean or near it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from hpcsync.paradigms.options import Allowed, Count, ParadigmOptions, Positive, every
from hpcsync.paradigms.papers import ICLR, Reference, arxiv, meeting
from hpcsync.paradigms.peer_method import Actions, ExchangeResult, PeerMethod, PeerState
from hpcsync.paradigms.records import ALL_PEERS


class AveragedWeights(PeerMethod):
    """Local SGD and DiLoCo: every `period` iterations all workers continue from the mean, or an outer step towards it.

    Parameters
    ----------
    period
        Local steps from one exchange to the next.
    outer
        Options of the outer SGD towards the mean, as `torch.optim.SGD` has them; empty: the mean itself.
    """

    transport = "average"

    def __init__(self, period: int, outer: Mapping[str, Any]) -> None:
        self.period, self.outer = period, outer
        self.evaluated_after = bool(outer)

    def exchange(self, worker: PeerState, round: int) -> Actions:
        """Continue from the mean of the workers that have made steps."""
        assert worker.agreed is not None
        contributes = worker.n_steps > 0
        mean, sent_bytes = yield worker.transport.average(worker.worker, contributes)
        worker.update.adopt(mean)
        return ExchangeResult(ALL_PEERS, sent_bytes, worker.agreed.n_contributing - contributes)


STICH = Reference(
    "stich2019local",
    "inproceedings",
    ("Stich, Sebastian U.",),
    "Local SGD Converges Fast and Communicates Little",
    2019,
    meeting(ICLR),
)

DOUILLARD = Reference(
    "douillard2023diloco",
    "article",
    (
        "Douillard, Arthur",
        "Feng, Qixuan",
        "Rusu, Andrei A.",
        "Chhaparia, Rachita",
        "Donchev, Yani",
        "Kuncoro, Adhiguna",
        "Ranzato, Marc'Aurelio",
        "Szlam, Arthur",
        "Shen, Jiajun",
    ),
    "DiLoCo: Distributed Low-Communication Training of Language Models",
    2023,
    arxiv("2311.08105"),
)


@dataclass(frozen=True, kw_only=True)
class LocalSgdOptions(ParadigmOptions):
    """Local SGD: every `steps` iterations the workers' weights are replaced by their mean.

    An outer SGD towards the mean (DiLoCo) with a learning rate of 1 and no momentum, the defaults, leads to the mean
    itself.

    Parameters
    ----------
    steps
        Local iterations between two averagings.
    outer_lr
        Learning rate of the outer SGD (DiLoCo).
    outer_momentum
        Nesterov momentum of the outer SGD (DiLoCo).
    """

    name: Literal["local-sgd"] = "local-sgd"
    steps: Annotated[Count, Allowed("a whole number of at least 1: local steps from one averaging to the next")]
    outer_lr: Positive = 1.0
    outer_momentum: Annotated[float, Ge(0), Lt(1)] = 0.0

    contribution = "position"
    place = 130
    colour = "#56B4E9"
    waiting = "all workers, every `steps` iterations"
    update = "all weights become their mean, or step towards it (DiLoCo)"
    source = "Stich, ICLR 2019; Douillard et al., 2023"

    def method(self, n_workers: int, seed: int) -> AveragedWeights:
        """Return the exchange."""
        momentum = self.outer_momentum
        outer = {"lr": self.outer_lr, "momentum": momentum, "nesterov": momentum > 0.0}
        return AveragedWeights(self.steps, {} if self._is_mean else outer)

    @property
    def papers(self) -> tuple[Reference, ...]:
        """Papers behind the paradigm."""
        return (STICH,) if self._is_mean else (STICH, DOUILLARD)

    @property
    def _is_mean(self) -> bool:
        return (self.outer_lr, self.outer_momentum) == (1.0, 0.0)

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        return f"{'local SGD' if self._is_mean else 'DiLoCo'}, {self.steps} steps"

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        if self._is_mean:
            return f"every {self.steps} iterations all workers' weights become their mean"
        outer = f"outer learning rate {self.outer_lr:g} and momentum {self.outer_momentum:g}"
        return f"every {self.steps} iterations all workers' weights step towards their mean with {outer} (DiLoCo)"

    def moves(self, size: str, sent: str, *, compressed: bool) -> tuple[str, str]:
        """Return when bytes move, and which."""
        return every(self.steps), f"{size} of weights, summed among the workers"
