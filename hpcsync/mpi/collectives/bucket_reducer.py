"""Bucket reducer: the mean gradient of all ranks, formed in buckets while the backward pass is running."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from hpcsync.core.peer_coordinator import default_bucket_bytes, gradient_buckets
from hpcsync.mpi.collectives.allreduce import mean_vector
from hpcsync.mpi.collectives.compressed_allreduce import compressed_mean
from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.background_thread import Background
from hpcsync.mpi.transport.communicator import takes_several_threads
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.paradigms.peer_method import Agreed, StepCounts
from hpcsync.state import Stateful, built, plain
from hpcsync.training.compressor import Compression
from hpcsync.training.flat_model import FlatModel, squared_norm

__all__ = ["Agreed", "BucketReducer", "Reduced"]

ONE_STEP = StepCounts()


class Reduced(NamedTuple):
    """Cost of one reduction on this rank.

    Attributes
    ----------
    waited_s : float
        Duration of `finish`, in seconds.
    absent_s : float
        Part of `waited_s` in which other ranks had not arrived, in seconds.
    comm_s : float
        Time during which means were formed, including waiting, whether or not the backward pass hid it, in seconds.
    sent_bytes : int
        See `MeanVector.sent_bytes`.
    gradient_sq, mean_sq : float
        Squared norms of this rank's gradient and of the mean; NaN if they are not measured.
    """

    waited_s: float = 0.0
    absent_s: float = 0.0
    comm_s: float = 0.0
    sent_bytes: int = 0
    gradient_sq: float = math.nan
    mean_sq: float = math.nan


class BucketReducer(Stateful):
    """Reducer that turns every rank's flat gradient into the mean over ranks, in place.

    The gradient is divided into buckets from its end, because its end is computed first. A bucket is launched when
    autograd has completed it and all buckets before it, in the same order on all ranks; a background thread forms the
    means. The last bucket waits for `finish`, and carries what ranks agree on.

    Parameters
    ----------
    comm
        Communicator; the constructor is collective over it. Communication uses duplicates.
    flat
        Model whose gradient to reduce. Create the reducer before any use of `flat.gradient`, which may move to memory
        that all ranks of the node address.
    bucket_bytes
        Size of the largest bucket, in bytes; the last one is smaller. None: the default.
    at_end_of_backward
        Called at the end of every backward pass that computes gradients, within `backward()`, which propagates its
        exceptions; it may call `finish`.
    overlap
        Returns whether buckets are launched during the backward pass under way. Otherwise gradients of several backward
        passes accumulate, and `finish` launches all buckets. There is never overlap if MPI does not allow calls from
        several threads, with one rank, or with compression.
    transport
        Transport of the gradient's device.
    compression
        Compression of every rank's gradient, which is then one bucket: it is compressed as a whole.
    measures
        Whether the norms of gradients are measured, bucket by bucket.

    Attributes
    ----------
    weight : float
        Factor of this rank's gradient in the sum, for gradients that do not count equally; set it before a backward
        pass.
    reduced : Reduced
        Cost of the latest `finish`.

    Notes
    -----
    Gradients may be cleared or dropped (`set_to_none`, which is faster) before a backward pass. As with
    DistributedDataParallel, a gradient that is not cleared after `finish` accumulates: the next mean is added to it.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        flat: FlatModel,
        bucket_bytes: int | None = None,
        at_end_of_backward: Callable[[], None] | None = None,
        overlap: Callable[[], bool] = lambda: True,
        transport: Transport = HOST,
        compression: Compression | None = None,
        *,
        measures: bool = False,
    ) -> None:
        self._comm = comm
        self._measures = measures
        self._flat = flat
        self._at_end = at_end_of_backward
        self._can_overlap = compression is None and comm.size > 1 and takes_several_threads(comm)
        self._overlap = overlap
        self.weight = 1.0
        self.reduced = Reduced()
        sizes = torch.tensor([p.numel() for p in flat.parameters])
        self._begins: list[int] = (sizes.cumsum(0) - sizes).tolist()
        self._reset()
        self._pass = -1
        self._background = Background() if self._can_overlap else None
        self._stream = cuda.new_stream(flat.gradient.device)  # of the background thread
        if compression is None:
            self._mean = mean_vector(comm, flat.size, flat.gradient.dtype, transport)
            largest = bucket_bytes or default_bucket_bytes(flat.gradient.nbytes, between_nodes=self._mean.between_nodes)
            step = -(-largest // flat.gradient.itemsize)
        else:
            self._mean = compressed_mean(comm, flat.size, flat.gradient.dtype, transport, compression)
            step = flat.size
        self._buckets = gradient_buckets(flat.size, step)
        flat.move_gradient(self._mean.vector)
        self._hooks = [self._hooked(index, parameter) for index, parameter in enumerate(flat.parameters)]
        self._closed = False

    # ---- during the backward pass ----

    def _hooked(self, index: int, parameter: torch.nn.Parameter) -> torch.utils.hooks.RemovableHandle:
        """Let autograd call `_computed` for this parameter; for one that is frozen, once it is trained."""
        trained = parameter.requires_grad
        parameter.requires_grad_(True)
        hook = parameter.register_post_accumulate_grad_hook(lambda _: self._computed(index))
        parameter.requires_grad_(trained)
        return hook

    def _computed(self, index: int) -> None:
        """Launch the buckets that are complete, now that autograd has completed this parameter's gradient."""
        if self._at_end is not None:
            self._call_at_end(self._at_end)
        if self._complete[index]:
            raise RuntimeError(
                "second backward pass before the gradients of the first were reduced: call finish() in between, "
                "or let overlap return False to accumulate them"
            )
        gradient, overlaps = self._flat.parameters[index].grad, self._can_overlap and self._overlap()
        if not overlaps and gradient is not None and gradient.requires_grad:
            return  # a script may still differentiate it
        self._flat.gather(index)  # at once: autograd then reuses the memory for the next one while it is in the cache
        if not overlaps:
            return
        self._complete[index] = True
        while self._frontier > 0 and self._complete[self._frontier - 1]:
            self._frontier -= 1
        while self._launched < len(self._buckets) - 1 and self._buckets[self._launched][0] >= self._completed_from():
            self._launch()

    def _call_at_end(self, call: Callable[[], None]) -> None:
        """Queue `call` once per backward pass; a pass that raised leaves no state that could affect the next one."""
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(call)

    def _completed_from(self) -> int:
        """Return the first element from which on the gradient is complete."""
        return self._begins[self._frontier] if self._frontier < len(self._begins) else self._flat.size

    def _launch(self) -> None:
        begin, end = self._buckets[self._launched]
        self._launched += 1
        assert self._background is not None
        call = cuda.after_this(lambda: self._reduce(begin, end, ONE_STEP), self._flat.gradient.device, self._stream)
        self._background.submit(call)

    def _reduce(self, begin: int, end: int, own_counts: StepCounts) -> Agreed:
        begin_s = time.perf_counter()
        bucket = self._flat.gradient[begin:end]
        if self._measures:
            self._gradient_sq += squared_norm(bucket)
        if self.weight != 1.0:
            bucket.mul_(self.weight)
        agreed = self._mean.mean(begin, end, own_counts)
        if self._measures:
            self._mean_sq += squared_norm(bucket)
        self._comm_s += time.perf_counter() - begin_s
        self._n_reduced += 1
        return agreed

    # ---- while it is padded ----

    def launch_padded(self, pad: Callable[[float], None]) -> None:
        """Launch all buckets but the last after a backward pass, as if it were still under way.

        Parameters
        ----------
        pad
            Called with the share of the gradient that must be complete; returns once it is.
        """
        if not self._can_overlap:
            return
        self._gather_rest()
        self._complete[:] = [True] * len(self._complete)
        for begin, _ in self._buckets[self._launched : -1]:
            pad(1.0 - begin / self._flat.size)
            self._launch()

    # ---- after it ----

    @property
    def n_reduced(self) -> int:
        """Number of buckets whose mean has been formed since the latest `finish`."""
        return self._n_reduced

    def finish(self, counts: StepCounts = ONE_STEP) -> Agreed:
        """Complete the mean gradient: the weighted sum divided by the number of contributing ranks; collective.

        Parameters
        ----------
        counts
            Information of this rank, but for `n_absent`. A rank that has no batch contributes no steps: its gradient
            counts as zero. It calls this as often as the others step; when no rank contributes, the gradient is zero
            and all ranks have finished.

        Returns
        -------
        Agreed
            The same on all ranks.

        Raises
        ------
        RuntimeError
            After `close`, or if the rank does not contribute but has launched gradients.
        """
        if self._closed:
            raise RuntimeError("finish() after close()")
        contributing = counts.n_steps > 0
        if not contributing and self._launched:
            raise RuntimeError("finish() without a contribution after a backward pass that launched gradients")
        begin_s, absent_s = time.perf_counter(), self._mean.absent_s
        if contributing:
            self._gather_rest()
        else:
            self._flat.drop_gradient()
            self._flat.gradient.zero_()
        if self._launched and self._background is not None:
            self._background.wait()
        absent = [p.grad is None for p in self._flat.parameters] if contributing else []
        own_counts = counts._replace(n_absent=sum(absent))
        for begin, end in self._buckets[self._launched :]:
            agreed = self._reduce(begin, end, own_counts)
        self._flat.return_gradient(self._present(agreed, absent))
        waited_s = time.perf_counter() - begin_s
        absent_s = min(waited_s, self._mean.absent_s - absent_s)
        norms = (self._gradient_sq if contributing else math.nan, self._mean_sq) if self._measures else ()
        self.reduced = Reduced(waited_s, absent_s, self._comm_s, self._mean.sent_bytes, *norms)
        self._reset()
        return agreed

    def _present(self, agreed: Agreed, absent: Sequence[bool]) -> Sequence[bool]:
        """Return for each parameter whether any rank has a gradient, and so all have their mean; collective."""
        n = len(self._flat.parameters)
        if agreed.n_absent == 0:
            return [agreed.n_steps > 0] * n
        found = self._comm.allgather(absent or [True] * n)
        return [not all(each) for each in zip(*found, strict=True)]

    def _gather_rest(self) -> None:
        for index, complete in enumerate(self._complete):
            if not complete:
                self._flat.gather(index)

    def _reset(self) -> None:
        self._complete = [False] * len(self._flat.parameters)
        self._frontier = len(self._complete)  # parameters with this index or a higher one are complete
        self._launched = 0
        self._n_reduced = 0
        self._comm_s = self._gradient_sq = self._mean_sq = 0.0

    def state(self) -> Any:
        """Return this rank's state between gradients; call it between `finish` and the next backward pass."""
        return plain(self._mean.memory)

    def restore(self, state: Any) -> None:
        """Restore a state returned by `state`."""
        built(Stateful | None, state, self._mean.memory)

    # ---- ending ----

    def close(self) -> None:
        """End the thread and remove the hooks; collective, and harmless when repeated.

        The gradient becomes private memory.
        """
        if self._closed:
            return
        self._remove_hooks()
        if self._background is not None:
            self._background.close()
        self._flat.move_gradient(torch.empty_like(self._flat.gradient))
        self._mean.free()

    def _remove_hooks(self) -> None:
        self._closed = True
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> BucketReducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the reducer; after an exception only remove the hooks.

        A rank that fails cannot wait for the others, so all else is left to the end of the job.
        """
        if error is None:
            self.close()
        else:
            self._remove_hooks()
