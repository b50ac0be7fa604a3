from __future__ import annotations

import time

import numpy as np
import pytest

from hpcsync.mpi.transport.window import Window


def test_all_ranks_put_to_and_get_from_all_ranks(comm):
    rank, size, m = comm.rank, comm.size, 1000
    with Window(comm, size * m, np.float32) as window:
        for target in range(size):
            window.put(np.full(m, 100 * rank + target, np.float32), target, rank * m)
            window.flush(target)
        comm.Barrier()
        window.sync()
        assert (window.local.reshape(size, m) == (100 * np.arange(size) + rank)[:, None]).all()
        for target in range(size):
            into = np.zeros(size * m, np.float32)
            window.get(into, target, 0)
            window.flush(target)
            assert (into.reshape(size, m) == (100 * np.arange(size) + target)[:, None]).all()
        comm.Barrier()


def test_ranks_may_expose_different_sizes_and_nothing(comm):
    count = 0 if comm.rank else 7
    with Window(comm, count, np.float64) as window:
        assert window.local.shape == (count,)
        if comm.rank == comm.size - 1:
            window.put(np.arange(7.0), 0, 0)
            window.flush(0)
        comm.Barrier()
        window.sync()
        assert comm.rank or (window.local == np.arange(7.0)).all()
        comm.Barrier()


def test_a_put_arrives_while_the_target_computes(comm, needs):
    """The target only reads its own memory: if the put needed its help, the value would never arrive."""
    needs(2)
    with Window(comm, 1 << 16, np.float64) as window:
        if comm.rank == 0:
            deadline_s = time.monotonic() + 20
            while window.local[-1] != 1.0:
                assert time.monotonic() < deadline_s, "nothing arrived without the target's help"
        elif comm.rank == 1:
            window.put(np.ones(1 << 16), 0, 0)
            window.flush(0)
        comm.Barrier()


def test_free_is_idempotent_and_a_freed_window_raises(comm):
    window = Window(comm, 4, np.float32)
    window.free()
    window.free()
    with pytest.raises(ValueError, match="freed"):
        window.put(np.zeros(4, np.float32), 0, 0)
