"""A server's shard of the weights, with versions that readers can rely on.

A `Store` holds one contiguous shard of the flat weights in several buffers of equal size, one of which is current. An
update changes the current buffer in place if it has no reader. Otherwise the update is made in a free buffer, and the
old one is left unchanged. A reader therefore sees exactly the version it was promised, never half of an update; readers
and updates do not wait for each other; and the usual case (no reader) costs no extra pass over memory.

The store knows its readers without messages: a server promises a version to a reader (`pin`), and the reader reports
completion by writing the promise's serial number into its word of `done`, which may be in an RMA window. The arrival of
a contribution also completes the promises made to its worker before, since a worker reads before it computes. With at
most one reader per worker and one for evaluation, `n_workers + 1` buffers always suffice if the contributors of an
update do not read, and one more if they may.

There may be fewer buffers that readers can reach. If none of these is free, an update is made in private memory, so it
does not wait. A promise of a version in private memory is kept as soon as a buffer is free, into which that version is
copied (`expose`): its reader waits until another one has read, never for an update.

Rows are padded to whole vector registers. torch's fused optimizers, which need the fewest passes over memory, round the
scalar tail of a tensor differently from its vectorised body. Without a tail, the result of an element does not depend
on where its shard ends, so the number of shards does not change a bit.

A rule that corrects contributions needs the weights that they were computed from. Only the arrival of its contribution
then completes a worker's promise, so that the version stays unchanged until it has been used.

A worker that continues before the update that takes its contribution would overwrite the contribution. The store
therefore accumulates it: it adds the contribution to a sum with which that update begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat

import numpy as np
import torch

from hpcsync.state import Stateful, built
from hpcsync.training.update_rules import Rule

ROW_ELEMENTS = 64  # a multiple of the vector width of torch's kernels on any CPU


def row_size(shard_size: int) -> int:
    """Return the elements in a store's row for a shard of this size; those past the shard are padding."""
    return -(-shard_size // ROW_ELEMENTS) * ROW_ELEMENTS


def n_buffers(n_workers: int, contributors_read: bool = False) -> int:
    """Return the number of buffers with which no version is ever in private memory.

    Parameters
    ----------
    n_workers
        Number of workers; there is one reader more, for evaluation.
    contributors_read
        True if contributors of an update may still be reading the version from which it starts.
    """
    return n_workers + 1 + contributors_read


class SavedRead(NamedTuple):
    """Weights of which the contributions of these workers have not been used."""

    weights: torch.Tensor
    workers: list[int]


class SavedStore(NamedTuple):
    """State of a store."""

    version: int
    weights: torch.Tensor
    accumulated: torch.Tensor | None
    stated: list[list[float]]
    rule: Any
    read: list[SavedRead]


class Store(Stateful):
    """One shard of the weights, and the rule of its updates.

    Parameters
    ----------
    buffers
        Tensor of shape (at least 1, row_size(size)), which readers can reach; buffer 0 holds version 0. Padding is zero
        and stays so.
    slots
        Row w, of row_size(size) elements, holds worker w's contribution. A list may be changed between calls.
    done
        int64 array of shape (n_workers + 1,), all zero; the last word is the evaluator's.
    rule
        The rule of updates.
    size
        Elements of the shard.
    stated
        float64 array of shape (n_workers, n_stated); row w holds what worker w has stated with its contribution
        (`training.script_optimizers`), nothing in jobs without a script.

    Attributes
    ----------
    version
        Number of updates made.
    current
        Index of the buffer that holds the current version; those from `n_shared` on are in private memory.
    n_shared
        Number of buffers that readers can reach.
    """

    def __init__(
        self,
        buffers: torch.Tensor,
        slots: torch.Tensor | list[torch.Tensor],
        done: np.ndarray,
        rule: Rule,
        size: int,
        stated: np.ndarray | None = None,
    ) -> None:
        self._size = size
        self._stated = stated
        self._buffers = list(buffers)  # views of the rows, made once rather than for every update
        self.n_shared = len(buffers)
        self._slots = slots if isinstance(slots, list) else list(slots)
        self._done = done
        self._pinned = [0] * len(done)  # reader -> buffer
        self._serial = [0] * len(done)  # reader -> serial number of its latest promise
        self._used = [0] * len(done)  # worker -> serial number of the latest promise of which the contribution arrived
        self.version = 0
        self.current = 0
        self._parameter = torch.nn.Parameter(buffers[0])
        self._rule = rule
        rule.bind(self._parameter)
        self._contributing: set[int] = set()  # workers whose contributions arrived before their promises
        self._accumulated: torch.Tensor | None = None  # sum for the next update
        self._has_accumulated = False
        self._accumulated_stated: list[np.ndarray] = []  # of the accumulated contributions

    @property
    def weights(self) -> torch.Tensor:
        """The current version, shape (size,): a view that later updates change."""
        return self._buffers[self.current][: self._size]

    def pin(self, reader: int, contributing: bool = False) -> tuple[int, int]:
        """Promise the current version to a reader, which may read until it writes the serial into its word.

        Parameters
        ----------
        reader
            Worker, or n_workers for the evaluator.
        contributing
            True for a worker whose contribution has arrived and is not yet applied; applying it then does not complete
            this promise.

        Returns
        -------
        buffer, serial : int
            Index of the buffer, and serial number of the promise.
        """
        if contributing:
            self._contributing.add(reader)
        self._pinned[reader] = self.current
        self._serial[reader] += 1
        return self.current, self._serial[reader]

    def expose(self, reader: int) -> int | None:
        """Return the index of a buffer that readers can reach, with the version promised to this reader.

        It is copied there if it is in private memory; None if no buffer is free.
        """
        buffer = self._pinned[reader]
        if buffer < self.n_shared:
            return buffer
        shared = self._free_shared()
        if shared is not None:
            self._copy_pinned(buffer, shared)
            if self.current == buffer:
                self._set_current(shared)
        return shared

    def discard(self, worker: int) -> None:
        """Complete a worker's promises, e.g. after its death; its contribution stays."""
        self._contributing.discard(worker)
        self._has_read(worker)

    def accumulate(self, worker: int, weight: float) -> None:
        """Add a worker's contribution, times its weight, to the sum of the next update, and free its slot."""
        if self._rule.corrects:
            self._correct(worker)
        self._has_read(worker)
        if self._accumulated is None:
            self._accumulated = torch.zeros_like(self._slots[worker])
        if self._has_accumulated:
            self._accumulated.add_(self._slots[worker], alpha=weight)
        else:
            torch.mul(self._slots[worker], weight, out=self._accumulated)
        self._has_accumulated = True
        if self._stated is not None:
            self._accumulated_stated.append(self._stated[worker].copy())

    def apply(
        self,
        workers: Sequence[int],
        lr: float,
        weights: Sequence[float] = (),
        divisor: float | None = None,
        momentum: float = math.nan,
    ) -> SupportsFloat:
        """Make one update from the accumulated sum and these workers' contributions, and free their slots.

        Parameters
        ----------
        workers
            Contributors, in the order of summation after the accumulated sum.
        lr
            Rate of the update.
        weights
            Factor of each contribution; all 1 if empty.
        divisor
            Divisor of the weighted sum; None: the number of these workers (their mean).
        momentum
            Momentum of the rule's optimizer from this update on; NaN: as before.

        Returns
        -------
        SupportsFloat
            Squared norm of this shard of the update's gradient; NaN if it is none, or not measured. On a GPU it may be
            read once the stream has been waited for.
        """
        weights = weights or (1.0,) * len(workers)
        divisor = float(len(workers)) if divisor is None else divisor
        if self._rule.corrects:
            for worker in workers:
                self._correct(worker)
        for worker in workers:
            if worker in self._contributing:
                self._contributing.remove(worker)
            else:
                self._has_read(worker)
        self._make_writable()
        contributions = [self._slots[worker] for worker in workers]
        if self._has_accumulated:
            assert self._accumulated is not None
            contributions, weights = [self._accumulated, *contributions], (1.0, *weights)
            self._has_accumulated = False
        if self._stated is not None:
            self._rule.follow([*self._accumulated_stated, *(self._stated[worker] for worker in workers)])
            self._accumulated_stated.clear()
        if not math.isnan(momentum):
            self._rule.set_momentum(momentum)
        gradient_sq = self._rule.update(contributions, lr, weights, divisor)
        self.version += 1
        return gradient_sq

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        It is to be called without partial contributions, and when no worker will read what it was promised; a rule that
        corrects contributions may still use it.
        """
        used_by: dict[int, list[int]] = {}
        for worker, buffer in enumerate(self._pinned[:-1]):
            if self._rule.corrects and self._used[worker] != self._serial[worker]:
                used_by.setdefault(buffer, []).append(worker)
        return {
            "version": self.version,
            "weights": self._buffers[self.current].clone(),
            "accumulated": self._accumulated if self._has_accumulated else None,
            "stated": [row.tolist() for row in self._accumulated_stated],
            "rule": self._rule.state(),
            "read": [{"weights": self._buffers[buffer].clone(), "workers": used_by[buffer]} for buffer in used_by],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned, before the first reader."""
        saved: SavedStore = built(SavedStore, state)
        self.version = saved.version
        built(torch.Tensor, saved.weights, self._buffers[self.current])
        self._accumulated, self._has_accumulated = None, saved.accumulated is not None
        if saved.accumulated is not None:
            self._accumulated = built(torch.Tensor, saved.accumulated, torch.zeros_like(self._slots[0]))
        self._accumulated_stated = [np.array(row) for row in saved.stated]
        self._rule.restore(saved.rule)
        for buffer, read in enumerate(saved.read, 1):
            if buffer == len(self._buffers):
                self._buffers.append(torch.empty_like(self._buffers[0]))
            built(torch.Tensor, read.weights, self._buffers[buffer])
            for worker in read.workers:
                self._pinned[worker] = buffer
                self._serial[worker] += 1
                self._done[worker] = self._serial[worker]  # only the correction needs it

    def _has_read(self, worker: int) -> None:
        """Complete a worker's last promise: its contribution computed from that version has arrived."""
        self._done[worker] = self._used[worker] = self._serial[worker]

    def _correct(self, worker: int) -> None:
        """Correct a worker's contribution, computed from the version that it was last promised."""
        self._rule.correct(worker, self._slots[worker], self._buffers[self._pinned[worker]])

    def _pinned_by(self, done: Sequence[int]) -> set[int]:
        """Return the buffers of promises that are not complete, given the serial numbers up to which they are."""
        promises = zip(self._pinned, self._serial, done, strict=True)
        return {buffer for buffer, serial, read in promises if read != serial}

    def _needed(self) -> set[int]:
        """Return the buffers that must not change: they have readers, or a contribution is to be corrected by them."""
        done: list[int] = self._done.tolist()
        return self._pinned_by([*self._used[:-1], done[-1]] if self._rule.corrects else done)

    def _make_writable(self) -> None:
        """Switch to a copy in a free buffer if the current one has readers."""
        needed = self._needed()
        if self.current not in needed:
            return
        free = self._first_free(needed)
        if free >= self.n_shared and self._rule.corrects and self.current not in self._pinned_by(self._done.tolist()):
            self._copy_pinned(self.current, free)  # no reader needs it, only corrections do
            return
        self._buffers[free].copy_(self._buffers[self.current])
        self._set_current(free)

    def _free_shared(self) -> int | None:
        """Return a free buffer that readers can reach; None if all have readers.

        A version without readers moves to private memory, if need be: one that only corrections need, or the current
        one.
        """
        shared, needed = range(self.n_shared), self._needed() | {self.current}
        free = next((buffer for buffer in shared if buffer not in needed), None)
        if free is None:
            read = self._pinned_by(self._done.tolist())
            free = min(set(shared) - read, key=lambda buffer: (buffer == self.current, buffer), default=None)
            if free is not None:
                private = self._first_free(needed)
                self._copy_pinned(free, private)
                if free == self.current:
                    self._set_current(private)
        return free

    def _first_free(self, needed: set[int]) -> int:
        """Return the first buffer that is not needed, if need be a new one in private memory."""
        for buffer in range(len(self._buffers)):
            if buffer not in needed:
                return buffer
        self._buffers.append(torch.empty_like(self._buffers[0]))
        return len(self._buffers) - 1

    def _copy_pinned(self, buffer: int, to: int) -> None:
        """Copy a buffer to another one, to which all promises of it move."""
        self._buffers[to].copy_(self._buffers[buffer])
        self._pinned = [to if pinned == buffer else pinned for pinned in self._pinned]

    def _set_current(self, buffer: int) -> None:
        self.current = buffer
        self._parameter.data = self._buffers[buffer]
