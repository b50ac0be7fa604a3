"""AD-PSGD: every worker averages its weights with those of one neighbour, atomically, while that computes.

Worker i computes a gradient g at its weights as they were when it began. Meanwhile others may average with it. At the
end of the computation, if i is active, it draws a neighbour j, and both get the mean of their weights, as one step that
nothing else can interleave with. Then i applies g to what its weights are now::

    x_i, x_j <- (x_i + x_j) / 2
    x_i      <- x_i - lr g

The mixing matrix of an average has two rows with two entries 1/2, and is the identity otherwise: it is doubly
stochastic, so the sum of all weights changes by the gradients alone, and each counts once.

No worker waits for another one to compute. There is no deadlock because the graph is bipartite: even workers are
active, odd ones are passive, and neighbours are of different kinds. A passive worker initiates nothing, and only the
weights of passive workers can be changed by several workers, so that an average needs one lock, that of the passive
worker. The topologies are::

    complete     every passive worker, with equal probability
    ring         the next passive worker on either side, with equal probability
    exponential  in turn the passive workers 1, 3, 5, 9, ... (2^k + 1) places ahead

Notes
-----
The paper's text was not available. This follows its abstract and the description of its algorithm and of the bipartite
graph in public implementations: the authors of stochastic gradient push compare with AD-PSGD (``gossip/ad_psgd.py`` and
``DynamicBipartiteExponentialGraph`` of github.com/facebookresearch/stochastic_gradient_push; there, passive workers are
the even ones, and the exponential topology visits both directions). Two choices are ours. The average and the step come
in this order, as two atomic operations. And a worker that initiates an average does not begin its next gradient before;
the paper's workers have a thread of their own for averages, so that an active one computes meanwhile, too. For the
numbers this makes no difference except in the age of the gradient.

References
----------
X. Lian, W. Zhang, C. Zhang and J. Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
arXiv:1710.06952.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpcsync.paradigms.gossip import Gossip, PeerSelection
from hpcsync.paradigms.options import Count, ParadigmOptions, every
from hpcsync.paradigms.papers import ICML, Reference, meeting
from hpcsync.paradigms.peer_method import Actions, ExchangeResult, LocalUpdate, PeerState

TOPOLOGIES = ("complete", "ring", "exponential")


def is_active(worker: int) -> bool:
    """Return whether a worker initiates averages; others average with the passive ones."""
    return worker % 2 == 0


@dataclass(frozen=True)
class BipartiteSelection(PeerSelection):
    """Passive workers with which each active worker averages; a passive worker draws itself.

    Kinds do not change when a worker dies. An active worker without a living passive one draws itself, too.
    """

    include_self: bool = False

    def neighbours(self, worker: int) -> Sequence[int]:
        """Return the peers that the worker may select, in order; itself if there is none."""
        passive = [peer for peer in self._living if not is_active(peer)]
        if not is_active(worker) or not passive:
            return [worker]
        ahead = bisect(passive, worker)  # place of the next one, if it is not beyond the last
        match self.topology:
            case "complete":
                return passive
            case "ring":
                places = [-1, 0]
            case _:
                places = [0, *(1 << k for k in range((len(passive) - 1).bit_length()))]
        return [passive[(ahead + place) % len(passive)] for place in places]


class PairwiseAverages(Gossip):
    """An average of an active worker with a passive one, and a step of every worker on what its weights are then."""

    transport = "pairs"

    def iterate(self, worker: PeerState, lr: float, round: int | None) -> Actions:
        """Average if it is due, step, and publish."""
        result = ExchangeResult() if round is None else (yield from self.exchange(worker, round))
        n_received, n_steps = yield worker.transport.step_shared(worker.worker, lr, worker.step_serial)
        return result._replace(n_received=result.n_received + n_received, weight=n_steps)

    def exchange(self, worker: PeerState, round: int) -> Actions:
        """Average with the peer drawn, unless the worker has drawn itself."""
        while (peer := self.peers.drawn(worker.worker, round)) != worker.worker:
            if (yield worker.transport.average_with(worker.worker, peer)):
                return ExchangeResult(peer, 2 * worker.update.n_bytes, 1)
            self.forget(peer)
        return ExchangeResult(peer)

    def absorb_rest(self, update: LocalUpdate, received: Any) -> float:
        """Adopt the weights as others have left them; return the count of steps that they contain."""
        update.adopt(received.total)
        n_steps: float = received.weight
        return n_steps

    def shares(self, worker: int) -> bool:
        """Return whether the worker is passive."""
        return not is_active(worker)


LIAN = Reference(
    "lian2018asynchronous",
    "inproceedings",
    ("Lian, Xiangru", "Zhang, Wei", "Zhang, Ce", "Liu, Ji"),
    "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
    2018,
    meeting(ICML.format("35th"), "3043--3052", "80"),
)


@dataclass(frozen=True, kw_only=True)
class AdPsgdOptions(ParadigmOptions):
    """AD-PSGD: an active worker and a passive one average their weights atomically, and no worker waits.

    Parameters
    ----------
    topology
        Passive workers with which an active one averages: all, the next ones on either side, or in turn those 1, 3, 5,
        9, ... places further.
    period
        Iterations of an active worker between two averages.
    """

    name: Literal["ad-psgd"] = "ad-psgd"
    topology: Literal["complete", "ring", "exponential"] = "complete"
    period: Count = 1

    contribution = "position"
    pairwise = True
    papers = (LIAN,)
    place = 145
    colour = "#6699CC"
    waiting = "none, except while another worker averages with the same one"
    update = "two workers set their weights to the mean, atomically; every step is of one worker"
    source = "Lian et al., ICML 2018"
    bound = "no worker waits for another one to compute"

    def peers(self, n_workers: int, seed: int) -> BipartiteSelection:
        """Return the selection of peers."""
        return BipartiteSelection(n_workers, seed, self.topology)

    def method(self, n_workers: int, seed: int) -> PairwiseAverages:
        """Return what a worker does at the end of an iteration."""
        return PairwiseAverages(self.peers(n_workers, seed), self.period)

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        text = "AD-PSGD" + (f", {self.topology}" if self.topology != "complete" else "")
        return text + (f", every {self.period}" if self.period > 1 else "")

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        n_active = (n_workers + 1) // 2
        return (
            f"{n_active} active workers average their weights atomically with one of {n_workers - n_active} passive "
            f"ones, which compute meanwhile; peers are drawn from the seed ({self.topology})"
        )

    def moves(self, size: str, sent: str, *, compressed: bool) -> tuple[str, str]:
        """Return when bytes move, and which."""
        return every(self.period), f"{size} of weights to each active worker, and {size} back"
