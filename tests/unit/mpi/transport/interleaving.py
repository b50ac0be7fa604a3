"""Ranks whose one-sided operations a test interleaves as it likes.

Every rank runs the product's code in a thread, but only while the test says so, and only until its next operation on a
window. Windows are as weak as MPI permits: each element of a put or get is copied at any moment up to the flush, in any
order, and what a rank stores in its own memory and what others put there meet when it calls `sync`, or earlier.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hpcsync.mpi.transport.window import Window

_STOP_S = 30.0
_here = threading.local()


class Died(BaseException):
    """Ends the thread of a rank that dies. Not an Exception, so that the product's code does not catch it."""


class Call:
    """One call of the product's code by one rank, carried out operation by operation."""

    def __init__(self, memory: Memory, rank: int, body: Callable[[], Any]) -> None:
        self.rank = rank
        self.done = False
        self.result: Any = None
        self.n_steps = 0
        self._error: BaseException | None = None
        self._dies = False
        self._memory = memory
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: Callable[[], Any]) -> None:
        _here.call = self
        try:
            self._wait()
            self.result = body()
        except BaseException as error:
            self._error = error
        self.done = True
        self._back.release()

    def _wait(self) -> None:
        self._go.acquire()
        if self._dies:
            raise Died

    def operate(self) -> None:
        """Wait for the next step; in the thread of the call, before each operation."""
        self._back.release()
        self._wait()

    def step(self) -> None:
        """Carry out the next operation; raise what the call raises."""
        self.n_steps += 1
        self._go.release()
        assert self._back.acquire(timeout=_STOP_S), "the call does not end"
        if self.done and self._error is not None and not self._dies:
            raise self._error

    def die(self) -> None:
        """End the call here. Its copies that have not been made never will be."""
        if not self.done:
            self._dies = True
            self.step()
        self._memory.copies = [copy for copy in self._memory.copies if copy[0] is not self]


def operate() -> None:
    """Let the test decide what happens before the next operation."""
    if (call := getattr(_here, "call", None)) is not None:
        call.operate()


class Memory:
    """What the ranks share.

    Parameters
    ----------
    n_ranks
        Their number.

    Attributes
    ----------
    copies
        Copies of one element that have begun and have not been made: call, target rank, window, function.
    """

    def __init__(self, n_ranks: int) -> None:
        self.comms = [Comm(self, rank, n_ranks) for rank in range(n_ranks)]
        self.windows: list[FakeWindow] = []
        self.public: list[list[np.ndarray]] = []  # by number of the window and rank
        self.copies: list[tuple[Call | None, int, FakeWindow, Callable[[], None]]] = []
        self.choice = 0  # of the next of several copies

    def make_one_copy(self, of: Callable[[tuple], bool] = lambda copy: True) -> bool:
        """Make one of the copies; return False if there is none."""
        if not (candidates := [copy for copy in self.copies if of(copy)]):
            return False
        copy = candidates[self.choice % len(candidates)]
        self.copies.remove(copy)
        copy[-1]()
        return True

    def drain_one_store(self) -> None:
        """Make a store of some rank to its own memory visible to the others before its `sync`."""
        stores = [(window, at) for window in self.windows for at in np.flatnonzero(window.local != window.synced)]
        if stores:
            window, at = stores[self.choice % len(stores)]
            window.public[at] = window.synced[at] = window.local[at]


class Comm:
    """Communicator of one rank, whose collective calls need no others."""

    def __init__(self, memory: Memory, rank: int, size: int) -> None:
        self.memory, self.rank, self.size = memory, rank, size
        self.n_windows = 0

    def allgather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def Barrier(self) -> None:
        pass


class FakeBackoff:
    """Stands for `Backoff`: a rank that waits looks at each of its steps, of which the first alone counts."""

    def __init__(self, comm: Comm, *, passive: bool) -> None:
        pass

    def until(self, poll: Callable[[], Any]) -> Any:
        n_steps = _here.call.n_steps
        while not (found := poll()):
            _here.call.n_steps = n_steps
        return found


