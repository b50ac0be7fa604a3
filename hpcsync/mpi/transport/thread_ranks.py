"""Runs whose ranks are threads of this process: for tests of a paradigm or of a script, without MPI's launcher.

    def body(comm):
        return train(comm, job, folder).flat.weights.clone()

    weights = run(5, body)[0]

A whole run takes a fraction of a second, and its failure is raised where it was started. A rank passes its turn
(`turns`) whenever it waits, sleeps or, now and then, communicates. While ranks run, Python's own waits do so too:
`time.sleep`, and joining a thread or a queue. Threads that a rank starts (evaluator, monitor, buckets) run beside the
turns, and end with the run.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from hpcsync.mpi.transport.in_memory import Aborted, Group, MemoryCommunicator, World
from hpcsync.mpi.transport.turns import ProcessState
from hpcsync.mpi.transport.ulfm import RankFailed

T = TypeVar("T")

ENDING_S = 5.0  # time that threads have to end after the ranks


class TimeLimit(Exception):
    """The ranks did not end in time; the message tells where each of them was."""


def run(n_ranks: int, body: Callable[[Any], T], *, limit_s: float = 60.0, world: World | None = None) -> list[T]:
    """Run `body(comm)` on so many ranks, each a thread of this process.

    Parameters
    ----------
    n_ranks
        Number of ranks.
    body
        Called on every rank with its communicator.
    limit_s
        Seconds after which the ranks are ended.
    world
        What the ranks share, if it differs from the default.

    Returns
    -------
    list
        What the ranks returned.

    Raises
    ------
    BaseException
        What the first rank that failed has raised; the other ranks, and the threads of all, are ended.
    TimeLimit
        If the ranks do not end within `limit_s`.
    RuntimeError
        If a thread that a rank started does not end.
    """
    world = World(n_ranks) if world is None else world
    group = Group(world, range(n_ranks))
    results: list[Any] = [None] * n_ranks

    def work(rank: int) -> None:
        world.turns.enter(rank)
        try:
            results[rank] = body(MemoryCommunicator(group, rank))
        except BaseException as error:
            world.abort(error)
        finally:
            world.turns.leave()

    with _one_process(world):
        ranks = [
            threading.Thread(target=work, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(n_ranks)
        ]
        for thread in ranks:
            world.threads.append(thread)
            thread.start()
        if late := _join(ranks, limit_s):
            names = ", ".join(thread.name for thread in late)
            world.abort(TimeLimit(f"{names} after {limit_s:g} s:\n{_where(late)}"))
        left = _join(world.threads, ENDING_S)
    if world.ended.is_set():
        own = [cause for cause in world.causes if not isinstance(cause, RankFailed)]  # not because of another rank
        raise next(iter(own or world.causes), Aborted("aborted without an exception"))
    if left:
        raise RuntimeError(f"threads did not end:\n{_where(left)}")
    return results


@contextlib.contextmanager
def _one_process(world: World) -> Iterator[None]:
    """Let rank threads that wait pass their turn, and keep the global state of the process."""
    state, numpy = ProcessState(), np.random.mtrand.get_bit_generator()
    switch_s, n_threads = sys.getswitchinterval(), torch.get_num_threads()
    one_thread = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(n_threads)  # that many on every rank
    with _waiting_in(world), world.turns.own_draws():
        yield
    if one_thread is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = one_thread
    sys.setswitchinterval(switch_s)
    torch.set_num_threads(n_threads)
    state.establish()
    np.random.mtrand.set_bit_generator(numpy)


@contextlib.contextmanager
def _waiting_in(world: World) -> Iterator[None]:
    """Replace what Python's own waits do in threads of ranks: pass the turn, and end when a rank has failed."""
    sleep, start = time.sleep, threading.Thread.start
    simple_queue = queue.SimpleQueue

    def passing(wait: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **options: Any) -> Any:
            with world.turns.passed():
                return wait(*args, **options)

        return waiting

    def sleeping(seconds: float) -> None:
        if world.turns.mine:
            world.sleep(seconds)
        else:
            sleep(seconds)

    def starting(thread: threading.Thread) -> None:
        if threading.current_thread() in world.threads:
            world.threads.append(thread)
            thread.run = failing_together(thread.run)  # type: ignore[method-assign]
        start(thread)

    def failing_together(work: Callable[[], None]) -> Callable[[], None]:
        def working() -> None:
            try:
                work()
            except BaseException as error:
                world.abort(error)

        return working

    def ending(get: Callable[..., Any]) -> Callable[..., Any]:
        def getting(self: Any, block: bool = True, timeout: float | None = None) -> Any:
            if not block or timeout is not None or threading.current_thread() not in world.threads:
                return get(self, block, timeout)
            while not world.ended.is_set():
                with contextlib.suppress(queue.Empty):
                    return get(self, True, ENDING_S / 10)
            raise Aborted("another rank failed")

        return getting

    class EndingQueue(simple_queue):  # type: ignore[misc, valid-type]
        get = ending(simple_queue.get)

    replaced: list[tuple[Any, str, Any]] = [
        (time, "sleep", sleeping),
        (threading.Thread, "start", starting),
        (threading.Thread, "join", passing(threading.Thread.join)),
        (threading.Event, "wait", passing(threading.Event.wait)),
        (queue.Queue, "join", passing(queue.Queue.join)),
        (queue.Queue, "get", ending(queue.Queue.get)),
        (queue, "SimpleQueue", EndingQueue),
    ]
    originals = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, its in replaced:
        setattr(owner, name, its)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)


def _join(threads: Sequence[threading.Thread], limit_s: float) -> list[threading.Thread]:
    """Wait for threads, together for so long; return those that have not ended."""
    until_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def _where(threads: Sequence[threading.Thread]) -> str:
    """Return the stacks of these threads."""
    frames = sys._current_frames()
    stacks = [traceback.format_stack(frames[thread.ident]) if thread.ident in frames else [] for thread in threads]
    return "\n".join(f"{thread.name}:\n{''.join(stack)}" for thread, stack in zip(threads, stacks, strict=True))
