"""Cost of one decision of a paradigm, and its growth with the number of workers, without MPI or engine."""

from __future__ import annotations

import gc
import heapq
import random
import time
from collections.abc import Callable, Sequence, Set
from functools import partial

from hpcsync.bench.figures import Figure, in_turn
from hpcsync.paradigms import create
from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Decision, Grant, PushInfo

WORKERS = (4, 64, 1024)
PARADIGMS: dict[str, dict[str, float | str]] = {
    "asp": {},
    "ssp": {"staleness": 3},
    "dssp": {"staleness_min": 3, "staleness_max": 15},
    "k-sync": {"k": "state"},
    "k-batch-async": {"k": "state"},
    # These options go through all stages, and search about half of the time.
    "ashl": {"warmup": 5, "profiled": 10},
    "adsp": {"check_period_s": 10.0, "interval_min_s": 2.0, "search_every_s": 20.0},
}


def measure(workers: Sequence[int] = WORKERS, pushes_per_worker: int = 100, repetitions: int = 5) -> list[Figure]:
    """Measure each paradigm beside itself with the smallest number of workers; the ratio is the growth."""
    try:
        return [
            figure
            for name, options in PARADIGMS.items()
            for figure in _measure(name, options, workers, pushes_per_worker, repetitions)
        ]
    finally:
        gc.unfreeze()


def _measure(
    name: str, options: dict[str, float | str], workers: Sequence[int], pushes_per_worker: int, repetitions: int
) -> list[Figure]:
    makes = [partial(create, name, n, **options) for n in workers]
    schedules = [schedule(make(), max(200, n) * pushes_per_worker) for n, make in zip(workers, makes, strict=True)]
    gc.freeze()  # a collection during a decision would visit all of these pushes
    cases = list(zip(makes, schedules, strict=True))
    limit = f"with {workers[0]} workers"
    every = in_turn(repetitions, *(partial(every_us, make, events) for make, (events, _) in cases))
    figures = [Figure(f"{name}, {n} workers", "us", us, limit, every[0]) for n, us in zip(workers, every, strict=True)]
    if all(consulted for _, (_, consulted) in cases):
        times_us = in_turn(repetitions, *(partial(consulted_us, make, *schedule) for make, schedule in cases))
        for n, us, (events, consulted) in zip(workers, times_us, schedules, strict=True):
            what = f"{name}, {n} workers, the {len(consulted) / len(events):.1%} that ask the controller"
            figures.append(Figure(what, "us", us, limit, times_us[0]))
    return figures


def every_us(make: Callable[[], Paradigm], events: Sequence[PushInfo]) -> float:
    """Return the time per event that a new paradigm takes for these events, in microseconds."""
    handle = make().handle
    begin_s = time.perf_counter()
    for event in events:
        handle(event)
    return 1e6 * (time.perf_counter() - begin_s) / len(events)


def consulted_us(make: Callable[[], Paradigm], events: Sequence[PushInfo], consulted: Set[int]) -> float:
    """Return the time per event in which the controller is consulted, in microseconds."""
    handle, clock = make().handle, time.perf_counter
    took_s = 0.0
    for i, event in enumerate(events):
        begin_s = clock()
        handle(event)
        if i in consulted:
            took_s += clock() - begin_s
    return 1e6 * took_s / len(consulted)


def schedule(paradigm: Paradigm, pushes: int) -> tuple[list[PushInfo], set[int]]:
    """Simulate `pushes` pushes in virtual time.

    The slowest quarter of the workers takes twice as long as the fastest, all with some jitter, so that bounds are
    reached, workers blocked, and controllers consulted. The loss is constant, and every push is of one step, whatever
    was granted.

    Returns
    -------
    events : list of PushInfo
        The pushes.
    consulted : set of int
        Indices of the pushes for which a controller was consulted.
    """
    jitter = random.Random(1)
    seconds = [1.0 + worker % 4 / 3 for worker in range(paradigm.n_workers)]
    drawn_s = [seconds[worker] * jitter.uniform(0.8, 1.2) for worker in range(paradigm.n_workers)]
    due = [(drawn_s[worker], worker) for worker in range(paradigm.n_workers)]
    heapq.heapify(due)
    events: list[PushInfo] = []
    consulted = set()
    while len(events) < pushes:
        now_s, worker = heapq.heappop(due)
        events.append(PushInfo(now_s, worker, compute_s=drawn_s[worker], loss=1.0))
        for action in paradigm.handle(events[-1]):
            if isinstance(action, Grant):
                drawn_s[action.worker] = seconds[action.worker] * jitter.uniform(0.8, 1.2)
                heapq.heappush(due, (now_s + drawn_s[action.worker], action.worker))
            elif isinstance(action, Decision):
                consulted.add(len(events) - 1)
    return events, consulted
