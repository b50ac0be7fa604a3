"""Layer separation in virtual time (Stanza: Wu, Xu, Li and Xiong, arXiv 1812.10624; which messages there are, and when,
is our own reading, because only its abstract and introduction could be read).

A convolution worker computes all pieces of its batch forward, and sends away the activations of each when it is there.
A fully-connected worker takes the next piece when it has come from all whom it serves, and gives back its gradients,
with which they compute backward, piece after piece. Each group then has an all-reduce of its own, and goes on: the
fully-connected workers' may run while the convolution workers still compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from hpcsync.config.job import Job
from hpcsync.config.paradigms import StanzaOptions
from hpcsync.core.coordinator import Recorder
from hpcsync.core.peer_coordinator import Lockstep, ring_bytes
from hpcsync.core.stanza_resolution import divided
from hpcsync.simulator.peer_numerics import Judged
from hpcsync.simulator.peer_run import PeerSimulation, Watch
from hpcsync.simulator.peer_transfers import Workers
from hpcsync.simulator.stanza_numerics import InHalves, NothingInHalves, TwoHalves
from hpcsync.trace.schema import ALL_PEERS
from hpcsync.training.lr_schedule import learning_rate
from hpcsync.workloads.registry import Workload


class _Pieces:
    """Where a worker is in what it computes with what comes from others: of the whole run's pieces, one by one.

    come:  of each worker from which they come, how many have. taken: how many it has computed with.
    ready: whether it would compute with the next one now.
    device_s: what an iteration of the whole model takes it.
    """

    __slots__ = ("come", "device_s", "ready", "taken")

    def __init__(self, sources: Iterable[int]) -> None:
        self.come = dict.fromkeys(sources, 0)
        self.taken = 0
        self.ready = False
        self.device_s = 0.0


class _Group:
    """Workers that have the same half, above the cut (is_fc) or below it.

    size_bytes: of its weights. row_bytes: of what its workers send of a sample. before, after: shares of what an
    iteration of the whole model takes: computed before it needs what comes from others, and with that. n_computing: how
    many have yet to come to the next all-reduce.
    """

    def __init__(
        self, job: Job, workers: range, size_bytes: int, row_bytes: int, before: float, after: float, *, is_fc: bool
    ) -> None:
        self.lockstep = Lockstep(job)
        self.is_fc = is_fc
        self.before, self.after = before, after
        self.workers = workers
        self.size_bytes, self.row_bytes = size_bytes, row_bytes
        self.n_computing = len(workers)


class StanzaSimulation(PeerSimulation):
    """All end after the same iteration. A stop that somebody is told of, because time is up or a target reached, is
    agreed on in the fully-connected workers' all-reduce, and one more iteration is made."""

    def __init__(self, job: Job, workload: Workload, workers: Workers, trace: Recorder, watch: Watch) -> None:
        super().__init__(job, workload, workers, trace, watch)
        assert isinstance(job.paradigm, StanzaOptions)
        model = divided(job, workload)
        self._in_halves: InHalves = (
            NothingInHalves() if model.halves is None else TwoHalves(job, workload, model.halves)
        )
        self._lr = learning_rate(job)
        groups, shape = job.groups, model.shape
        self.attributes = shape.attributes()
        forward, backward, above = job.paradigm.shares
        there, back = shape.activation_bytes + shape.label_bytes, shape.activation_bytes
        self._fc = _Group(job, groups.fc, shape.fc_bytes, back, 0.0, above, is_fc=True)
        self._convolution = _Group(job, groups.convolution, shape.conv_bytes, there, forward, backward, is_fc=False)
        self._group_of = [self._fc if groups.is_fc(worker) else self._convolution for worker in range(groups.n_workers)]
        self._partners = [groups.served(fc) for fc in groups.fc]  # of each worker: to whom it sends
        self._partners += [range(fc := groups.fc_of(worker), fc + 1) for worker in groups.convolution]
        self._pieces = [_Pieces(partners) for partners in self._partners]
        self._ways = {
            (source, target): self._links.in_order(source, target)
            for source, partners in enumerate(self._partners)
            for target in partners
        }
        self._n_pieces = job.paradigm.micro_batches
        self._last = math.inf  # iteration

    @property
    def _numbers(self) -> Judged:
        return self._in_halves

    def _n_samples(self, worker: int) -> int:
        return self._batch_size * (len(self._partners[worker]) if self._group_of[worker].is_fc else 1)

    # ---- an iteration ----

    def _begin(self, worker: int) -> None:
        state = self._workers[worker]
        state.iteration += 1
        state.begin_s = self._loop.now_s
        if self._group_of[worker].is_fc:
            self._pieces[worker].ready = True
            self._take(worker)
        else:
            self._in_halves.forward(worker)
            self._draw(worker)
            self._forward(worker, 1)

    def _draw(self, worker: int) -> None:
        """The worker's computation begins: how long it will take."""
        load = self._n_samples(worker) / self._batch_size
        self._pieces[worker].device_s = self._workers[worker].device.seconds(self._loop.now_s, load)

    def _forward(self, worker: int, piece: int) -> None:
        """A convolution worker computes a piece, the first is 1, of its batch."""
        piece_s = self._group_of[worker].before * self._pieces[worker].device_s / self._n_pieces
        self._loop.after(piece_s, self._forwarded, worker, piece)

    def _forwarded(self, worker: int, piece: int) -> None:
        self._send(worker)
        if piece < self._n_pieces:
            self._forward(worker, piece + 1)
        else:
            self._pieces[worker].ready = True
            self._take(worker)

    def _send(self, worker: int) -> None:
        """The worker has computed a piece, and what comes of it goes to the other group."""
        size_bytes = self._batch_size // self._n_pieces * self._group_of[worker].row_bytes
        for partner in self._partners[worker]:
            self._ways[worker, partner].send(size_bytes, self._came, worker, partner)

    def _came(self, source: int, worker: int) -> None:
        pieces = self._pieces[worker]
        pieces.come[source] += 1
        self._take(worker)

    def _take(self, worker: int) -> None:
        """Compute with the next piece, if it is there and the worker is free."""
        pieces, group = self._pieces[worker], self._group_of[worker]
        if pieces.ready and min(pieces.come.values()) > pieces.taken:
            pieces.ready = False
            if group.is_fc and pieces.taken % self._n_pieces == 0:
                self._draw(worker)
            self._loop.after(group.after * pieces.device_s / self._n_pieces, self._taken, worker)

    def _taken(self, worker: int) -> None:
        pieces = self._pieces[worker]
        pieces.taken += 1
        if self._group_of[worker].is_fc:
            self._send(worker)
        if pieces.taken % self._n_pieces == 0:
            self._computed(worker)
        else:
            pieces.ready = True
            self._take(worker)

    def _learn(self, worker: int, lr: float) -> float:
        if self._group_of[worker].is_fc:
            return self._in_halves.compute(worker)
        self._in_halves.backward(worker)
        return math.nan

    # ---- its end ----

    def _exchange(self, worker: int) -> None:
        """When all of the group have computed, their gradients are summed."""
        group = self._group_of[worker]
        group.n_computing -= 1
        if group.n_computing == 0:
            group.n_computing = len(group.workers)
            if group.is_fc and self.coordinator.stopping:
                self._last = min(self._last, self._workers[worker].iteration + 1)
            self._links.all_reduce_among(group.workers, group.size_bytes, self._reduced, group, self._loop.now_s)

    def _reduced(self, group: _Group, began_s: float) -> None:
        """The all-reduce, which began then, is over for all of the group at the same time."""
        lockstep, n = group.lockstep, len(self._convolution.workers)
        rate = self._lr(lockstep.samples, lockstep.updates, len(self._workers))
        self._in_halves.step(rate, above=group.is_fc)
        lockstep.exchanged(n, n, n * self._batch_size)
        self._look()
        for worker in group.workers:
            peer = ALL_PEERS if group.is_fc else self._partners[worker][0]
            self._report(worker, peer, self._sent_bytes(worker), len(group.workers) - 1, began_s)
        for worker in group.workers:
            self._continue(worker)

    def _sent_bytes(self, worker: int) -> int:
        """In an iteration."""
        group = self._group_of[worker]
        return self._n_samples(worker) * group.row_bytes + ring_bytes(group.size_bytes, len(group.workers))

    def _spent(self, worker: int) -> tuple[float, float]:
        group, state = self._group_of[worker], self._workers[worker]
        compute_s = (group.before + group.after) * self._pieces[worker].device_s
        return compute_s, max(0.0, state.end_s - state.begin_s - compute_s)

    def _enough(self, worker: int) -> bool:
        return self._all_done(self._group_of[worker].lockstep)

    def _all_done(self, lockstep: Lockstep) -> bool:
        return lockstep.enough() or lockstep.updates >= self._last

    def _evaluate_if_due(self) -> None:
        """Not whenever somebody reports."""

    def _look(self) -> None:
        """At the weights, if both halves have made the same steps, an evaluation is due, and this is not the end."""
        above, below = self._fc.lockstep, self._convolution.lockstep
        if above.updates != below.updates or self._all_done(above):
            return
        if self._evaluations.begin_if_due(above.samples):
            judged = self._in_halves.evaluate()
            self.coordinator.evaluated(self._loop.now_s, above.updates, above.samples, *judged)