def borrowed(buffer: Any) -> Callable[[], Any]:
    """Return a call for the buffer of a transfer, to which MPI keeps no reference: it must live until the flush."""
    if not isinstance(buffer, np.ndarray) or buffer.base is not None:
        return lambda: buffer  # a view, whose memory another object owns
    reference = weakref.ref(buffer)

    def lent() -> Any:
        found = reference()
        assert found is not None, "the buffer of a transfer has died before the flush"
        return found

    return lent


class FakeWindow:
    """Stands for `Window`."""

    def __init__(self, comm: Comm, count: int, dtype: Any) -> None:
        self.memory = comm.memory
        self.number, comm.n_windows = comm.n_windows, comm.n_windows + 1
        if self.number == len(self.memory.public):
            self.memory.public.append([np.empty(0)] * comm.size)
        self.public = self.memory.public[self.number][comm.rank] = np.full(count, -7, dtype)
        self.local = self.public.copy()
        self.synced = self.public.copy()  # `local` as of the last `sync`
        self.memory.windows.append(self)

    def at(self, rank: int) -> np.ndarray:
        return self.memory.public[self.number][rank]

    def begin(self, rank: int, copy: Callable[[int], None], n: int) -> None:
        operate()
        call = getattr(_here, "call", None)
        self.memory.copies += [(call, rank, self, lambda i=i: copy(i)) for i in range(n)]

    def put(self, source: Any, rank: int, offset: int) -> None:
        lent = borrowed(source)

        def copy(i: int) -> None:
            self.at(rank)[offset + i] = lent()[i]

        self.begin(rank, copy, len(source))

    def get(self, into: Any, rank: int, offset: int) -> None:
        lent = borrowed(into)

        def copy(i: int) -> None:
            lent()[i] = self.at(rank)[offset + i]

        self.begin(rank, copy, len(into))

    get_word = Window.get_word

    def fetch_add(self, value: float, rank: int, offset: int) -> Any:
        operate()
        before = self.at(rank)[offset]
        self.at(rank)[offset] += value
        return before

    def compare_and_swap(self, expected: int, value: int, rank: int, offset: int) -> int:
        operate()
        before = int(self.at(rank)[offset])
        if before == expected:
            self.at(rank)[offset] = value
        return before

    def flush(self, rank: int) -> None:
        call = getattr(_here, "call", None)
        operate()
        while self.memory.make_one_copy(lambda copy: copy[:3] == (call, rank, self)):
            operate()

    def sync(self) -> None:
        operate()
        stored = self.local != self.synced
        self.public[stored] = self.synced[stored] = self.local[stored]
        operate()
        seen = self.local == self.synced  # another thread of this rank may have stored the rest meanwhile
        self.local[seen] = self.synced[seen] = self.public[seen]

    def free(self) -> None:
        pass


class FakeTensorWindow:
    """Stands for a window of tensors."""

    def __init__(self, window: FakeWindow) -> None:
        self.window = window
        self.local = torch.from_numpy(window.local)

    def put(self, source: torch.Tensor, rank: int, offset: int) -> None:
        self.window.put(source.numpy(), rank, offset)

    def get(self, into: torch.Tensor, rank: int, offset: int) -> None:
        self.window.get(into.numpy(), rank, offset)

    def flush(self, rank: int) -> None:
        self.window.flush(rank)

    def acquire(self, begin: int, end: int) -> None:
        self.window.sync()

    release = acquire

    def free(self) -> None:
        pass


class FakeTransport:
    """Stands for `Transport`."""

    device = torch.device("cpu")
    passive = True

    def window(self, comm: Comm, count: int, dtype: torch.dtype) -> FakeTensorWindow:
        return FakeTensorWindow(FakeWindow(comm, count, torch.empty(0, dtype=dtype).numpy().dtype))
