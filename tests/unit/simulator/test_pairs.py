"""AD-PSGD in virtual time: plain SGD alone, an independent account of every step, the kept sum, locks, and times."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.simulator import pairs
from hpcsync.trace.schema import Change
from tests.unit.audit.failing import failing
from tests.unit.simulator.running import TIMING, failed, simulate, timing_job
from tests.unit.simulator.test_factory import LATENCY_S, LR, NESTEROV, NETWORK, TRANSFER_S, Run, data, gradient, start
from tests.unit.trace.peer_recorder import in_memory, peer_job, simulated
from tests.unit.trace.recorder import edit, remove

AD_PSGD: dict[str, Any] = {"name": "ad-psgd"}
ATOMIC = "averages are atomic, of two workers, and lose no step"
NOTICED = "as many models are received as sent"


def plain(worker: int, workers: int, iterations: int) -> np.ndarray:
    weights, batches = start(), data(workers, worker)
    for _ in range(iterations):
        weights = weights - LR * gradient(weights, next(batches))
    return weights


def test_one_worker_is_plain_sgd():
    run, alone = (
        Run(paradigm, 1, 12, optimizer=NESTEROV) for paradigm in (AD_PSGD, {"name": "gossip", "mode": "pull"})
    )
    assert np.array_equal(run.weights, alone.weights)
    assert np.allclose(Run(AD_PSGD, 1, 12).weights, plain(0, 1, 12), rtol=1e-13, atol=0)
    assert set(run.trace.array("exchanges")["n_received"].tolist()) == {0}


def test_gradients_are_taken_before_the_averages_and_applied_after_them():
    """Worker 0 (active) ends its iterations at 1, 2, 3 and 4 s, worker 1 (passive) at 2.6 and 5.2 s."""
    active, passive = start(), start()
    batches = [data(2, 0), data(2, 1)]
    shown: list[np.ndarray] = []
    run = Run(AD_PSGD, 2, seconds=[1.0, 2.6], stop={"seconds": 3.9}, watch=lambda run: shown.append(run.snapshots()))
    ends = iter(shown)
    for _ in range(2):
        own = gradient(passive, next(batches[1]))  # at the weights as they are when its iteration begins
        for _ in range(2):
            own_active = gradient(active, next(batches[0]))
            passive = (active + passive) / 2
            active = passive - LR * own_active
            assert np.allclose(next(ends)[0], active, rtol=1e-13, atol=0)
        passive = passive - LR * own
        assert np.allclose(next(ends)[1], passive, rtol=1e-13, atol=0)
    rows = run.trace.array("exchanges")
    assert rows["worker"].tolist() == [0, 0, 1, 0, 0, 1]
    assert rows["n_received"].tolist() == [1, 1, 2, 1, 1, 2]
    assert rows["weight"].tolist() == [1.0, 1.5, 1.5, 2.5, 3.0, 3.0]


@pytest.mark.parametrize("topology", ["complete", "ring", "exponential"])
@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_the_sum_changes_by_the_gradients_alone(workers, topology):
    applied: list[np.ndarray] = []

    def before(run: Run) -> None:
        for update in run.simulation._numerics.updates:
            step = update.step

            def spied(gradient: Any, lr: float, step: Any = step) -> None:
                applied.append(lr * gradient.numpy().copy())
                step(gradient, lr)

            update.step = spied

    run = Run(
        {**AD_PSGD, "topology": topology}, workers, 30, before=before, model="lognormal", cluster={"network": NETWORK}
    )
    total = run.snapshots().sum(0)
    assert np.allclose(total, workers * start() - np.sum(applied, axis=0), rtol=1e-12, atol=1e-13)
    assert len(applied) == len(run.trace.array("updates"))
    rows = run.trace.array("exchanges")
    last = {int(row["worker"]): float(row["weight"]) for row in rows}
    assert sum(last.values()) == pytest.approx(len(applied), rel=1e-12)


@pytest.mark.parametrize("optimizer", [NESTEROV, {"name": "adam", "lr": 0.01}])
def test_both_workers_have_the_mean_to_the_bit(optimizer, monkeypatch):
    seen = []
    meet = pairs.PairSimulation._read

    def spied(self: Any, worker: int, peer: int) -> None:
        update, shared = self._numerics.updates[worker], self._shared[peer]
        with update.exchanging() as x:
            before = x.clone()
        meet(self, worker, peer)
        seen.append((before, shared.model.clone(), worker, peer))

    written = pairs.PairSimulation._written

    def checked(self: Any, worker: int, peer: int, mean: Any, n_steps: float) -> None:
        before, theirs, *who = seen[-1]
        assert [worker, peer] == who and np.array_equal(mean.numpy(), ((before + theirs) * 0.5).numpy())
        written(self, worker, peer, mean, n_steps)
        assert self._shared[peer].model is mean

    monkeypatch.setattr(pairs.PairSimulation, "_read", spied)
    monkeypatch.setattr(pairs.PairSimulation, "_written", checked)
    Run(AD_PSGD, 2, 20, optimizer=optimizer, seconds=[1.0, 1.3])
    assert len(seen) > 10


# ---- time ----


def test_a_round_takes_two_transfers_and_two_messages():
    rows = Run(AD_PSGD, 2, 6, workload=TIMING, seconds=[1.0, 100.0], cluster={"network": NETWORK}).trace.array(
        "exchanges"
    )
    of_active = rows[rows["worker"] == 0]
    round_s = 1.0 + 2 * LATENCY_S + 2 * TRANSFER_S + 2 * LATENCY_S
    assert np.diff(of_active["now_s"]) == pytest.approx(round_s, rel=1e-6)
    assert set(of_active["wait_s"].tolist()) == {0.0}
    assert set(of_active["wire_bytes"].tolist()) == {8000}


def test_a_passive_worker_averages_with_one_at_a_time():
    """Three active workers ask the only passive one at once; each waits for those before it."""
    rows = Run(AD_PSGD, 3, 9, workload=TIMING, cluster={"network": NETWORK}).trace.array("exchanges")
    first = rows[rows["iteration"] == 1]
    held_s = 2 * TRANSFER_S + 2 * LATENCY_S
    waits = sorted(first["wait_s"][first["worker"] != 1].tolist())
    assert waits == pytest.approx([0.0, held_s], abs=1e-6)


def test_the_owner_waits_with_its_step_while_another_averages():
    seconds = [1.0, 1.0 + LATENCY_S + TRANSFER_S]  # it ends amid the transfers of worker 0
    rows = Run(AD_PSGD, 2, 4, workload=TIMING, seconds=seconds, cluster={"network": NETWORK}).trace.array("exchanges")
    own = rows[(rows["worker"] == 1) & (rows["iteration"] == 1)][0]
    assert own["n_received"] == 1 and own["wait_s"] == pytest.approx(LATENCY_S + LATENCY_S + TRANSFER_S, abs=2e-3)
    assert own["comm_s"] == 0.0


# ---- audit ----


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("topology", ["complete", "ring", "exponential"])
def test_simulations_are_audited(workers, period, topology, tmp_path):
    paradigm = {**AD_PSGD, "period": period, "topology": topology}
    job = timing_job(
        paradigm=paradigm,
        workers=workers,
        model="lognormal",
        stop={"updates": 40 * workers},
        cluster={"network": NETWORK},
    )
    assert not failed(simulate(job, tmp_path / "trace.h5"))


def test_many_workers_at_equal_speed_are_audited(tmp_path):
    job = timing_job(paradigm=AD_PSGD, workers=64, stop={"updates": 4000})
    assert not failed(simulate(job, tmp_path / "trace.h5"))


def traced(paradigm: dict[str, Any] = AD_PSGD, **tables: Any) -> Any:
    job = peer_job(paradigm, (1.0, 1.1, 0.9, 1.2), **tables)
    return in_memory(job, simulated(job))


def test_a_run_without_locks_is_caught(monkeypatch):
    """What one writes, another overwrites."""
    assert failing(traced()) == set()
    monkeypatch.setattr(pairs._Shared, "lock", lambda self, then: True)
    assert failing(traced()) == {ATOMIC}


def test_a_step_without_an_average_adds_one():
    trace = traced({**AD_PSGD, "period": 3})
    assert failing(trace) == set()
    rows = trace.tables["exchanges"]
    (row, *_) = np.flatnonzero((rows["worker"] == 0) & (rows["iteration"] == 5))
    changed = edit(trace, "exchanges", row, weight=rows["weight"][row] + 0.5)
    (check,) = [check for check in audit(changed) if not check.passed]
    assert (check.name, check.detail.partition(":")[0]) == (ATOMIC, f"/exchanges row {row}")


def test_an_average_of_one_side_only_is_caught(monkeypatch):
    """As in pull gossip: the peer's weights stay as they were."""
    written = pairs.PairSimulation._written
    monkeypatch.setattr(
        pairs.PairSimulation,
        "_written",
        lambda self, worker, peer, mean, n_steps: written(
            self, worker, peer, self._shared[peer].model, self._shared[peer].n_steps
        ),
    )
    assert failing(traced()) == {ATOMIC}


