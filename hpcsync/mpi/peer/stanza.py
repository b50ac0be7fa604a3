"""Layer separation (Stanza) on a rank: how a training loop that knows nothing of it computes one half of the model.

While the run lasts the model's forward is replaced. On a convolution worker it computes the layers below the cut and
sends what comes out; what it returns stands for the output, and holds no numbers, because the output comes about
elsewhere, and so does the loss. The backward pass that begins there waits for the gradients of the activations and goes
on with them. A fully-connected worker's batches are the activations and labels that have come; its forward computes
the layers above the cut, and at the end of its backward pass the activations' gradients go back, before anything else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job, Script
from hpcsync.config.paradigms import StanzaOptions
from hpcsync.core.batches import Iterations
from hpcsync.mpi.collectives.allreduce import Agreed
from hpcsync.mpi.collectives.model_parts import SeparatedLayers
from hpcsync.mpi.peer.activation_exchange import ActivationExchange, Rows
from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.peer.exchange import ExchangeResult, Summing
from hpcsync.mpi.transport import cuda
from hpcsync.planning.split_cost import Shape
from hpcsync.trace.schema import ALL_PEERS
from hpcsync.training.flat_model import FlatModel, trainable
from hpcsync.training.gradient import Loss
from hpcsync.training.model_split import ModelSplit, activation_shape, check_halves, tensors_of, without_values
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.sampler import fetch


class StanzaExchange(Summing):
    """One half of the model, whose gradient is summed within the group that has it.

    Made in two steps: what crosses the cut is known when the loop begins (`prepare`).

    An end that somebody was told of is agreed on by the fully-connected workers, and said with the next gradients that
    go back: after that iteration all end.
    """

    one_sided = True

    def __init__(
        self, job: Job, link: PeerChannel, flat: FlatModel, optimizer: OptimizerSpec, layers: SeparatedLayers
    ) -> None:
        assert isinstance(job.paradigm, StanzaOptions)
        super().__init__(job, link, flat, optimizer, layers.group)
        self._layers, self._groups, self._pieces = layers, layers.groups, job.paradigm.micro_batches
        self._cut = job.paradigm.cut
        # What a piece takes: of what an iteration takes the device.
        forward, backward, above = job.paradigm.shares
        self._forward_share, self._backward_share = forward / self._pieces, backward / self._pieces
        self._fc_share = above / self._pieces
        self._prepared: list[Any] | None = None  # for batches of these tensors
        self._crossing: ActivationExchange
        self._iterations: Iterations
        self._is_script = isinstance(job.workload, Script)
        self._may_overlap = job.cluster.compute is None and not layers.is_fc and not self._is_script
        self._batch: Sequence[torch.Tensor] = ()  # that was handed out, until its step
        self._version = 0  # of its first tensor, then
        self._computed = 0  # pieces of it, backward passes too
        self._under_way: list[torch.Tensor] = []  # a convolution worker's activations, with what autograd knows of them
        # Agreed on by the fully-connected workers: the next iteration is the last; after it all halt.
        self._stop = self._halt = False

    def prepare(self, dataset: Any, batch_size: int, iterations: Iterations) -> Mapping[str, int]:
        sample = self._sample(dataset)
        batch = [(batch_size, *tensor.shape[1:], tensor.dtype) for tensor in sample]
        if self._prepared is not None:
            if batch != self._prepared:
                raise RuntimeError("shard: where layers are separated all loops must have batches of the same shape")
            return {}
        self._prepared, self._iterations = batch, iterations
        layers, groups, dtype = self._layers, self._groups, self._flat.weights.dtype
        activations = Rows(activation_shape(layers.below, sample[0]), dtype)
        labels = [Rows(tuple(label.shape[1:]), label.dtype) for label in sample[1:]]
        self._crossing = ActivationExchange(self._link, groups, batch_size, self._pieces, activations, labels)
        if layers.is_fc:  # its gradient counts as the samples that it is given
            self._reducer.weight = groups.weight(self._link.comm.rank)
        else:
            self._output = without_values(layers.above, torch.empty(batch_size, *activations.shape, dtype=dtype))
        layers.model.forward = self._compute_above if layers.is_fc else self._compute_below
        n_below, n_above = (sum(p.numel() for p in trainable(half)) for half in (layers.below, layers.above))
        label_bytes = sum(label.n_bytes for label in labels)
        return Shape(n_below, n_above, activations.size, label_bytes, dtype.itemsize).attributes()

    def _sample(self, dataset: Any) -> Sequence[torch.Tensor]:
        """One of them, with which the halves have been tried. Raises JobError where they are not the model."""
        layers = self._layers
        with torch.random.fork_rng(devices=[]):  # what is drawn for it is not of the run
            batch = fetch(dataset, np.zeros(1, np.int64))
            try:
                sample = tensors_of(batch)
                if self._is_script and self._prepared is None:
                    x = sample[0].to(self._flat.weights.device)
                    check_halves(layers.model, ModelSplit(layers.below, layers.above), x)
            except ValueError as error:
                raise JobError(f"paradigm.cut = {shown(self._cut)}: {error}") from None
        return sample

    # ---- an iteration ----

    def begin(self, batch: Any) -> Any:
        if self._batch:
            raise RuntimeError(
                "shard: where layers are separated every batch must be computed and stepped, for the other side waits "
                "for it (on a convolution worker the loss is never a number)"
            )
        self._crossing.waited_s = 0.0
        self._computed = 0
        if self._layers.is_fc:
            self._crossing.wait(0)
            batch = self._crossing.tensors()
            if self._is_script:  # which may keep them, or look at them when the next ones have come
                batch = tuple(tensor.clone() for tensor in batch)
        self._batch, self._version = batch, batch[0]._version
        return batch

    def loss_here(self, loss: Loss | None) -> Loss | None:
        """No loss comes about on a convolution worker: what its model returns leads to the backward pass at once."""
        return loss if self._layers.is_fc else lambda model, x, *rest: model(x).sum()

    def _compute_below(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """The convolution worker's forward pass, of the batch that was handed out."""
        if not torch.is_grad_enabled() or self._under_way or not self._batch or len(inputs) != 1 or options:
            raise RuntimeError(
                "the model: where layers are separated a convolution worker has not all of them; it can be called once "
                "for each batch of the session's shard, with the batch's first tensor alone, and with gradients"
            )
        labels = [label.tensor_split(self._pieces) for label in self._batch[1:]]
        for piece, rows in enumerate(inputs[0].tensor_split(self._pieces)):
            self._iterations.resume()
            activations = self._layers.below(rows)
            cuda.ready(activations)
            self._iterations.rest(self._forward_share)
            sent = activations.to(self._flat.weights.dtype)  # which autocast may have left
            self._crossing.send(piece, sent, [label[piece] for label in labels])
            self._under_way.append(activations)
        anchor = torch.full_like(self._output, math.nan, device=activations.device)
        return _Elsewhere.apply(anchor.requires_grad_(), self)

    def continue_below(self) -> None:
        """The convolution worker's backward pass, from the gradients of its activations on."""
        for piece, activations in enumerate(self._under_way):
            gradient = self._crossing.gradient(piece)
            self._reducer.overlap = self._may_overlap and piece == self._pieces - 1
            self._iterations.resume()
            torch.autograd.backward(activations, gradient.to(activations.dtype))
            cuda.ready(self._flat.gradient)
            self._iterations.rest(self._backward_share)
            self._computed += 1
        self._reducer.overlap = False
        self._under_way = []

    def _compute_above(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """The fully-connected worker's forward pass, of the next piece of what was handed out."""
        if not torch.is_grad_enabled():
            return self._layers.above(*inputs)
        activations, piece = inputs[0], self._computed
        if not self._is_next(activations) or len(inputs) != 1 or options:
            raise RuntimeError(
                "the model: where layers are separated a fully-connected worker's can be called once for each batch, "
                "with the batch's first tensor as it was handed out: what is to be done to samples before belongs into "
                "the data set or the model"
            )
        if piece > 0:
            self._crossing.wait(piece)
        self._iterations.resume()
        arrived: torch.Tensor = _Arrived.apply(activations.detach().requires_grad_(), self)
        return self._layers.above(arrived)

    def _is_next(self, activations: torch.Tensor) -> bool:
        """Whether this is the next piece of the batch, and nothing was done to it."""
        if not self._batch or self._computed == self._pieces:
            return False
        rows = self._batch[0].tensor_split(self._pieces)[self._computed]
        changed = self._is_script and activations._version != self._version
        return (activations.data_ptr(), activations.shape) == (rows.data_ptr(), rows.shape) and not changed

    def give_back(self, gradient: torch.Tensor) -> None:
        """The fully-connected worker's backward pass is over: of the mean over all rows of the piece. Each convolution
        worker gets that of the mean over its own batch."""
        cuda.ready(gradient)
        self._iterations.rest(self._fc_share)
        if (factor := self._groups.own_mean(self._link.comm.rank, self._pieces)) != 1.0:
            gradient = gradient * factor
        self._crossing.give_back(self._computed, gradient, self._stop, self._halt)
        self._computed += 1

    def step(self, lr: float, *, n_samples: int, stop: bool, exchanging: bool) -> None:
        if self._computed != self._pieces:
            raise RuntimeError("step: where layers are separated it must follow a backward pass through the model")
        self._batch = ()
        is_fc = self._layers.is_fc
        agreed = self._reducer.finish(
            n_samples=n_samples, stop=stop and is_fc, halt=self._link.halt_requested and is_fc
        )
        self.peer.step(self._flat.gradient, lr)
        last, halt = (self._stop, self._halt) if is_fc else (self._crossing.last, self._crossing.halt)
        self._stop = self._stop or agreed.stop
        self._halt = agreed.halt and not halt
        n_steps = self._groups.n_convolution
        self.agreed = Agreed(n_steps, n_steps, agreed.n_samples, last, halt)

    def exchange(self, round: int) -> ExchangeResult:
        begin_s = time.perf_counter()
        self._crossing.finish()
        sending_s = time.perf_counter() - begin_s
        cost, crossing, worker = self._reducer.reduced, self._crossing, self._link.comm.rank
        return ExchangeResult(
            peer=ALL_PEERS if self._layers.is_fc else self._groups.fc_of(worker),
            wait_s=crossing.waited_s + cost.absent_s,
            comm_s=cost.waited_s - cost.absent_s + sending_s,
            wire_bytes=crossing.sent_bytes + cost.sent_bytes,
            n_received=self._layers.group.size - 1,
        )

    # ---- around it ----

    def state(self) -> dict[str, Any]:
        return super().state() | {"stop": self._stop}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._stop = state["stop"]

    def show(self, serial: int) -> bool:
        """One of each group shows its half, which all of the group have."""
        return self._layers.group.rank > 0 or super().show(serial)

    def end(self, *, early: bool) -> bool:
        """Nobody can go on without the others."""
        if self._prepared is not None:
            del self._layers.model.forward
            if early:
                self._crossing.leave()
        return False

    def free(self) -> None:
        super().free()
        if self._prepared is not None:
            self._crossing.free()


class _Elsewhere(torch.autograd.Function):
    """Stands for an output that comes about on another rank."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, exchange: StanzaExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.exchange.continue_below()
        return None, None


class _Arrived(torch.autograd.Function):
    """Made before everything else of a forward pass, so that autograd comes to it after everything else."""

    @staticmethod
    def forward(ctx: Any, activations: torch.Tensor, exchange: StanzaExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return activations.view_as(activations)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.exchange.give_back(gradient)
        return None, None
