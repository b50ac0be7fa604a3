"""Turns of ranks that are threads of one process: one of them computes at a time.

At each turn the global state of the process becomes that of the rank: the random generators of torch and NumPy, and
`sys.excepthook`. The functions of Python's `random` draw from the generator of the rank that calls them, since copying
that state takes longer than all else in a turn. A rank therefore draws what a process of its own would draw.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

# The functions of `random` that are methods of its one generator.
DRAWS = [name for name, draw in vars(random).items() if isinstance(getattr(draw, "__self__", None), random.Random)]


class ProcessState:
    """Global state of a process, as one rank sees it, without Python's generator."""

    def __init__(self) -> None:
        self.torch = torch.default_generator.get_state()
        self.numpy = np.random.MT19937()
        self.numpy.state = np.random.get_state(legacy=False)  # type: ignore[assignment]
        self.excepthook = sys.excepthook

    def keep(self) -> None:
        """Read the state, after the rank may have changed it."""
        self.torch = torch.default_generator.get_state()
        self.excepthook = sys.excepthook  # NumPy's generator is kept by reference

    def establish(self) -> None:
        """Make this the state of the process."""
        torch.default_generator.set_state(self.torch)
        np.random.mtrand.set_bit_generator(self.numpy)
        sys.excepthook = self.excepthook


class Wait:
    """Wait of a thread until `Turns.end` is called for it.

    Parameters
    ----------
    ready
        Returns whether what the thread waits for has happened.
    has_turn
        Whether the thread has a turn when the wait begins: then it waits for one again, too.
    """

    def __init__(self, ready: Callable[[], bool], has_turn: bool) -> None:
        self.ready = ready
        self.has_turn = has_turn
        self.gate = threading.Lock()
        self.gate.acquire()


class Turns:
    """Turns of ranks: one of them computes at a time, in the order in which they ask for it."""

    def __init__(self, n_ranks: int) -> None:
        self._guard = threading.Lock()
        self._gates: deque[threading.Lock] = deque()
        self._taken = False
        self._states = [ProcessState() for _ in range(n_ranks)]
        self._python = [random.Random() for _ in range(n_ranks)]
        for generator in self._python:
            generator.setstate(random.getstate())
        self._latest: int | None = None
        self._own = threading.local()  # `rank` and `has` of a rank's own thread, and its generator `python`

    def enter(self, rank: int) -> None:
        """Make this thread that of a rank, and wait for its turn."""
        self._own.rank = rank
        self._own.python = self._python[rank]
        self._take()

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return getattr(self._own, "has", False)

    def leave(self) -> None:
        """End this thread's turn."""
        if self.mine:
            self._give()

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """Let other ranks compute while this thread waits."""
        if not self.mine:
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()

    def offer(self) -> None:
        """Let the ranks that wait for a turn have theirs first."""
        if self.mine and self._gates:
            self._give()
            self._take()

    def wait(self, wait: Wait, limit_s: float = -1.0) -> bool:
        """Let other ranks compute until this wait has ended and this thread has its turn again.

        Parameters
        ----------
        wait
            Wait of this thread.
        limit_s
            Longest time until the end of the wait, in seconds; -1 for no limit.

        Returns
        -------
        bool
            False if `limit_s` ended first: `end` and `wait` are then to be called once more.
        """
        if self.mine:
            self._give()
        ended = wait.gate.acquire(timeout=limit_s)
        if ended and wait.has_turn:
            self._start()
        return ended

    def end(self, wait: Wait) -> None:
        """End a wait. A thread of a rank runs only once it has its turn, so that it is woken once."""
        with self._guard:
            if wait.has_turn and self._taken:
                self._gates.append(wait.gate)
            else:
                self._taken |= wait.has_turn
                wait.gate.release()

    @contextlib.contextmanager
    def own_draws(self) -> Iterator[None]:
        """Let the functions of `random` use a rank's own generator in its thread."""
        shared = {name: getattr(random, name) for name in DRAWS}

        def drawing(name: str) -> Callable[..., Any]:
            def draw(*args: Any, **options: Any) -> Any:
                own = getattr(self._own, "python", None)
                return (shared[name] if own is None else getattr(own, name))(*args, **options)

            return draw

        for name in DRAWS:
            setattr(random, name, drawing(name))
        try:
            yield
        finally:
            for name, draw in shared.items():
                setattr(random, name, draw)

    def _take(self) -> None:
        asked = Wait(bool, has_turn=True)
        self.end(asked)
        self.wait(asked)

    def _start(self) -> None:
        self._own.has = True
        if self._latest != self._own.rank:
            if self._latest is not None:
                self._states[self._latest].keep()
            self._latest = self._own.rank
            self._states[self._latest].establish()

    def _give(self) -> None:
        self._own.has = False
        with self._guard:
            if self._gates:
                self._gates.popleft().release()
            else:
                self._taken = False
