"""Cost of one event of the simulator, beside the heap it needs, and beside SimPy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import cycle
from typing import Any

from hpcsync.bench.figures import Figure, in_turn
from hpcsync.simulator.event_loop import Loop

BARE = "a bare heap: pop and push (time, number)"
SIMPY_AIM = 1.0  # below it, SimPy would be the better choice, as others maintain it

Measured = Callable[[Sequence[float], int, int], float]  # delays, activities, rounds -> thousand events per second


def measure(activities: int = 1000, rounds: int = 200, repetitions: int = 5) -> list[Figure]:
    """Measure `activities` activities of `rounds` events each; every event schedules the activity's next."""
    beside: dict[str, tuple[Measured, float | None]] = {BARE: (bare, None)}
    try:
        import simpy  # noqa: F401
    except ImportError:
        missing = " (SimPy is not installed: its figures are left out)"
    else:
        missing = ""
        beside["SimPy, a process for each activity"] = (simpy_processes, SIMPY_AIM)
        beside["SimPy, callbacks of timeouts"] = (simpy_callbacks, SIMPY_AIM)
    delays = random_delays(10 * activities)
    measured = [ours, *(one for one, _ in beside.values())]
    loop, *others = in_turn(repetitions, *(partial(one, delays, activities, rounds) for one in measured))
    what = f"events, {activities} activities{missing}"
    return [
        Figure(what, "k/s", loop, limit, other, aim)
        for (limit, (_, aim)), other in zip(beside.items(), others, strict=True)
    ]


def random_delays(n: int) -> list[float]:
    """Return delays in seconds, 1 on average; with equal delays all activities would take turns."""
    generator = random.Random(1)
    return [generator.expovariate(1.0) for _ in range(n)]


def ours(delays: Sequence[float], activities: int, rounds: int) -> float:
    """Measure the simulator's event loop."""
    loop, delay = Loop(), cycle(delays).__next__

    def act(left: int) -> None:
        if left > 1:
            loop.after(delay(), act, left - 1)

    for _ in range(activities):
        loop.after(delay(), act, rounds)
    return _rate(loop.run, activities * rounds)


def bare(delays: Sequence[float], activities: int, rounds: int) -> float:
    """Measure the heap alone; the numbers keep the order of insertion."""
    delay = cycle(delays).__next__
    heap = [(delay(), number) for number in range(activities)]
    heap.sort()

    def run() -> None:
        for number in range(activities, activities * rounds):
            now_s, _ = heappop(heap)
            heappush(heap, (now_s + delay(), number))
        while heap:
            heappop(heap)

    return _rate(run, activities * rounds)


def simpy_processes(delays: Sequence[float], activities: int, rounds: int) -> float:
    """Measure SimPy in its intended use, with one process per activity.

    Every process also begins and ends with an event; these are not counted.
    """
    import simpy

    environment, delay = simpy.Environment(), cycle(delays).__next__

    def activity() -> Generator[Any, Any, None]:
        for _ in range(rounds):
            yield environment.timeout(delay())

    for _ in range(activities):
        environment.process(activity())
    return _rate(environment.run, activities * rounds)


def simpy_callbacks(delays: Sequence[float], activities: int, rounds: int) -> float:
    """Measure SimPy at its fastest: without processes, in the form of our loop."""
    import simpy

    environment, delay = simpy.Environment(), cycle(delays).__next__

    def act(event: Any) -> None:
        if event.value > 1:
            environment.timeout(delay(), event.value - 1).callbacks.append(act)

    for _ in range(activities):
        environment.timeout(delay(), rounds).callbacks.append(act)
    return _rate(environment.run, activities * rounds)


def _rate(run: Callable[[], object], events: int) -> float:
    begin_s = time.perf_counter()
    run()
    return 1e-3 * events / (time.perf_counter() - begin_s)
