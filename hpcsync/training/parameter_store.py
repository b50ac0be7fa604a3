"""The server's side of the arithmetic: weights, and versions of them that readers can rely on.

A `Store` holds one contiguous shard of the flat weights in several buffers of equal size, of which one is current. An
update happens in place while nobody reads the current buffer. While somebody does, the update moves on to a free buffer
and leaves the old one as it was. So a reader sees exactly the version it was promised, never half of an update; nobody
waits for anybody; and the usual case (no reader) costs no extra pass over memory.

Who reads is known without asking: a server promises a version to a reader (`pin`), and the reader says when it has
finished by writing the promise's serial number into its word of `done`, which may lie in an RMA window. A contribution
that arrives also says so, since a worker reads before it computes: that of the promises made before. At most one reader
per worker and one for evaluation means that `n_workers + 1` buffers always suffice where the contributor of an update
does not read, and one more where it may.

Rows are padded to whole vector registers. torch's fused optimizers, which need the fewest passes over memory, round the
scalar tail of a tensor differently from its vectorised body; without a tail the result of an element does not depend on
where its shard ends, and so the number of shards does not change a bit.

A worker that goes on before the update that takes its contribution would overwrite it: it is collected, which adds it
to a sum that the update begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hpcsync.training.update_rules import Rule

ROW_ELEMENTS = 64  # a multiple of what torch's kernels take at once, on any CPU


def row_size(shard_size: int) -> int:
    """Elements that a row of a store takes for a shard of this size; those past the shard are padding."""
    return -(-shard_size // ROW_ELEMENTS) * ROW_ELEMENTS


def n_buffers(n_workers: int, contributors_read: bool = False) -> int:
    """Buffers that a store with this many workers and one evaluator needs so that no update ever waits.

    contributors_read: whether the contributors of an update may still be reading the version that it starts from.
    """
    return n_workers + 1 + contributors_read


class Store:
    """One shard of the weights, and the rule by which it changes.

    buffers: (n_buffers, row) tensor; buffer 0 holds version 0.
    slots:   (n_workers, row) tensor; row w is where worker w's contribution lies when it is applied.
    done:    (n_workers + 1,) int64 array, all zero; the last word is the evaluator's.

    size:    elements of the shard; a row is `row_size(size)` long, and its padding is zero and stays so.
    """

    def __init__(self, buffers: torch.Tensor, slots: torch.Tensor, done: np.ndarray, rule: Rule, size: int) -> None:
        self._size = size
        self._buffers = buffers
        self._slots = list(slots)  # a view of each row: made once, not for every update
        self._done = done
        self._pinned = [0] * len(done)  # reader -> buffer
        self._serial = [0] * len(done)  # reader -> serial number of its latest promise
        self.version = 0
        self.current = 0
        self._parameter = torch.nn.Parameter(buffers[0])
        self._rule = rule
        rule.bind(self._parameter)
        self._contributing: set[int] = set()  # whose contributions came before their promises
        self._accumulated: torch.Tensor | None = None  # the sum for the next update
        self._has_accumulated = False

    @property
    def weights(self) -> torch.Tensor:
        """The current version, shape (size,), a view that later updates change."""
        return self._buffers[self.current, : self._size]

    def pin(self, reader: int, contributing: bool = False) -> tuple[int, int]:
        """Promise the current version to a reader: it may read the buffer until it writes the serial into its word.

        contributing: it is a worker whose contribution has come and is not applied yet, so that applying it does not
        say that this promise has been read. Returns (buffer, serial).
        """
        if contributing:
            self._contributing.add(reader)
        self._pinned[reader] = self.current
        self._serial[reader] += 1
        return self.current, self._serial[reader]

    def discard(self, worker: int) -> None:
        """It reads nothing any more; what it has contributed stays."""
        self._contributing.discard(worker)
        self._has_read(worker)

    def accumulate(self, worker: int, weight: float) -> None:
        """Add this worker's contribution, times its weight, to what the next update takes; spends its slot."""
        self._has_read(worker)
        if self._accumulated is None:
            self._accumulated = torch.zeros_like(self._slots[worker])
        if self._has_accumulated:
            self._accumulated.add_(self._slots[worker], alpha=weight)
        else:
            torch.mul(self._slots[worker], weight, out=self._accumulated)
        self._has_accumulated = True

    def apply(
        self, workers: Sequence[int], lr: float, weights: Sequence[float] = (), divisor: float | None = None
    ) -> None:
        """One update at this rate: what was collected and these workers' contributions, each times its weight, in this
        order, over the divisor; by default the mean of the workers'. Spends their slots."""
        weights = weights or (1.0,) * len(workers)
        divisor = float(len(workers)) if divisor is None else divisor
        for worker in workers:
            if worker not in self._contributing:
                self._has_read(worker)
        self._contributing.difference_update(workers)
        self._make_writable()
        contributions = [self._slots[worker] for worker in workers]
        if self._has_accumulated:
            assert self._accumulated is not None
            contributions, weights = [self._accumulated, *contributions], (1.0, *weights)
            self._has_accumulated = False
        self._rule.update(contributions, lr, weights, divisor)
        self.version += 1

    def state(self) -> dict[str, Any]:
        """All of it at a moment at which nobody reads, and every contribution that has begun to come has come."""
        return {
            "version": self.version,
            "weights": self._buffers[self.current].clone(),
            "accumulated": self._accumulated if self._has_accumulated else None,
            "rule": self._rule.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there, before anybody has read."""
        self.version = state["version"]
        self._buffers[self.current].copy_(state["weights"])
        accumulated = state["accumulated"]
        self._accumulated, self._has_accumulated = None, accumulated is not None
        if accumulated is not None:
            self._accumulated = accumulated.to(self._buffers.device)
        self._rule.restore(state["rule"])

    def _has_read(self, worker: int) -> None:
        """What it computed from its last promise is here."""
        self._done[worker] = self._serial[worker]

    def _make_writable(self) -> None:
        """Move on to a free buffer if anybody still reads the current one."""
        promises = zip(self._pinned, self._serial, self._done.tolist(), strict=True)
        read = {buffer for buffer, serial, done in promises if done != serial}
        if self.current not in read:
            return
        free = next(b for b in range(len(self._buffers)) if b not in read)
        self._buffers[free].copy_(self._buffers[self.current])
        self.current = free
        self._parameter.data = self._buffers[free]
