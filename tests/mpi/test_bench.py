"""The measurements that need ranks, at sizes at which they take no time. How fast anything is, is not asserted."""

from __future__ import annotations

from hpcsync.bench import latency, round_trip, transfers


def positive(figures):
    return all(value > 0 for figure in figures for value in (*figure.values, *figure.limits))


def test_transfers(comm, needs):
    needs(2)
    figures = transfers.measure(comm, sizes_mb=(0.001, 0.01), repetitions=2)
    assert len(figures) == (4 if comm.rank == 1 else 0)
    assert positive(figures)


def test_round_trip(comm, needs):
    needs(2)
    figures = round_trip.measure(comm, size=100, repetitions=2)
    assert len(figures) == (2 if comm.rank == 1 else 0)
    assert positive(figures)


def test_latency(comm, needs):
    needs(2)
    workers = (1, comm.size - 1)
    figures = latency.measure(comm, workers, size=3, round_trips=5, repetitions=2)
    assert [figure.what for figure in figures] == (
        [f"3 float32, {n} worker{'s' if n > 1 else ''} together" for n in workers] if comm.rank == 0 else []
    )
    assert positive(figures)
