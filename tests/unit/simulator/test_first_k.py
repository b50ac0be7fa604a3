"""The k family in virtual time: rates and staleness in closed form, its limits, cancellation, adaptive k.

Exponential iteration times (mean 1) are memoryless, so however a round begins, its length depends only on which workers
compute from which version then. Means of rounds are compared within three standard errors.
"""

import math

import numpy as np
import pytest
import torch

from hpcsync.trace.schema import TABLES, Outcome
from hpcsync.workloads.registry import build
from tests.unit.jobs import LINEAR, make_job
from tests.unit.simulator.running import failed, simulate, timing_job

FORMS = ["k-sync", "k-batch-sync", "k-async", "k-batch-async"]
N_UPDATES = 1200


def run(
    path, paradigm, *, workers=8, updates=N_UPDATES, seed=1, model="exponential", seconds=1.0, batch_size=4, **more
):
    tables = {"cluster": more.pop("cluster", {}), **more}
    workload = {"name": "timing", "batch_size": batch_size, "parameters": 10}
    tables = {"paradigm": paradigm, "stop": {"updates": updates}, "seed": seed, "workload": workload, **tables}
    return simulate(timing_job(workers=workers, seconds=seconds, model=model, **tables), path)


def rounds_s(trace) -> np.ndarray:
    """Return the seconds between updates; the first round, which begins differently, is left out."""
    return np.diff(trace.tables["updates"]["now_s"])


