from __future__ import annotations

import threading
import time

import pytest

from hpcsync.mpi.transport.background_thread import Background


def test_calls_run_in_order_beside_the_owner():
    made, background = [], Background()
    gate = threading.Event()
    background.submit(gate.wait)
    for number in range(3):
        background.submit(lambda number=number: made.append(number))
    assert made == []
    gate.set()
    background.wait()
    assert made == [0, 1, 2]
    background.wait()  # for nothing
    background.close()


def test_wait_raises_the_exception_of_a_call_and_later_calls_are_skipped():
    made, background = [], Background()
    background.submit(lambda: 1 / 0)
    background.submit(lambda: made.append(1))
    with pytest.raises(ZeroDivisionError):
        background.wait()
    assert made == []
    background.close()


def test_close_runs_submitted_calls_and_ends_the_thread():
    made, before = [], {*threading.enumerate()}
    background = Background()
    (thread,) = {*threading.enumerate()} - before
    background.submit(lambda: time.sleep(0.05))
    background.submit(lambda: made.append(1))
    background.close()
    assert made == [1]
    assert not thread.is_alive()
