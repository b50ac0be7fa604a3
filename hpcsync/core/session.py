"""Session of a training script, from `connect` to the end of its `with` block."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from hpcsync.config.errors import JobError


class WithoutBatch(JobError):
    """A script steps without a batch of the session, as all ranks do whose loop runs over something else."""

    LINE = (
        "step was called without a batch: the loop must run over sync.shard(loader), not over the loader itself, and "
        "step once for each batch"
    )

    def __init__(self, message: str = LINE) -> None:
        super().__init__(message)


class RunIsOver(Exception):
    """A script begins loops without end over data that have none, because the run is over."""


LOOPS_AFTER_END = 100_000  # that a script may begin without a batch, as one for each training epoch that was left


class Loop(Iterator[Any]):
    """What one loop of a script runs over.

    Parameters
    ----------
    batches, count
        As for `Batches`.

    Attributes
    ----------
    n_given
        Batches that the loop has had.
    """

    def __init__(self, batches: Iterator[Any], count: Callable[[], int]) -> None:
        self._batches, self._count = batches, count
        self._length: int | TypeError | None = None
        self.n_given, self._ended = 0, False

    def __next__(self) -> Any:
        self._note_length()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._ended = True
            raise
        self.n_given += 1
        return batch

    def __len__(self) -> int:
        self._note_length()
        if isinstance(self._length, int):
            return self._length
        raise TypeError(str(self._length))

    def __bool__(self) -> bool:
        return True

    def has_ended(self) -> bool:
        """Return whether no batch is left."""
        if self.n_given and self.n_given == self._length:  # the loop has counted them
            self._ended = next(self._batches, None) is None
        return self._ended

    def leave(self) -> None:
        """Give no further batch, whoever still holds this."""
        self._batches, self._count = iter(()), lambda: 0

    def _note_length(self) -> None:
        if self._length is None:
            try:
                self._length = self._count()
            except TypeError as error:
                self._length = error


class Batches(Iterator[Any]):
    """The batches that `Session.shard` returns; `len` is how many they are, unless the run ends before.

    As over a DataLoader, each further loop has the batches of the next training epochs, also if the loop before was
    left early: a script or a library may loop over one object in each training epoch. What has no training epochs, or
    can be read only once, continues where the loop before was left. Batches that are drawn by `next` before a loop are
    its first ones.

    Parameters
    ----------
    batches
        The batches.
    count
        Returns how many they are, before the first one. Raises TypeError if that is not known.

    Attributes
    ----------
    again
        Returns the batches of another call of `shard` with the same arguments; None if there are none.
    """

    def __init__(self, batches: Iterator[Any], count: Callable[[], int]) -> None:
        self.again: Callable[[], Batches | None] = lambda: None
        self._loop, self._in_loop = Loop(batches, count), False

    def __iter__(self) -> Loop:
        loop = self._loop
        if loop.has_ended() or (loop.n_given and self._in_loop):
            if (others := self.again()) is not None:
                loop.leave()
                self._loop = others._loop
        self._in_loop = True
        return self._loop

    def __next__(self) -> Any:
        return next(self._loop)

    def __len__(self) -> int:
        return len(self._loop)

    def __bool__(self) -> bool:
        return True


class Asked(NamedTuple):
    """Arguments of `Session.shard`, which describes them."""

    dataset: Any
    batch_size: int | None = None
    epochs: int | None = 1
    sharded: bool = False
    accumulate: int = 1


class Session(ABC):
    """Part of one process in a training run.

    Attributes
    ----------
    rank
        Number of this process, from 0.
    worker
        Its number among the workers; None on a server.
    n_workers
        Number of workers that train.
    stopped
        True once the run is over for this process; its loaders then end.
    batches_before
        Batches that this worker had trained on when the run was resumed. A scheduler that steps with every batch must
        take this number of steps before the loop.
    """

    def __init__(self, *, rank: int, n_workers: int, worker: int | None = None) -> None:
        self.rank = rank
        self.worker = worker
        self.n_workers = n_workers
        self.stopped = False
        self.batches_before = 0
        self._entered = False
        self._n_after_end = 0  # loops that were begun after the end of the run
        self._losses: list[torch.Tensor | float] = []  # of the step under way

    def shard(
        self,
        dataset: Any,
        batch_size: int | None = None,
        epochs: int | None = 1,
        *,
        sharded: bool = False,
        accumulate: int = 1,
    ) -> Batches:
        """Return an iterator over this worker's batches of the next training epochs.

        All workers together use every batch of a training epoch once.

        Parameters
        ----------
        dataset
            A data set with ``len(dataset)`` and ``dataset[i]``, an iterable data set, or a DataLoader of either. Data
            with indices are used in whole batches, in an order that follows from the seed alone; only the worker's own
            batches are loaded. Batches of a TensorDataset are tuples of tensors; those of other data sets are made by
            PyTorch's default collation, and those of a DataLoader by its `collate_fn`.

            A DataLoader with its own sampler draws the same batches on every worker, and each of the P workers loads
            every P-th. For an iterable data set, or an iterator of batches, every worker reads all batches and uses
            every P-th.
        batch_size
            Samples per batch of a data set; a DataLoader has its own.
        epochs
            Number of training epochs; None: until the run is stopped. An iterator has one.
        sharded
            True if each worker already has its own part of the data, of which it then uses all.
        accumulate
            Backward passes whose gradients accumulate before a step. It matters to "allreduce" only, which forms the
            mean in the last of them (see `no_sync`).

        Returns
        -------
        iterator
            An iterator over the batches. On a server it yields nothing, and serves the workers until the run is over.
            Its `len` is the number of batches that this worker gets unless the run ends earlier; in a resumed run it
            excludes those already used. It raises TypeError if the number is not known in advance: with `epochs` None,
            with allocated batches, with a sampler of your own, and for iterable data. Each further loop over it has the
            batches of the next training epochs, like another call; with `epochs` None, and for an iterator, it
            continues.

        Raises
        ------
        JobError
            If the data cannot be used; the message says what to pass instead.

        Notes
        -----
        With allocated batches (`batches` of `connect`), each batch has the number of samples allocated to its worker;
        `batch_size` is then only the size to which the times of `compute` refer. Each worker gets the next samples, so
        the workers together use every sample of a training epoch once, including the last ones; a batch that extends
        beyond the end belongs to the epoch in which it begins.
        """
        self._refuse_outside()
        asked = Asked(dataset, batch_size, epochs, sharded, accumulate)
        self._count_loops_after_end()
        batches = Batches(iter(()), lambda: len(self._batches(asked))) if self.stopped else self._batches(asked)
        batches.again = lambda: self._again(asked)
        return batches

    def _again(self, asked: Asked) -> Batches | None:
        """Return the batches of the next training epochs, if there are any."""
        self._count_loops_after_end()
        has_epochs = asked.epochs is not None and not isinstance(asked.dataset, Iterator)
        return self._batches(asked) if has_epochs and self._entered and not self.stopped else None

    def _count_loops_after_end(self) -> None:
        """Raise RunIsOver where a script, such as a generator that begins again and again, would loop for ever."""
        if self.stopped:
            self._n_after_end += 1
            if self._n_after_end > LOOPS_AFTER_END:
                raise RunIsOver("sync.shard has no more batches: the run is over")

    def _ends_with(self, error: BaseException | None) -> bool:
        """Return whether an exception only says that the script has asked for a batch after the end of the run.

        What follows in the block is not executed, so worker 0 says where it ended.
        """
        if not (self.stopped and isinstance(error, StopIteration | RunIsOver)):
            return False
        if self.worker == 0 and error.__traceback__ is not None:
            where = error.__traceback__
            print(
                f"hpcsync: the run is over, and the with block ended in line {where.tb_lineno} of "
                f"{where.tb_frame.f_code.co_filename}, which asked for another batch",
                file=sys.stderr,
                flush=True,
            )
        return True

    @abstractmethod
    def _batches(self, asked: Asked) -> Batches:
        """Return the batches that `shard` returns."""

    def cancelled(self, share: float) -> bool:
        """Return True if the gradient of the current batch will not be used.

        Call this between two pieces of a batch. If it returns True, call `step` at once with the loss so far; it sends
        no gradient. Iterations are cancelled only by "k-sync" and "k-batch-sync" with cancel = "abort".

        Parameters
        ----------
        share
            Share of the batch's samples that has been computed, above 0 and below 1.

        Raises
        ------
        ValueError
            If `share` is out of range.

        Examples
        --------
        ::

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
            raise ValueError(f"share = {share}: must be greater than 0 and less than 1; call step for a whole batch")
        return False

    @abstractmethod
    def step(self, loss: torch.Tensor | float | None = None) -> bool:
        """Send the gradient that `backward` has computed, and continue with new weights in the model.

        The script's optimizer may be stepped instead: `optimizer.step()` does the same.

        Parameters
        ----------
        loss
            Mean loss of the batch, for the trace; see `record`.

        Returns
        -------
        bool
            False once the run is over: leave the loop.
        """

    def record(self, loss: torch.Tensor | float) -> None:
        """Record a loss of the current step; the trace gets the mean of those recorded before the step.

        Parameters
        ----------
        loss
            Mean loss of a batch.

        Raises
        ------
        ValueError
            If it is a tensor of several numbers.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise ValueError(f"loss of shape {tuple(loss.shape)}: must be one number, such as the mean of the batch")
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients, without their mean over the workers.

        It matters to "allreduce" only, which otherwise forms the mean at the end of every backward pass, or of every
        `accumulate`-th one of `shard`.
        """
        return nullcontext()

    def _of_closure(self, closure: Callable[[], Any]) -> Any:
        """Return what a closure of `optimizer.step` returns, recorded as the loss unless it has recorded one itself."""
        n_recorded = len(self._losses)
        with torch.enable_grad():
            loss = closure()
        if loss is not None and len(self._losses) == n_recorded:
            self.record(loss)
        return loss

    def _take_losses(self, loss: torch.Tensor | float | None) -> list[float]:
        """Return the losses of the step under way, with this one."""
        if loss is not None:
            self.record(loss)
        losses, self._losses = [float(each) for each in self._losses], []
        return losses

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def _refuse_outside(self) -> None:
        """Raise outside of a `with` block, whose end informs the other processes."""
        if not self._entered:
            raise RuntimeError("the session must be used in a with statement")

    def _refuse_step(self) -> None:
        """Raise if there is nothing to step."""
        self._refuse_outside()
        if self.stopped:
            raise RuntimeError("step was called after the end of the run: leave the loop when step returns False")

    def _leave(self, joins_s: float) -> bool:
        """Leave before the next batch; return True if the worker joins again at `joins_s`.

        If it does not, the run is over for its script.
        """
        self.stopped = True
        return False

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Take no further part; return when the run is over everywhere, with the final weights in the model.

        That `next` finds no batch after the end of the run ends the block, too.
        """
