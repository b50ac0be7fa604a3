"""Layer separation (Stanza) in virtual time.

A convolution worker computes the forward pass of its batch piece by piece (micro-batches) and sends the activations of
each piece when they are ready. A fully-connected worker processes a piece when it has arrived from all workers that it
serves, and returns its gradients, with which these compute their backward passes, piece by piece. Each group then has
an all-reduce of its own and continues; that of the fully-connected workers may overlap with the convolution workers'
computation.

References
----------
Wu, Xu, Li and Xiong, "Stanza", arXiv:1812.10624. Only its abstract and introduction were available; the messages and
their timing are our own interpretation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hpcsync.config.job import Job
from hpcsync.core.peer_coordinator import ring_bytes
from hpcsync.core.stanza_resolution import divided, stanza_options
from hpcsync.paradigms.peer_method import PENDING, Agreed, ExchangeResult, StepCounts
from hpcsync.paradigms.records import ALL_PEERS
from hpcsync.simulator.peer_numerics import NullNumerics
from hpcsync.simulator.peer_run import PeerSimulation
from hpcsync.simulator.stanza_numerics import TwoHalves
from hpcsync.workloads.registry import Workload


@dataclass(slots=True)
class _Pieces:
    """Progress of a worker through the pieces of the whole run.

    Attributes
    ----------
    n_received
        Number of pieces received from each source worker.
    n_computed
        Number of pieces processed.
    ready
        True if the worker could process the next piece now.
    device_s
        Duration of an iteration of the whole model on this worker, in seconds.
    """

    n_received: dict[int, int]
    n_computed: int = 0
    ready: bool = False
    device_s: float = 0.0


@dataclass(slots=True)
class _Group:
    """Workers that hold the same part of the model, above the cut (`is_fc`) or below it.

    Attributes
    ----------
    size_bytes
        Size of the part's weights in bytes.
    row_bytes
        Bytes that its workers send per sample.
    before, after
        Shares of the duration of an iteration of the whole model, computed before and after receiving from the other
        group.
    n_computed
        Number of workers that have reached the next all-reduce.
    n_steps
        Number of steps of the group.
    """

    workers: range
    size_bytes: int
    row_bytes: int
    before: float
    after: float
    is_fc: bool
    n_computed: int = 0
    n_steps: int = 0


class StanzaSimulation(PeerSimulation):
    """Simulation of layer separation; all workers end after the same iteration.

    A stop request (time limit or target) is agreed on in the fully-connected workers' all-reduce; one more iteration
    follows.
    """

    _numerics: TwoHalves | NullNumerics

    def __init__(self, job: Job, workload: Workload, *of_every_run: Any) -> None:
        self._model = model = divided(job, workload)
        super().__init__(job, workload, *of_every_run)
        groups, shape = job.groups, model.shape
        self.attributes = shape.attributes()
        forward, backward, above = stanza_options(job).shares
        forward_bytes, backward_bytes = shape.activation_bytes + shape.label_bytes, shape.activation_bytes
        self._fc = _Group(groups.fc, shape.fc_bytes, backward_bytes, 0.0, above, is_fc=True)
        self._convolution = _Group(groups.convolution, shape.conv_bytes, forward_bytes, forward, backward, is_fc=False)
        self._group_of = [self._fc if groups.is_fc(worker) else self._convolution for worker in range(groups.n_workers)]
        self._partners = [groups.served(fc) for fc in groups.fc]  # worker -> workers that it sends to
        self._partners += [range(fc := groups.fc_of(worker), fc + 1) for worker in groups.convolution]
        self._pieces = [_Pieces(dict.fromkeys(partners, 0)) for partners in self._partners]
        self._channels = {
            (source, target): self._links.in_order(source, target)
            for source, partners in enumerate(self._partners)
            for target in partners
        }
        self._n_pieces = stanza_options(job).micro_batches
        for state, group in zip(self._workers, self._group_of, strict=True):
            state.step_s = state.step_s * group.size_bytes / self._links.size_bytes
        self._last = math.inf  # iteration
        self._halt_after = 0  # iteration

    def _create_numerics(self, job: Job, workload: Workload) -> TwoHalves:
        assert self._model.halves is not None
        return TwoHalves(job, workload, self._model.halves)

    def _n_samples(self, worker: int) -> int:
        return self._batch_size * (len(self._partners[worker]) if self._group_of[worker].is_fc else 1)

    # ---- an iteration ----

    def _begin(self, worker: int) -> None:
        state = self._workers[worker]
        state.begin_s, state.n_samples = self._loop.now_s, self._n_samples(worker)
        if self._group_of[worker].is_fc:
            self._pieces[worker].ready = True
            self._start_next_piece(worker)
        else:
            self._numerics.forward(worker)
            self._draw_duration(worker)
            self._forward(worker, 1)

    def _draw_duration(self, worker: int) -> None:
        """Draw the duration of the worker's computation, which begins now."""
        state = self._workers[worker]
        load = state.n_samples / self._batch_size
        self._pieces[worker].device_s = state.device.seconds(self._loop.now_s, load, self._n_pieces)

    def _forward(self, worker: int, piece: int) -> None:
        """Compute the forward pass of a piece, counted from 1, on a convolution worker."""
        piece_s = self._group_of[worker].before * self._pieces[worker].device_s / self._n_pieces
        self._loop.after(piece_s, self._forwarded, worker, piece)

    def _forwarded(self, worker: int, piece: int) -> None:
        self._send(worker)
        if piece < self._n_pieces:
            self._forward(worker, piece + 1)
        else:
            self._pieces[worker].ready = True
            self._start_next_piece(worker)

    def _send(self, worker: int) -> None:
        """Send the results of a piece to the other group."""
        size_bytes = self._batch_size // self._n_pieces * self._group_of[worker].row_bytes
        for partner in self._partners[worker]:
            self._channels[worker, partner].send(size_bytes, self._piece_arrived, worker, partner)

    def _piece_arrived(self, source: int, worker: int) -> None:
        pieces = self._pieces[worker]
        pieces.n_received[source] += 1
        self._start_next_piece(worker)

    def _start_next_piece(self, worker: int) -> None:
        """Process the next piece if it has arrived and the worker is free."""
        pieces, group = self._pieces[worker], self._group_of[worker]
        if pieces.ready and min(pieces.n_received.values()) > pieces.n_computed:
            pieces.ready = False
            if group.is_fc and pieces.n_computed % self._n_pieces == 0:
                self._draw_duration(worker)
            self._loop.after(group.after * pieces.device_s / self._n_pieces, self._piece_computed, worker)

    def _piece_computed(self, worker: int) -> None:
        pieces = self._pieces[worker]
        pieces.n_computed += 1
        if self._group_of[worker].is_fc:
            self._send(worker)
        if pieces.n_computed % self._n_pieces == 0:
            self._computed(worker)
        else:
            pieces.ready = True
            self._start_next_piece(worker)

    def _compute(self, worker: int) -> float:
        group, state = self._group_of[worker], self._workers[worker]
        state.compute_s = (group.before + group.after) * self._pieces[worker].device_s
        state.waited_s = max(0.0, state.end_s - state.begin_s - state.compute_s)
        if group.is_fc:
            return self._numerics.compute(worker)
        self._numerics.backward(worker)
        return math.nan

    # ---- the end of an iteration ----

    def sum(self, worker: int, counts: StepCounts, lr: float) -> Any:
        """Sum the group's gradients once all of its workers have computed."""
        group = self._group_of[worker]
        group.n_computed += 1
        if group.n_computed == len(group.workers):
            group.n_computed = 0
            if group.is_fc and self.coordinator.stopping:
                self._last = min(self._last, self._workers[worker].machine.iteration + 1)
            if group.is_fc and counts.halt and self._halt_after < self._workers[worker].machine.iteration:
                self._halt_after = self._workers[worker].machine.iteration + 1
            for of_group in group.workers:
                self._workers[of_group].exchange_s = self._loop.now_s
            self._links.all_reduce_among(group.workers, group.size_bytes, self._reduced, group, lr)
        return PENDING

    def _reduced(self, group: _Group, lr: float) -> None:
        """End the all-reduce for the whole group at once."""
        self._numerics.step(lr, above=group.is_fc)
        group.n_steps += 1
        n = len(self._convolution.workers)
        stop, halt = group.n_steps >= self._last, group.n_steps == self._halt_after
        agreed = Agreed(n, n, n * self._batch_size, stop, halt)
        self._resume_together((worker, (agreed, self._result(worker))) for worker in group.workers)

    def _result(self, worker: int) -> ExchangeResult:
        group = self._group_of[worker]
        peer = ALL_PEERS if group.is_fc else self._partners[worker][0]
        sent_bytes = self._n_samples(worker) * group.row_bytes + ring_bytes(group.size_bytes, len(group.workers))
        return ExchangeResult(peer, sent_bytes, len(group.workers) - 1)
