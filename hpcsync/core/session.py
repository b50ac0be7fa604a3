"""What a training script holds between `connect` and the end of its `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch


class Session(ABC):
    """One process's part in a training run.

    rank:      number of this process, from 0.
    worker:    its index among the workers, or None on a server.
    n_workers: how many workers train.
    stopped:   whether the run is over for this process; its loaders then end.
    """

    def __init__(self, *, rank: int, n_workers: int, worker: int | None = None) -> None:
        self.rank = rank
        self.worker = worker
        self.n_workers = n_workers
        self.stopped = False
        self._entered = False

    @abstractmethod
    def shard(self, dataset: Any, batch_size: int, epochs: int | None = 1) -> Iterator[Any]:
        """This worker's batches of the next `epochs` training epochs; None: until the run is stopped.

        dataset: a map-style PyTorch data set; batches of a TensorDataset are tuples of tensors, of others what
        PyTorch's default collation makes. All workers together use every whole batch of a training epoch once, in an
        order that follows from the seed alone. Empty on servers, which serve here until the run is over.

        Where batches are given out (`connect`'s `batches`), a batch has as many samples as its worker was given;
        batch_size only says for which size the times of `compute` are meant. Each worker takes the next samples, so
        that all together use every sample of a training epoch once, its last ones too: a batch that reaches over the
        end belongs to the training epoch in which it begins.
        """

    def cancelled(self, share: float) -> bool:
        """Between two pieces of a batch, `share` of whose samples are done: whether the gradient will not be used any
        more. Then call `step` at once, with the loss so far: it gives nothing away.

        Only "k-sync" and "k-batch-sync" with cancel = "abort" ever say so.

            for x, y in sync.shard(data, batch_size=64, epochs=None):
                optimizer.zero_grad()
                for piece in range(4):
                    rows = slice(16 * piece, 16 * (piece + 1))
                    loss = criterion(model(x[rows]), y[rows])
                    (loss / 4).backward()
                    if piece < 3 and sync.cancelled((piece + 1) / 4):
                        break
                sync.step(loss)
        """
        if not 0.0 < share < 1.0:
            raise ValueError(f"share = {share}: must be greater than 0 and less than 1: all of it is for step")
        return False

    @abstractmethod
    def step(self, loss: torch.Tensor | float) -> bool:
        """Give away the gradient that `backward` has left, and go on with new weights in the model.

        Returns False once the run is over: the loop should end, and loaders do.
        """

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def _refuse_outside(self) -> None:
        """Only the end of a `with` block tells the others that this process has finished."""
        if not self._entered:
            raise RuntimeError("the session must be used in a with statement")

    def _refuse_step(self) -> None:
        """Where there is nothing to step."""
        self._refuse_outside()
        if self.stopped:
            raise RuntimeError("step after the run has ended: leave the loop when step returns False")

    def _refuse_other_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """The script's optimizer has the rate that it was given: where that would be changed nobody looks."""
        if (given := optimizer.param_groups[0]["lr"]) != rate:
            raise RuntimeError(
                f"the script changed the optimizer's learning rate from {rate} to {given}: "
                "give connect a schedule instead"
            )

    def _leave(self, joins_s: float) -> bool:
        """The worker leaves before its next batch, until this time. Whether it then joins; if not, the run is over for
        its script."""
        self.stopped = True
        return False

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take no further part; returns when the run is over everywhere, with the final weights in the model."""
