"""All-reduce of compressed gradients in virtual time: numbers, durations and traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpcsync.compression import ErrorFeedback
from hpcsync.core.peer_coordinator import BatchDivision
from hpcsync.simulator import collectives, compressed_mean
from hpcsync.simulator.collectives import ring_allgather_alone_s
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.network import SharedLinks
from hpcsync.trace.schema import TABLES
from hpcsync.training.compressor import of_job
from hpcsync.workloads.registry import build
from tests.unit.jobs import LINEAR
from tests.unit.simulator.closed_forms import ring_allreduce_s
from tests.unit.simulator.running import failed, simulate, timing_job
from tests.unit.simulator.test_factory import ALLREDUCE, BATCHES, LR, NESTEROV, Run, close, data, gradient, start

NAMES = ["top-k", "random-k", "dgc", "qsgd", "one-bit", "sign", "powersgd", "fp16", "bf16"]
NETWORK = {"bandwidth_gbit": 1e-3, "latency_us": 1000}
BANDWIDTH, LATENCY_S = 125e3, 1e-3


def compressed(name: str, workers: int = 3, iterations: int = 12, options: Any = None, **how: Any) -> Run:
    return Run(ALLREDUCE, workers, iterations, compression={"name": name, **(options or {})}, **how)


def leaving(worker: int, at_iteration: int) -> dict[str, Any]:
    return {"cluster": {"events": [{"worker": worker, "at_iteration": at_iteration, "change": "leave"}]}}


# ---- numbers ----


def signs(iterations: int, workers: int, remembered: float = 1.0, last: dict[int, int] | None = None) -> np.ndarray:
    """Independent sign compression with error feedback; `last` holds the iterations of leaving workers."""
    weights, errors = start(), np.zeros((workers, 5))
    mine = [data(workers, worker) for worker in range(workers)]
    for iteration in range(1, iterations + 1):
        sent = []
        for worker in range(workers):
            if iteration <= (last or {}).get(worker, iterations):
                p = gradient(weights, next(mine[worker])) + errors[worker]
                sent.append(np.abs(p).mean() * np.sign(p))
                errors[worker] = remembered * (p - sent[-1])
        weights = weights - LR * sum(sent) / len(sent)
    return weights


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_worker_sends_what_it_has_not_sent_yet(workers):
    weights = compressed("sign", workers).weights
    assert close(weights, signs(12, workers))
    assert not np.allclose(weights, signs(12, workers, remembered=0.0), rtol=1e-3)
    forgetful = compressed("sign", workers, options={"error_feedback": False}).weights
    assert close(forgetful, signs(12, workers, remembered=0.0))


def test_a_worker_that_has_left_sends_nothing():
    run = compressed("sign", 3, 12, **leaving(1, 7))
    assert run.iterations() == [12, 6, 12]
    assert close(run.weights, signs(12, 3, last={1: 6}))
    assert not np.allclose(run.weights, signs(12, 3), rtol=1e-6)


@pytest.mark.parametrize("more", [{}, {"optimizer": NESTEROV}, leaving(2, 5)], ids=str)
def test_sending_all_elements_equals_all_reduce(more):
    whole, plain = compressed("top-k", options={"ratio": 1.0}, **more), Run(ALLREDUCE, 3, 12, **more)
    assert close(whole.weights, plain.weights)
    assert not np.allclose(compressed("one-bit", **more).weights, plain.weights, rtol=1e-6)


@pytest.mark.parametrize("leave", [{}, leaving(1, 8)], ids=str)
def test_allocated_batches_are_weighted_by_their_samples(leave, monkeypatch):
    how: dict[str, Any] = {"seconds": [1.0, 2.0, 4.0], "batches": BATCHES, **leave}
    plain = Run(ALLREDUCE, 3, 12, **how)
    assert close(compressed("top-k", options={"ratio": 1.0}, **how).weights, plain.weights)
    monkeypatch.setattr(BatchDivision, "weight", lambda self, worker: 1.0)
    assert not np.allclose(compressed("top-k", options={"ratio": 1.0}, **how).weights, plain.weights, rtol=1e-6)


def test_factors_of_the_mean_are_averaged_and_not_products():
    """Each worker has a part of a matrix: one iteration gives all the mean, which no single worker could send."""
    job = timing_job(workers=3, paradigm=ALLREDUCE, compression={"name": "powersgd", "rank": 1})
    drawn = np.random.default_rng(0)
    low = np.outer(drawn.standard_normal(10), drawn.standard_normal(8))
    parts = drawn.standard_normal((3, 10, 8))
    parts += low - parts.mean(0)
    mean = compressed_mean.compressed_mean(job, [torch.nn.Parameter(torch.empty(10, 8, dtype=torch.float64))])
    vectors = [torch.from_numpy(part.ravel().copy()) for part in parts]
    assert mean.form([0, 1, 2], vectors) == [8 * 18] * 3
    for vector in vectors:
        np.testing.assert_allclose(vector.numpy(), low.ravel(), rtol=1e-9)
    for codec, part in zip(mean._codecs, parts, strict=True):
        assert isinstance(codec, ErrorFeedback)
        np.testing.assert_allclose(codec.residual, (part - low).ravel(), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", ["qsgd", "random-k", "powersgd"])
def test_the_same_seed_gives_the_same_bytes(name):
    def tables(seed: int) -> tuple[list[bytes], bytes]:
        run = compressed(name, seed=seed, model="lognormal", cluster={"network": NETWORK})
        return [run.trace.array(table).tobytes() for table in TABLES], run.weights.tobytes()

    assert tables(1) == tables(1)
    assert tables(1) != tables(2)


# ---- durations ----


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("name", ["top-k", "fp16", "powersgd"])
def test_compressing_and_gathering_take_their_time(tmp_path, name, workers):
    """1000 parameters, 4 kB; the slowest worker computes for 2 s."""
    seconds = [2.0] + [1.0] * (workers - 1)
    job = timing_job(
        workers=workers, seconds=seconds, paradigm=ALLREDUCE, stop={"updates": 4}, cluster={"network": NETWORK},
        compression={"name": name, "gbytes_per_s": 1e-5},
    )  # fmt: skip
    trace = simulate(job, tmp_path / "trace.h5")
    assert failed(trace) == []
    compression = of_job(job, list(build(job).model.parameters()))
    given = compression.nominal_bytes(slice(0, 1000))
    encode_s = 4000 / 1e4
    if name == "powersgd":
        comm_s, sent = encode_s + 2 * ring_allreduce_s(workers, given / 2, LATENCY_S, BANDWIDTH), 2 * given // workers
    else:
        comm_s, sent = encode_s + (workers - 1) * (LATENCY_S + given / BANDWIDTH), given
    rows = trace.tables["exchanges"]
    np.testing.assert_allclose(rows["comm_s"], comm_s, rtol=0.01 if name == "powersgd" else 1e-9)
    np.testing.assert_allclose(rows["wait_s"], 2.0 - rows["compute_s"], atol=1e-9)
    assert (np.abs(rows["wire_bytes"] - (workers - 1) * sent) <= workers).all()
    assert name != "fp16" or given == 2000


def test_without_a_speed_and_a_network_it_takes_no_time(tmp_path):
    job = timing_job(workers=3, paradigm=ALLREDUCE, compression={"name": "top-k"})
    assert (simulate(job, tmp_path / "trace.h5").tables["exchanges"]["comm_s"] == 0.0).all()


@pytest.mark.parametrize("sizes", [[10, 0, 5000, 10], [0, 0, 0, 0], [700] * 4, [5000], [10, 3000]], ids=str)
@pytest.mark.parametrize("slower", [0, 1, 3])
def test_a_ring_alone_takes_what_its_messages_take(sizes, slower):
    """A host forwards a block once it has arrived and the host's previous message has been delivered."""
    p = len(sizes)
    links = [BANDWIDTH / (1 + slower * host % 3) for host in range(p)]
    network, ended = SharedLinks(Loop(), links, links, LATENCY_S), []
    messages = []
    for step in range(p - 1):
        for i in range(p):
            before = (step - 1) * p
            after = (before + i, before + (i - 1) % p) if step else ()
            messages.append(collectives.Message(i, (i + 1) % p, sizes[(i - step) % p], after))
    collectives._Schedule(network, messages, lambda: ended.append(network.loop.now_s), ())
    network.loop.run()
    assert ring_allgather_alone_s(links, sizes, LATENCY_S) == pytest.approx(ended[0], rel=1e-9)
    assert p == 1 or ring_allgather_alone_s(links, [size + 1 for size in sizes], LATENCY_S) > ended[0]


# ---- traces ----


@pytest.mark.parametrize("name", NAMES)
def test_a_simulated_trace_audits(tmp_path, name):
    for workers in (1, 3):
        events = leaving(1, 4)["cluster"] if workers > 1 else {}
        job = timing_job(
            workers=workers, model="lognormal", paradigm=ALLREDUCE, stop={"updates": 8}, compression={"name": name},
            cluster={"network": NETWORK, **events},
            workload=LINEAR,
        )  # fmt: skip
        trace = simulate(job, tmp_path / f"{workers}.h5")
        assert failed(trace) == []
        moved = trace.tables["exchanges"]["wire_bytes"]
        assert (moved > 0).all() == (workers > 1)
        for wrong in (moved[3] + 1, -8, 1):
            trace.tables["exchanges"]["wire_bytes"][3] = wrong
            assert failed(trace) != []