def test_unequal_shares_are_caught(monkeypatch):
    """The sum is kept, but the matrix has other entries than 1/2."""
    read = pairs.PairSimulation._read

    def uneven(self: Any, worker: int, peer: int) -> None:
        before, theirs = self._n_steps[worker], self._shared[peer].n_steps
        read(self, worker, peer)
        self._n_steps[worker] = 0.75 * before + 0.25 * theirs

    monkeypatch.setattr(pairs.PairSimulation, "_read", uneven)
    assert ATOMIC in failing(traced())


def test_an_uncounted_average_is_caught(monkeypatch):
    replace = pairs.PairSimulation._replace

    def careless(self: Any, worker: int, shared: Any, lr: float) -> tuple[int, float]:
        n_averaged, n_steps = replace(self, worker, shared, lr)
        return max(0, n_averaged - 1), n_steps

    monkeypatch.setattr(pairs.PairSimulation, "_replace", careless)
    assert failing(traced()) == {ATOMIC, NOTICED}


def test_only_a_death_may_hide_an_average():
    """The last average of an active worker has no row if it dies before it sends its step info."""
    trace = traced(leave={2: 9})
    rows = trace.tables["exchanges"]
    last = int(np.flatnonzero(rows["worker"] == 2)[-1])
    left = int(np.flatnonzero(trace.tables["membership"]["worker"] == 2)[0])
    died = edit(trace, "membership", left, change=Change.DIED)
    job = trace.job.model_copy(update={"cluster": trace.job.cluster.model_copy(update={"on_death": "continue"})})
    died = dataclasses.replace(died, attributes={**died.attributes, "job": job.to_toml()})
    assert failing(trace) == failing(died) == set()
    assert {ATOMIC, NOTICED} & failing(remove(died, "exchanges", last)) == set()
    assert {ATOMIC, NOTICED} <= failing(remove(trace, "exchanges", last))
    earlier = int(np.flatnonzero(rows["worker"] == 2)[-3])
    assert ATOMIC in failing(remove(died, "exchanges", earlier))
