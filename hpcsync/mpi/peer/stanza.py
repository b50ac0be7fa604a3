"""Layer separation (Stanza) on a rank, transparent to the training loop.

During the run the model's `forward` is replaced. On a convolution worker it computes the layers below the cut, sends
the activations, and returns a placeholder for the output, which holds no numbers: output and loss are computed on
another rank. The backward pass of the placeholder waits for the gradients of the activations and continues with them.
On a fully-connected worker the batches are the received activations and labels; its `forward` computes the layers
above the cut, and the gradients of the activations are returned at the end of its backward pass, before anything else.

References
----------
Wu, Xu, Li and Xiong, "Stanza", arXiv:1812.10624.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Script
from hpcsync.core.iterations import Iterations
from hpcsync.core.stanza_resolution import stanza_options
from hpcsync.mpi.collectives.model_parts import SeparatedLayers
from hpcsync.mpi.peer.activation_exchange import ActivationExchange, Rows
from hpcsync.mpi.peer.exchange import Setup, Summing
from hpcsync.mpi.transport import cuda
from hpcsync.paradigms.peer_method import Agreed, ExchangeResult, StepCounts
from hpcsync.paradigms.records import ALL_PEERS
from hpcsync.planning.split_cost import Shape
from hpcsync.training.batch_sources import Ordered, Source
from hpcsync.training.flat_model import trainable
from hpcsync.training.model_split import ModelSplit, activation_shape, check_halves, tensors_of, without_values


class StanzaExchange(Summing):
    """Exchange of a worker that trains one part of the model, whose gradient is summed within its group.

    Created in two steps: the sizes of the transferred tensors are only known when the loop begins (`prepare`).

    A stop command is agreed on by the fully-connected workers and sent with the next activation gradients; all workers
    end after that iteration.
    """

    state_types = {"_stop": bool}
    one_sided = True
    participates = False  # no worker can continue without the others

    def __init__(self, setup: Setup) -> None:
        job, layers, stanza = setup.job, cast("SeparatedLayers", setup.layers), stanza_options(setup.job)
        super().__init__(setup, layers.group, lambda: self._overlaps)
        self._layers, self._groups, self._pieces = layers, layers.groups, stanza.micro_batches
        self._cut = stanza.cut
        # Duration of a piece as a share of an iteration of the whole model.
        forward, backward, above = stanza.shares
        self._forward_share, self._backward_share = forward / self._pieces, backward / self._pieces
        self._fc_share = above / self._pieces
        self._prepared: list[Any] | None = None  # shapes and dtypes of the batches
        self._activations: ActivationExchange
        self._row_shape: tuple[int, ...] = ()  # of a sample's activations
        self._iterations: Iterations
        self._is_script = isinstance(job.workload, Script)
        self._overlaps = False  # whether the backward pass under way does: the last one of a step may
        self._may_overlap = job.cluster.compute is None and not layers.is_fc and not self._is_script
        self._batch: Sequence[torch.Tensor] = ()  # the current batch, until its step
        self._version = 0  # autograd version of its first tensor
        self._computed = 0  # pieces whose backward pass is done
        self._under_way: list[torch.Tensor] = []  # a convolution worker's activations, with their autograd graph
        # Agreed on by the fully-connected workers: the next iteration is the last one, or all workers halt after it.
        self._stop = self._halt = False

    def prepare(self, source: Source | None, iterations: Iterations) -> Mapping[str, int]:
        """Create the activation exchange from the shapes of the samples, in the first loop.

        Raises
        ------
        JobError
            If the model cannot be split at ``paradigm.cut``, or a part of it is frozen.
        RuntimeError
            If a later loop has batches of another shape.
        """
        assert isinstance(source, Ordered)
        self._refuse_frozen()
        sample, batch_size = self._sample(source), source.batch_size
        batch = [(batch_size, *tensor.shape[1:], tensor.dtype) for tensor in sample]
        if self._prepared is not None:
            if batch != self._prepared:
                raise RuntimeError("shard: with separated layers all loops must have batches of the same shape")
            return {}
        self._prepared, self._iterations = batch, iterations
        layers, groups, dtype = self._layers, self._groups, self._flat.weights.dtype
        activations = Rows(activation_shape(layers.below, sample[0]), dtype)
        self._row_shape = activations.shape
        labels = [Rows(tuple(label.shape[1:]), label.dtype) for label in sample[1:]]
        self._activations = ActivationExchange(self._link, groups, batch_size, self._pieces, activations, labels)
        if layers.is_fc:  # its gradient is weighted by the number of samples received
            self._reducer.weight = groups.weight(self._link.comm.rank)
        else:
            self._output = without_values(layers.above, torch.empty(batch_size, *activations.shape, dtype=dtype))
        layers.model.forward = self._compute_above if layers.is_fc else self._compute_below
        n_below, n_above = (sum(p.numel() for p in trainable(half)) for half in (layers.below, layers.above))
        label_bytes = sum(label.n_bytes for label in labels)
        return Shape(n_below, n_above, activations.size, label_bytes, dtype.itemsize).attributes()

    def _sample(self, source: Ordered) -> Sequence[torch.Tensor]:
        """Return one sample, used to check the two parts; raise JobError if they are not the whole model."""
        layers, device = self._layers, self._flat.weights.device
        gpus = [device] * (device.type == "cuda")
        with torch.random.fork_rng(devices=gpus):  # its random numbers do not belong to the run
            batch = source.first()
            try:
                sample = tensors_of(batch)
                if self._is_script and self._prepared is None:
                    x = sample[0].to(device)
                    check_halves(layers.model, ModelSplit(layers.below, layers.above), x)
            except ValueError as error:
                raise JobError(f"paradigm.cut = {shown(self._cut)}: {error}") from None
        return sample

    def _refuse_frozen(self) -> None:
        """Raise JobError if a part has no parameter to train: no gradient would be computed there."""
        for half, where in ((self._layers.below, "below"), (self._layers.above, "above")):
            if not any(p.requires_grad for p in half.parameters()):
                raise JobError(
                    f"paradigm.cut = {shown(self._cut)}: a layer {where} the cut must be trained; the script has "
                    "frozen all of them"
                )

    # ---- an iteration ----

    def begin(self, batch: Any) -> Any:
        """Begin an iteration; on a fully-connected worker return the received activations and labels."""
        if self._batch:
            raise JobError(
                "shard: with separated layers every batch must be computed and stepped before the next one is drawn, "
                "because the other group waits for it: gradients cannot accumulate over batches (and on a convolution "
                "worker the loss is never a number)"
            )
        self._activations.waited_s = 0.0
        self._computed = 0
        if self._layers.is_fc:
            self._activations.wait(0)
            batch = self._activations.tensors()
            if self._is_script:  # a script may keep them, or read them after the next ones have arrived
                batch = tuple(tensor.clone() for tensor in batch)
        self._batch, self._version = batch, batch[0]._version
        return batch

    def _compute_below(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """Compute a convolution worker's forward pass of the current batch."""
        if not torch.is_grad_enabled() or self._under_way or not self._batch or len(inputs) != 1 or options:
            raise RuntimeError(
                "the model: with separated layers a convolution worker has only some of them; call it once for each "
                "batch of the session's shard, with the batch's first tensor alone, and with gradients enabled"
            )
        self._refuse_frozen()
        labels = [label.tensor_split(self._pieces) for label in self._batch[1:]]
        for piece, rows in enumerate(inputs[0].tensor_split(self._pieces)):
            self._iterations.resume()
            activations = self._layers.below(rows)
            cuda.ready(activations)
            self._iterations.rest(self._forward_share)
            sent = activations.to(self._flat.weights.dtype)  # autocast may have changed the dtype
            self._activations.send(piece, sent, [label[piece] for label in labels])
            self._under_way.append(activations)
        anchor = torch.full_like(self._output, math.nan, device=activations.device)
        return _OutputPlaceholder.apply(anchor.requires_grad_(), self)

    def continue_below(self) -> None:
        """Continue a convolution worker's backward pass from the gradients of its activations."""
        for piece, activations in enumerate(self._under_way):
            gradient = self._activations.gradient(piece)
            self._overlaps = self._may_overlap and piece == self._pieces - 1
            self._iterations.resume()
            torch.autograd.backward(activations, gradient.to(activations.dtype))
            cuda.ready(self._flat.gradient)
            self._iterations.rest(self._backward_share)
            self._computed += 1
        self._overlaps = False
        self._under_way = []

    def _compute_above(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """Compute a fully-connected worker's forward pass of the next piece of the current batch."""
        if not torch.is_grad_enabled():
            if inputs[0].shape[1:] != self._row_shape:
                raise RuntimeError(
                    "the model: with separated layers no rank has the whole model within the with block; evaluate with "
                    "evaluate of connect, or after the block"
                )
            return self._layers.above(*inputs)
        activations, piece = inputs[0], self._computed
        if not self._is_next(activations) or len(inputs) != 1 or options:
            raise RuntimeError(
                "the model: with separated layers call a fully-connected worker's model once for each batch, with the "
                "batch's first tensor unmodified: preprocessing of samples belongs into the data set or the model"
            )
        self._refuse_frozen()
        if piece > 0:
            self._activations.wait(piece)
        self._iterations.resume()
        arrived: torch.Tensor = _ActivationInput.apply(activations.detach().requires_grad_(), self)
        return self._layers.above(arrived)

    def _is_next(self, activations: torch.Tensor) -> bool:
        """Return True if these are the activations of the next piece, unmodified."""
        if not self._batch or self._computed == self._pieces:
            return False
        rows = self._batch[0].tensor_split(self._pieces)[self._computed]
        changed = self._is_script and activations._version != self._version
        return (activations.data_ptr(), activations.shape) == (rows.data_ptr(), rows.shape) and not changed

    def return_gradients(self, gradient: torch.Tensor) -> None:
        """Return the activations' gradients at the end of a fully-connected worker's backward pass.

        The gradient of the mean over all rows of the piece is scaled to that of each convolution worker's own mean.
        """
        cuda.ready(gradient)
        self._iterations.rest(self._fc_share)
        if (factor := self._groups.own_mean(self._link.comm.rank, self._pieces)) != 1.0:
            gradient = gradient * factor
        self._activations.return_gradients(self._computed, gradient, self._stop, self._halt)
        self._computed += 1

    def sum(self, worker: int, counts: StepCounts, lr: float) -> tuple[Agreed, ExchangeResult]:
        """Make the step along the group's mean gradient."""
        if self._computed != self._pieces:
            raise RuntimeError("step: with separated layers it must follow a backward pass through the model")
        self._batch = ()
        is_fc = self._layers.is_fc
        agreed = self._finish(counts._replace(stop=counts.stop and is_fc, halt=counts.halt and is_fc))
        self._step_together(agreed, lr, contributes=True)
        last, halt = (self._stop, self._halt) if is_fc else (self._activations.last, self._activations.halt)
        self._stop = self._stop or agreed.stop
        self._halt = agreed.halt and not halt
        n_steps = self._groups.n_convolution
        return Agreed(n_steps, n_steps, agreed.n_samples, last, halt), self._costs()

    def _costs(self) -> ExchangeResult:
        """Return what the activation exchange and the all-reduce have moved, and set the seconds that they took."""
        begin_s = time.perf_counter()
        self._activations.finish()
        sending_s = time.perf_counter() - begin_s
        cost, activations, worker = self._reducer.reduced, self._activations, self._link.comm.rank
        self.wait_s = activations.waited_s + cost.absent_s
        self.comm_s = cost.waited_s - cost.absent_s + sending_s
        return ExchangeResult(
            peer=ALL_PEERS if self._layers.is_fc else self._groups.fc_of(worker),
            wire_bytes=activations.sent_bytes + cost.sent_bytes,
            n_received=self._layers.group.size - 1,
        )

    # ---- the end ----

    def publish(self, serial: int, buffers: Mapping[str, torch.Tensor] | None = None) -> bool:
        """Publish this part of the model, on the first worker of each group only; it is equal within the group."""
        return self._layers.group.rank > 0 or super().publish(serial, buffers)

    def end(self, *, early: bool) -> None:
        """End the loop, and tell the others if it is early."""
        if self._prepared is not None:
            del self._layers.model.forward
            if early:
                self._activations.leave()

    def free(self) -> None:
        """Free the reducer and the activation exchange; collective."""
        super().free()
        if self._prepared is not None:
            self._activations.free()


class _OutputPlaceholder(torch.autograd.Function):
    """Placeholder for an output that is computed on another rank."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, exchange: StanzaExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.exchange.continue_below()
        return None, None


class _ActivationInput(torch.autograd.Function):
    """First operation of a forward pass, so that autograd runs its backward last."""

    @staticmethod
    def forward(ctx: Any, activations: torch.Tensor, exchange: StanzaExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return activations.view_as(activations)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.exchange.return_gradients(gradient)
        return None, None