def errors_off(values: np.ndarray, expected: float, block: int = 1) -> float:
    """Return the error of the mean in standard errors; dependent values are first averaged in blocks."""
    means = values[: len(values) // block * block].reshape(-1, block).mean(1)
    return abs(means.mean() - expected) / (means.std(ddof=1) / math.sqrt(len(means)))


# ---- update times ----


def order_statistic_s(n: int, k: int) -> float:
    """Mean of the k-th smallest of n exponential times: H_n - H_(n-k)."""
    return sum(1 / i for i in range(n - k + 1, n + 1))


def dropping_s(n: int, k: int, distinct: bool) -> float:
    """Return the mean length of a round in which late workers finish, are dropped and restart.

    A Markov chain over events: `taken` contributions have arrived, `late` workers still use an old version. When
    a round begins, all workers that did not wait for the update are late; so are those that contributed earlier.
    """

    def left_s(taken: int, late: int) -> float:
        if taken == k:
            return 0.0
        computing = n - taken if distinct else n
        in_time = computing - late
        later = in_time * left_s(taken + 1, late) if in_time else 0.0
        return (1.0 + later + (late * left_s(taken, late - 1) if late else 0.0)) / computing

    return left_s(0, n - k if distinct else n - 1)


@pytest.mark.parametrize(("workers", "k"), [(8, 1), (8, 4), (8, 8), (5, 2)])
@pytest.mark.parametrize("name", ["k-sync", "k-batch-sync"])
def test_late_iterations_that_are_finished_and_dropped(tmp_path, name, workers, k):
    trace = run(tmp_path / "t.h5", {"name": name, "k": k}, workers=workers)
    took_s = rounds_s(trace)
    assert errors_off(took_s, dropping_s(workers, k, name == "k-sync")) < 3
    for other in {k - 1, k + 1} - {0, workers + 1}:
        assert not errors_off(took_s, dropping_s(workers, other, name == "k-sync")) < 3
    if 1 < k < workers:  # as if late workers restarted at once
        at_once_s = order_statistic_s(workers, k) if name == "k-sync" else k / workers
        assert not errors_off(took_s, at_once_s) < 3


@pytest.mark.parametrize(("workers", "k"), [(8, 2), (8, 4), (5, 3)])
@pytest.mark.parametrize("name", ["k-sync", "k-batch-sync"])
def test_late_iterations_that_are_cancelled(tmp_path, name, workers, k):
    """In the limit of many pieces all workers restart every round: the papers' figures."""
    paradigm = {"name": name, "k": k, "cancel": "abort", "micro_batches": 300}
    took_s = rounds_s(run(tmp_path / "t.h5", paradigm, workers=workers, updates=600, batch_size=300))

    def expected_s(k):
        return order_statistic_s(workers, k) if name == "k-sync" else k / workers

    assert errors_off(took_s, expected_s(k)) < 3
    assert not errors_off(took_s, expected_s(k - 1)) < 3
    assert not errors_off(took_s, expected_s(k + 1)) < 3
    if name == "k-sync":  # in a batch form it differs less
        assert not errors_off(took_s, dropping_s(workers, k, True)) < 3


@pytest.mark.parametrize(("workers", "k"), [(8, 1), (8, 2), (8, 4), (8, 8), (5, 3)])
def test_k_async_waits_for_the_kth_of_all(tmp_path, workers, k):
    """With exponential times, workers that continue have as much left as those that begin."""
    took_s = rounds_s(run(tmp_path / "t.h5", {"name": "k-async", "k": k}, workers=workers))
    assert errors_off(took_s, order_statistic_s(workers, k)) < 3
    for other in {k - 1, k + 1} - {0, workers + 1}:
        assert not errors_off(took_s, order_statistic_s(workers, other)) < 3


def test_k_async_waits_less_where_what_is_left_of_an_iteration_is_less_than_a_new_one(tmp_path):
    took_s = rounds_s(run(tmp_path / "t.h5", {"name": "k-async", "k": 4}, model="lognormal"))
    times = np.random.default_rng(0).lognormal(0.0, 0.2, (20_000, 8))
    assert took_s.mean() < 0.8 * np.sort(times)[:, 3].mean()


JITTER = 0.8


@pytest.mark.parametrize(("workers", "k"), [(8, 1), (8, 3), (8, 8), (5, 2)])
@pytest.mark.parametrize("model", ["exponential", "lognormal"])
def test_k_batch_async_takes_k_of_all_iterations_whatever_their_distribution(tmp_path, model, workers, k):
    """No worker ever waits, so every worker makes one iteration in its mean time."""
    compute = {"model": model, "seconds": 1.0} | ({"jitter": JITTER} if model == "lognormal" else {})
    paradigm, cluster = {"name": "k-batch-async", "k": k}, {"compute": compute}
    took_s = rounds_s(run(tmp_path / "t.h5", paradigm, workers=workers, updates=6000 // k, cluster=cluster))
    mean_s = math.exp(JITTER**2 / 2) if model == "lognormal" else 1.0
    took_s = took_s[len(took_s) // 10 :]  # all workers begin at once
    block = 240 // k  # far longer than the correlation time of an iteration
    assert errors_off(took_s, k * mean_s / workers, block) < 3
    assert not errors_off(took_s, (k + 1) * mean_s / workers, block) < 3


# ---- staleness ----


@pytest.mark.parametrize(("workers", "k"), [(8, 1), (8, 2), (8, 4), (8, 8), (5, 3)])
@pytest.mark.parametrize(("name", "present"), [("k-async", "k"), ("k-batch-async", "1")])
def test_mean_staleness(tmp_path, name, present, workers, k):
    """An update makes all computing workers staler: all but the k that wait, or the one that pushes.

    The sum of the staleness of all pushes, late ones included, is therefore deterministic.
    """
    away, updates = k if present == "k" else 1, min(3000, 6000 // k)
    trace = run(tmp_path / "t.h5", {"name": name, "k": k}, workers=workers, updates=updates)
    pushes = trace.tables["pushes"]
    assert pushes["staleness"].sum() == (workers - away) * updates
    applied = pushes[pushes["outcome"] == Outcome.APPLIED]["staleness"]
    assert len(applied) == k * updates
    expected = (workers - away) / k
    assert applied.mean() == pytest.approx(expected, abs=workers**2 / len(applied))
    if workers != away:
        assert errors_off(applied, expected) < 3
        assert not errors_off(applied, (workers - away - 1) / k) < 3
        assert not errors_off(applied, (workers - away) / (k + 1)) < 3


# ---- limits ----


def final_weights(path, paradigm):
    job = make_job(
        workload={**LINEAR, "samples": 96},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
        stop={"updates": 30},
        paradigm=paradigm,
        cluster={"workers": 4, "compute": {"model": "exponential", "seconds": 1.0}},
    )
    workload = build(job)
    simulate(job, path, workload)
    return next(workload.model.parameters()).detach().flatten().clone()


@pytest.mark.parametrize("name", FORMS)
def test_with_all_workers_it_is_bsp(tmp_path, name):
    bsp = final_weights(tmp_path / "bsp.h5", {"name": "bsp"})
    weights = final_weights(tmp_path / "k.h5", {"name": name, "k": 4})
    assert torch.equal(weights, bsp) == ("batch" not in name)  # a fast worker contributes twice in the batch forms
    fewer = final_weights(tmp_path / "fewer.h5", {"name": name, "k": 3})
    assert not torch.equal(fewer, bsp)


def rows(trace) -> dict[str, list]:
    """Return the events of a run, without the estimates and decisions, of which there are none."""
    return {name: trace.tables[name].tolist() for name in TABLES if name != "decisions"}


@pytest.mark.parametrize(
    "network", [{}, {"network": {"bandwidth_gbit": 1e-3, "latency_us": 1000}}], ids=["", "network"]
)
@pytest.mark.parametrize("name", ["k-async", "k-batch-async"])
def test_with_one_worker_an_update_it_is_asp(tmp_path, name, network):
    def traced(paradigm):
        path = tmp_path / f"{paradigm['name']}{paradigm.get('k')}.h5"
        return rows(run(path, paradigm, workers=4, updates=300, cluster=network))

    asp = traced({"name": "asp"})
    assert str(traced({"name": name, "k": 1})) == str(asp)  # NaN is NaN
    assert str(traced({"name": name, "k": 2})) != str(asp)


@pytest.mark.parametrize(
    ("name", "predictor"), [*((name, "smoothing") for name in FORMS[:3]), (FORMS[3], "blend")], ids=str
)
def test_the_same_job_gives_the_same_bytes(tmp_path, name, predictor):
    """With adaptive k and allocated batches."""

    def tables(path, seed=1):
        job = make_job(
            workload={**LINEAR, "batch_size": 8, "samples": 96},
            stop={"updates": 45},
            paradigm={"name": name, "k": "min", "k_min": 2, "k_start": 3}
            | ({"cancel": "abort", "micro_batches": 3} if name.endswith("sync") and "async" not in name else {}),
            batches={"policy": "equal-finish", "predictor": predictor, "interval": 3},
            cluster={
                "workers": 4,
                "compute": {"model": "lognormal", "seconds": [1.0, 1.0, 1.0, 3.0], "fixed_share": 0.2},
                "network": {"bandwidth_gbit": 1.0, "latency_us": 1000},
            },
            seed=seed,
        )
        trace = simulate(job, path)
        assert failed(trace) == []
        assert len(trace.tables["decisions"])
        return [trace.tables[table].tobytes() for table in TABLES]

    first = tables(tmp_path / "a.h5")
    assert first == tables(tmp_path / "b.h5")
    assert first != tables(tmp_path / "c.h5", seed=2)


# ---- cancellation ----

LATENCY_S = 0.01


def cancelling(path, seconds, *, updates=3, pieces=4, latency_s=LATENCY_S, cancel="abort", **cluster):
    """Run two workers, one contribution an update; with latencies only: a message takes one, a transfer two."""
    network = {"network": {"bandwidth_gbit": 1e9, "latency_us": 1e6 * latency_s}} if latency_s else {}
    paradigm = {"name": "k-sync", "k": 1, "cancel": cancel, "micro_batches": pieces}
    return run(
        path, paradigm, workers=2, updates=updates, model="constant", seconds=seconds, batch_size=8,
        cluster={**network, **cluster},
    )  # fmt: skip


def cancelled(trace):
    pushes = trace.tables["pushes"]
    return pushes[pushes["share"] < 1]


def test_a_cancelled_worker_stops_at_its_next_piece(tmp_path):
    """Both are granted at 0 and read until 0.03. The update is at 1.06 and the cancel arrives at 1.07.

    The second quarter of the other worker's iteration of 4 s ends at 2.03.
    """
    trace = cancelling(tmp_path / "t.h5", [1.0, 4.0], updates=4)
    row = cancelled(trace)[0]
    assert (row["worker"], row["iteration"], row["share"], row["outcome"]) == (1, 1, 0.5, Outcome.DROPPED)
    assert row["begin_s"] == pytest.approx(0.03)
    assert row["end_s"] == pytest.approx(2.03)
    assert row["compute_s"] == row["end_s"] - row["begin_s"]
    assert row["now_s"] == pytest.approx(2.04)  # a push info without a put
    assert row["comm_s"] == pytest.approx(0.02)  # reading
    assert row["wire_bytes"] * 2 == trace.tables["pushes"]["wire_bytes"][0]
    assert row["batch_size"] == 8
    after = trace.tables["pushes"][trace.tables["pushes"]["worker"] == 1][1]
    assert after["wait_s"] == pytest.approx(0.02)  # from sending the push info to the grant
    assert after["begin_s"] == pytest.approx(2.03 + 0.02 + 0.02)
    assert failed(trace) == []


def test_a_dropped_iteration_runs_to_its_end(tmp_path):
    trace = cancelling(tmp_path / "t.h5", [1.0, 4.0], updates=6, cancel="drop")
    assert len(cancelled(trace)) == 0
    late = trace.tables["pushes"][trace.tables["pushes"]["outcome"] == Outcome.DROPPED]
    assert late["compute_s"].tolist() == pytest.approx([4.0] * len(late))
    assert len(late)


@pytest.mark.parametrize(
    ("seconds", "pieces", "share"),
    [
        (4.0, 4, 0.25),  # cancelled at 1, exactly at the end of the first piece
        (4.0, 2, 0.5),
        (1.25, 4, None),  # cancelled in the last piece: no boundary is left
        (4.0, 1, None),
        (4.0, 1000, 0.25),  # 8 samples allow at most 8 pieces
    ],
)
def test_where_an_iteration_ends(tmp_path, seconds, pieces, share):
    trace = cancelling(tmp_path / "t.h5", [1.0, seconds], updates=8, pieces=pieces, latency_s=0.0)
    row = next(row for row in trace.tables["pushes"] if row["worker"] == 1)
    assert row["share"] == (share or 1.0)
    assert row["compute_s"] == (share or 1.0) * seconds
    assert row["outcome"] == Outcome.DROPPED
    assert failed(trace) == []


def test_a_worker_cancelled_while_reading_stops_after_its_first_piece(tmp_path):
    """Worker 1 reads slowly; the cancel of the first update arrives while it still reads."""
    network = {"network": {"bandwidth_gbit": [1.0, 1e-7], "server_bandwidth_gbit": 10.0, "latency_us": 0.0}}
    trace = cancelling(tmp_path / "t.h5", [1.0, 4.0], latency_s=0.0, updates=9, **network)
    row = next(row for row in trace.tables["pushes"] if row["worker"] == 1)
    assert row["begin_s"] > trace.tables["updates"]["now_s"][0]
    assert (row["share"], row["compute_s"]) == (0.25, pytest.approx(1.0))
    assert failed(trace) == []


def test_a_worker_cancelled_while_putting_loses_only_that_iteration(tmp_path):
    """It pushes while the cancel is in transit, or just before it arrives: one whole iteration is lost."""
    trace = cancelling(tmp_path / "t.h5", [1.0, 1.005], updates=9)
    pushes = trace.tables["pushes"][trace.tables["pushes"]["worker"] == 1]
    assert pushes["share"].tolist() == [1.0] * len(pushes)
    assert Outcome.DROPPED in pushes["outcome"]
    assert failed(trace) == []


def test_a_cancelled_worker_may_leave(tmp_path):
    for at_s in np.arange(0.5, 6.0, 0.25).tolist():
        events = [{"worker": 1, "at_s": at_s, "change": "leave"}]
        trace = cancelling(tmp_path / f"{at_s}.h5", [1.0, 4.0], updates=9, events=events)
        assert failed(trace) == []
        assert trace.tables["membership"]["worker"].tolist() == [1, 0]
        assert trace.finished


def test_a_run_that_ends_cancels_those_that_compute(tmp_path):
    trace = cancelling(tmp_path / "t.h5", [1.0, 1000.0], updates=3, pieces=8)
    assert trace.tables["membership"]["now_s"].max() == pytest.approx(125.0, abs=1.0)


def test_a_device_event_after_a_cancelled_iteration_still_takes_effect(tmp_path):
    """Worker 1 is slow from 10.5 to 14.5 s; its iterations are cancelled every second and restarted."""
    events = [
        {"worker": 1, "at_s": 10.5, "change": "slow", "factor": 40.0},
        {"worker": 1, "at_s": 14.5, "change": "recover"},
    ]
    trace = cancelling(tmp_path / "t.h5", [1.0, 1.2], updates=30, latency_s=0.0, pieces=8, events=events)
    mine = trace.tables["pushes"][trace.tables["pushes"]["worker"] == 1]
    whole_s = mine["compute_s"] / mine["share"]
    for begin_s, took_s in zip(mine["begin_s"], whole_s, strict=True):
        assert (took_s > 1.2 + 1e-9) == (9.3 + 1e-9 < begin_s < 14.5), begin_s


# ---- adaptive k ----


@pytest.mark.parametrize("name", ["k-sync", "k-async"])
def test_a_straggler_is_left_out_until_it_has_recovered(tmp_path, name):
    events = [
        {"worker": 2, "at_s": 100.5, "change": "slow", "factor": 3.0},
        {"worker": 2, "at_s": 400.5, "change": "recover"},
    ]

    def ks(path, events):
        trace = run(path, {"name": name, "k": "state"}, model="lognormal", updates=700, cluster={"events": events})
        assert failed(trace) == []
        decisions = trace.tables["decisions"]
        return decisions["now_s"], decisions["chosen"].tolist()

    at_s, chosen = ks(tmp_path / "t.h5", events)
    assert chosen == [7.0, 8.0]
    assert 100.5 < at_s[0] < 140.0
    assert 400.5 < at_s[1] < 450.0
    assert ks(tmp_path / "even.h5", [])[1] == []


@pytest.mark.parametrize("name", ["k-sync", "k-batch-async"])
def test_k_grows_as_the_loss_falls(tmp_path, name):
    def chosen(path, lr, updates=400):
        job = make_job(
            workload={**LINEAR, "batch_size": 8, "samples": 96, "noise": 0.0},
            optimizer={"name": "sgd", "lr": lr},
            stop={"updates": updates},
            paradigm={"name": name, "k": "loss"},
            cluster={"workers": 8, "compute": {"model": "exponential", "seconds": 1.0}},
        )
        trace = simulate(job, path)
        assert failed(trace) == []
        sizes = trace.tables["updates"]["n_contributions"]
        return trace.tables["decisions"]["chosen"].tolist(), sizes.tolist()

    ks, sizes = chosen(tmp_path / "t.h5", 0.02)
    assert len(ks) >= 2
    assert ks == sorted(ks)
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (1, ks[-1])
    assert chosen(tmp_path / "no.h5", 1e-9, updates=200)[0] == []  # it learns nothing


@pytest.mark.parametrize("name", ["k-async", "k-batch-async"])
def test_a_bound_of_staleness_drops_what_is_staler(tmp_path, name):
    def staleness(path, **paradigm):
        seconds = [1.0] * 7 + [6.0]
        paradigm = {"name": name, "k": 2, **paradigm}
        trace = run(path, paradigm, model="lognormal", seconds=seconds, updates=600)
        assert failed(trace) == []
        pushes = trace.tables["pushes"]
        assert (pushes["staleness"][pushes["outcome"] == Outcome.DROPPED][:-8] > paradigm.get("staleness_max", 0)).all()
        return [pushes[pushes["outcome"] == outcome]["staleness"] for outcome in (Outcome.APPLIED, Outcome.DROPPED)]

    applied, dropped = staleness(tmp_path / "bound.h5", staleness_max=5)
    assert applied.max() == 5
    assert len(dropped) > 20
    applied, dropped = staleness(tmp_path / "free.h5")
    assert applied.max() > 15
    assert len(dropped) <= 8  # pushes that arrived after the end of the run


@pytest.mark.parametrize("more", [{}, {"k": "min"}], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_contributions_to_an_update_are_weighted(tmp_path, name, more):
    """The weights of an update's contributions in the trace are those of the paradigm."""
    trace = run(tmp_path / "t.h5", {"name": name, "k": 3, **more}, updates=300)
    pushes = trace.tables["pushes"]
    applied = pushes[pushes["outcome"] == Outcome.APPLIED]
    inverse = more and name.endswith("async")
    counts = 1 / np.maximum(1, applied["staleness"]) if inverse else np.ones(len(applied))
    made = applied["version_read"] + applied["staleness"]
    n_contributions = trace.tables["updates"]["n_contributions"][made]
    assert applied["weight"] == pytest.approx(counts / n_contributions, rel=1e-12)
    assert set(pushes[pushes["outcome"] == Outcome.DROPPED]["weight"].tolist()) <= {0.0}
