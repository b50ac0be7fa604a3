"""The mean gradient of all ranks, formed in buckets while the backward pass still runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from hpcsync.mpi.collectives.allreduce import Agreed, Said, mean_vector
from hpcsync.mpi.collectives.compressed_allreduce import compressed_mean
from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.background_thread import Background
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.training.compressor import Compression
from hpcsync.training.flat_model import FlatModel

__all__ = ["BUCKET_BYTES", "Agreed", "BucketReducer", "Reduced"]

BUCKET_BYTES = 25_000_000


class Reduced(NamedTuple):
    """What one reduction cost this rank.

    waited_s: how long `finish` took; absent_s: how much of that others were not there yet; comm_s: how long means were
    being formed, waiting included, hidden behind the backward pass or not. sent_bytes: see `MeanVector.sent_bytes`.
    """

    waited_s: float = 0.0
    absent_s: float = 0.0
    comm_s: float = 0.0
    sent_bytes: int = 0


class BucketReducer:
    """Turns every rank's flat gradient into the mean over ranks, in place.

    The gradient is cut into buckets from its end, because that is computed first. A bucket is launched when autograd
    has completed it and all before it, in the same order on all ranks; a thread forms the means. The last bucket waits
    for `finish`, and with it goes what ranks agree upon.

    Where gradients are not to count alike, set `weight` before a backward pass: this rank's then counts so many times.

    Make it before anybody takes `flat.gradient`, which it may move to where all ranks of the node see it. Gradients may
    be cleared or dropped (`set_to_none`, which is faster) before a backward pass. As with DistributedDataParallel, a
    gradient that is not cleared after `finish` accumulates: the next mean is added to it.

    comm:                collective over it; the communication uses duplicates.
    bucket_bytes:        the largest bucket; the last one is smaller.
    at_end_of_backward:  called at the end of every backward pass that computes gradients, within `backward()`, which
                         raises what it raises; it may call `finish`.
    transport:           of the gradients' device.
    overlap:             whether buckets are launched during the backward pass. While it is off, gradients of several
                         backward passes add up and `finish` launches everything. It stays off where the MPI does not
                         allow calls from several threads, with one rank, and with compression.
    compression:         of every rank's gradient, which is one bucket then: it is compressed as a whole.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        flat: FlatModel,
        bucket_bytes: int = BUCKET_BYTES,
        at_end_of_backward: Callable[[], None] | None = None,
        overlap: bool = True,
        transport: Transport = HOST,
        compression: Compression | None = None,
    ) -> None:
        self._flat = flat
        self._at_end = at_end_of_backward
        self._can_overlap = compression is None and comm.size > 1 and MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self.overlap = overlap
        self.weight = 1.0
        self.reduced = Reduced()
        """Of the last `finish`."""
        step = max(1, bucket_bytes // flat.gradient.itemsize) if compression is None else flat.size
        self._buckets = [(max(0, end - step), end) for end in range(flat.size, 0, -step)]
        sizes = torch.tensor([p.numel() for p in flat.parameters])
        self._begins: list[int] = (sizes.cumsum(0) - sizes).tolist()
        self._begin_anew()
        self._pass = -1
        self._background = Background() if self._can_overlap else None
        self._stream = cuda.new_stream(flat.gradient.device)  # the background's
        if compression is None:
            self._mean = mean_vector(comm, flat.size, flat.gradient.dtype, transport)
        else:
            self._mean = compressed_mean(comm, flat.size, flat.gradient.dtype, transport, compression)
        flat.move_gradient(self._mean.vector)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._computed(index))
            for index, parameter in enumerate(flat.parameters)
        ]
        self._closed = False

    @property
    def overlap(self) -> bool:
        return self._overlap and self._can_overlap

    @overlap.setter
    def overlap(self, wanted: bool) -> None:
        self._overlap = wanted

    # ---- during the backward pass ----

    def _computed(self, index: int) -> None:
        """Autograd has completed this parameter's gradient."""
        if self._at_end is not None:
            self._call_at_end(self._at_end)
        if self._complete[index]:
            raise RuntimeError(
                "a second backward pass before the gradients of the first were reduced: call finish() in between, "
                "or switch overlap off to add them up"
            )
        self._flat.gather(index)  # at once: autograd then uses the memory for the next one, while it is in the cache
        if not self.overlap:
            return
        self._complete[index] = True
        while self._frontier > 0 and self._complete[self._frontier - 1]:
            self._frontier -= 1
        while self._launched < len(self._buckets) - 1 and self._buckets[self._launched][0] >= self._completed_from():
            self._launch()

    def _call_at_end(self, call: Callable[[], None]) -> None:
        """Once in each pass. A pass that raised leaves nothing behind that could confuse the next one."""
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(call)

    def _completed_from(self) -> int:
        """The element from which on the gradient is complete."""
        return self._begins[self._frontier] if self._frontier < len(self._begins) else self._flat.size

    def _launch(self) -> None:
        begin, end = self._buckets[self._launched]
        self._launched += 1
        assert self._background is not None
        call = cuda.after_this(lambda: self._reduce(begin, end, Said()), self._flat.gradient.device, self._stream)
        self._background.submit(call)

    def _reduce(self, begin: int, end: int, said: Said) -> Agreed:
        begin_s = time.perf_counter()
        if self.weight != 1.0:
            self._flat.gradient[begin:end].mul_(self.weight)
        agreed = self._mean.mean(begin, end, said)
        self._comm_s += time.perf_counter() - begin_s
        self._n_reduced += 1
        return agreed

    # ---- after it ----

    @property
    def n_reduced(self) -> int:
        """Buckets of which the mean is there, since the last `finish`."""
        return self._n_reduced

    def finish(
        self, contributing: bool = True, stop: bool = False, n_samples: int = 0, *, halt: bool = False
    ) -> Agreed:
        """Wait until the flat gradient is the weighted sum over all ranks divided by how many contribute. Collective.

        contributing: False from a rank that has no batch: its gradient counts as zero. It does so as often as others
                      step; when nobody contributes, the gradient is zero and all are done.
        stop, halt:   what one rank says, all are told, at the same step.
        n_samples:    of this rank's batch; all are told the sum.

        Raises RuntimeError for a rank that does not contribute but has launched gradients, or after `close`.
        """
        if self._closed:
            raise RuntimeError("finish() after close()")
        if not contributing and self._launched:
            raise RuntimeError("finish(contributing=False) after a backward pass whose gradients are on their way")
        begin_s, absent_s = time.perf_counter(), self._mean.absent_s
        if contributing:
            self._gather_rest()
        else:
            self._flat.zero_gradient()
        if self._launched and self._background is not None:
            self._background.wait()
        for begin, end in self._buckets[self._launched :]:
            agreed = self._reduce(begin, end, Said(int(contributing), n_samples, stop, halt))
        waited_s = time.perf_counter() - begin_s
        absent_s = min(waited_s, self._mean.absent_s - absent_s)
        self.reduced = Reduced(waited_s, absent_s, self._comm_s, self._mean.sent_bytes)
        self._begin_anew()
        return agreed

    def _gather_rest(self) -> None:
        for index, complete in enumerate(self._complete):
            if not complete:
                self._flat.gather(index)

    def _begin_anew(self) -> None:
        self._complete = [False] * len(self._flat.parameters)
        self._frontier = len(self._complete)  # all parameters from here on are complete
        self._launched = 0
        self._n_reduced = 0
        self._comm_s = 0.0

    def state(self) -> Any:
        """What this rank remembers from one gradient to the next, between `finish` and the next backward pass."""
        return self._mean.memory

    def restore(self, state: Any) -> None:
        """Go on from there."""
        self._mean.memory = state

    # ---- ending ----

    def close(self) -> None:
        """End the thread and remove the hooks; the gradient becomes private memory. Collective; may be repeated."""
        if self._closed:
            return
        self._let_go()
        if self._background is not None:
            self._background.close()
        self._flat.move_gradient(torch.empty_like(self._flat.gradient))
        self._mean.free()

    def _let_go(self) -> None:
        self._closed = True
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> BucketReducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A rank that fails cannot wait for the others: it leaves everything to the end of the job."""
        if error is None:
            self.close()
        else:
            self._let_go()
