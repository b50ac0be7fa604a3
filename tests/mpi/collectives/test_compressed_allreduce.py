"""Compressed mean: the same bits on all ranks, equal to those of one process, over all contributing ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from hpcsync.config.job import Job
from hpcsync.mpi.collectives import allreduce
from hpcsync.mpi.collectives import compressed_allreduce as module
from hpcsync.mpi.collectives.allreduce import MpiMean, RingMean
from hpcsync.mpi.collectives.bucket_reducer import BucketReducer
from hpcsync.mpi.collectives.compressed_allreduce import CompressedMean, FactorsMean, GatheredMean
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.paradigms.peer_method import Agreed, StepCounts
from hpcsync.simulator.compressed_mean import FactorsInOneProcess, PayloadsInOneProcess
from hpcsync.simulator.simulate import simulate
from hpcsync.trace.reader import load
from hpcsync.training import compressor
from hpcsync.training.compressor import Compression
from hpcsync.training.flat_model import FlatModel
from tests.mpi.training import failures, on_some
from tests.unit.jobs import make_job

CODECS: dict[str, dict[str, Any]] = {
    "top-k": {"ratio": 0.1},
    "random-k": {"ratio": 0.1, "error_feedback": True},
    "dgc": {"ratio": 0.1, "warmup": 2, "warmup_ratios": [0.3]},
    "qsgd": {"levels": 7, "bucket": 64},
    "one-bit": {},
    "sign": {},
    "fp16": {},
    "bf16": {},
}
SHAPES = [(24, 20), (24,), (3, 24), (3,)]
SIZE = 24 * 20 + 24 + 3 * 24 + 3
STEPS = 3


def compression(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Compression:
    return Compression(job(name, 2, **options), SHAPES, dtype)


def job(name: str, workers: int, updates: int = 6, cluster: Any = None, **options: Any) -> Job:
    return make_job(
        seed=3,
        workload={"name": "tests.mpi.network:regression", "batch_size": 4},
        optimizer={"name": "sgd", "lr": 0.05},
        stop={"updates": updates},
        evaluation={"every_samples": 0},
        paradigm={"name": "allreduce"},
        compression={"name": name, **options},
        cluster={"workers": workers, "compute": {"model": "constant", "seconds": 1e-4}, **(cluster or {})},
    )


def vector(rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(SIZE, generator=drawn, dtype=torch.float64).to(dtype)


def make(comm: MPI.Intracomm, of: Compression, dtype: torch.dtype = torch.float64) -> CompressedMean:
    return module.compressed_mean(comm, SIZE, dtype, HOST, of)


def means(comm: MPI.Intracomm, of: Compression, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], Any]:
    """Return the means of all ranks' vectors, step by step, and what remains of this rank's."""
    found, mean = [], make(comm, of, dtype)
    for step in range(STEPS):
        mean.vector.copy_(vector(comm.rank, step, dtype))
        assert mean.mean(0, SIZE, StepCounts(1, 4, False)) == Agreed(comm.size, comm.size, 4 * comm.size, False)
        found.append(mean.vector.clone())
    rest = rest_of(codec_of(mean))
    mean.free()
    return found, rest


def codec_of(mean: CompressedMean) -> Any:
    return mean.memory.codec if isinstance(mean, GatheredMean) else mean.memory


def rest_of(codec: Any) -> Any:
    """What a codec keeps, a copy; None if it keeps nothing."""
    rest = getattr(codec, "residual", getattr(codec, "gathered", None))
    return None if rest is None else rest.copy()


def in_one_process(n_ranks: int, of: Compression, dtype: torch.dtype) -> tuple[list[np.ndarray], list[Any]]:
    """What the same vectors give if one process compresses them all."""
    codecs, found = [of.compressor(rank).codec for rank in range(n_ranks)], []
    for step in range(STEPS):
        sent = [codec.encode(vector(rank, step, dtype).numpy()) for rank, codec in enumerate(codecs)]
        decoded = np.empty((n_ranks, SIZE), codecs[0].dtype)
        for codec, one, out in zip(codecs, sent, decoded, strict=True):
            codec.decode(one.payload(0, SIZE), 0, SIZE, out)
        found.append(sum(decoded[1:], decoded[0]) / n_ranks)
    return found, [rest_of(codec) for codec in codecs]


def equal_everywhere(comm: MPI.Intracomm, tensors: list[torch.Tensor]) -> bool:
    return len(set(comm.allgather(b"".join(tensor.numpy().tobytes() for tensor in tensors)))) == 1


@pytest.mark.parametrize("name", CODECS)
def test_it_is_the_mean_of_decoded_payloads_in_rank_order(comm, name):
    dtype = torch.float32
    of = compression(name, dtype, **CODECS[name])
    found, rest = means(comm, of, dtype)
    assert equal_everywhere(comm, found)
    expected, rests = in_one_process(comm.size, of, dtype)
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(found, expected, strict=True))
    assert (rest is None) == (name in ("qsgd", "fp16", "bf16"))
    assert rest is None or (np.array_equal(rest, rests[comm.rank]) and rest.any())
    dense = sum(vector(rank, 0, dtype) for rank in range(comm.size)) / comm.size
    assert not np.allclose(found[0], dense, rtol=1e-9), "something is compressed"


@pytest.mark.parametrize("broken", ["forgets", "other order"])
def test_a_rank_that_does_something_else_is_noticed(comm, needs, monkeypatch, broken):
    needs(3)  # the sum of two is the same in either order
    of = compression("sign", torch.float32)
    if broken == "forgets":
        encode = compressor.Compressor.encode

        def forgetful(self: Any, *args: Any) -> Any:
            self.codec.residual = None
            return encode(self, *args)

        if comm.rank == 1:
            monkeypatch.setattr(compressor.Compressor, "encode", forgetful)
    elif comm.rank == 1:
        add_up = Compression.decode_mean
        monkeypatch.setattr(Compression, "decode_mean", lambda of, payloads, into: add_up(of, payloads[::-1], into))
    found, rest = means(comm, of, torch.float32)
    expected, rests = in_one_process(comm.size, of, torch.float32)
    right = all(np.array_equal(a.numpy(), b) for a, b in zip(found, expected, strict=True))
    assert equal_everywhere(comm, found) == (broken == "forgets")
    assert right == (comm.rank != 1 if broken == "other order" else False)
    if broken == "forgets":
        assert np.array_equal(rest, rests[comm.rank]) == (comm.rank != 1)


def test_half_precision_is_exact_for_values_it_can_represent(comm):
    mean = make(comm, compression("fp16"))
    known = torch.arange(SIZE, dtype=torch.float64)
    mean.vector.copy_(known + comm.rank)
    mean.mean(0, SIZE, StepCounts())
    assert torch.equal(mean.vector, known + (comm.size - 1) / 2)
    assert mean.sent_bytes == (comm.size - 1) * (2 * SIZE + -2 * SIZE % 8)
    mean.free()


def test_all_of_the_elements_are_the_mean_without_compression(comm):
    found, rest = means(comm, compression("top-k", ratio=1.0))
    dense = MpiMean(comm, SIZE, torch.float64, HOST, Backoff(comm))
    for step in range(STEPS):
        dense.vector.copy_(vector(comm.rank, step))
        dense.mean(0, SIZE, StepCounts())
        np.testing.assert_allclose(found[step], dense.vector, rtol=1e-12, atol=1e-15)
    assert not rest.any()
    dense.free()


# ---- PowerSGD ----


@pytest.mark.parametrize("way", ["fastest", "mpi", "ring"])
def test_factors_are_those_of_one_process(comm, monkeypatch, way):
    """The bits are equal where the ranks' own memory is used: MPI and a ring may sum in another order."""
    if way != "fastest":
        kind = {"mpi": MpiMean, "ring": RingMean}[way]
        monkeypatch.setattr(allreduce, "SEGMENT_BYTES", 0)
        monkeypatch.setattr(module, "mean_vector", lambda comm, *of: kind(comm, *of, Backoff(comm)))
    of = compression("powersgd")
    found, rest = means(comm, of)
    assert equal_everywhere(comm, found)
    alike = FactorsInOneProcess(of, comm.size)
    for step in range(STEPS):
        vectors = [vector(rank, step) for rank in range(comm.size)]
        alike.form(range(comm.size), vectors)
        assert torch.allclose(found[step], vectors[0], rtol=1e-9, atol=1e-12)
        assert way != "fastest" or torch.equal(found[step], vectors[0])
    np.testing.assert_allclose(rest, rest_of(alike._codecs[comm.rank]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("feedback", [True, False])
def test_a_mean_of_low_rank_is_exact_whatever_the_ranks_of_its_terms(comm, feedback):
    of = compression("powersgd", rank=2, error_feedback=feedback)
    apart = [vector(rank, 1) for rank in range(comm.size)]
    middle = sum(apart) / comm.size
    low = vector(99, 0)
    low[: 24 * 20] = (low[:48].view(24, 2) @ low[48:88].view(2, 20)).flatten()
    own = low + apart[comm.rank] - middle
    mean = make(comm, of)
    assert isinstance(mean, FactorsMean)
    mean.vector.copy_(own)
    mean.mean(0, SIZE, StepCounts())
    np.testing.assert_allclose(mean.vector, low, rtol=1e-9, atol=1e-12)
    assert mean.sent_bytes == 2 * (comm.size - 1) * (8 * (2 * (24 + 20) + 24 + 72 + 3)) // comm.size
    mean.free()
    if comm.size > 1:  # the control: the mean of what each of them would send
        decoded = torch.empty(SIZE, dtype=torch.float64)
        of.decode(of.compressor(0).encode(own, [slice(0, SIZE)])[0], decoded, slice(0, SIZE))
        total = comm.allreduce(decoded.numpy()) / comm.size
        assert not np.allclose(total, low, rtol=1e-3)


def test_without_factors_the_second_mean_is_empty(comm):
    mean = module.compressed_mean(comm, 9, torch.float64, HOST, Compression(job("powersgd", 2), [(9,)], torch.float64))
    for step in range(2):
        mean.vector.fill_(step + comm.rank)
        mean.mean(0, 9, StepCounts())
        np.testing.assert_allclose(mean.vector, step + (comm.size - 1) / 2)
    mean.free()


# ---- contributing ranks ----


@pytest.mark.parametrize("name", ["top-k", "powersgd"])
def test_a_rank_that_does_not_contribute_sends_nothing_and_keeps_its_state(comm, needs, name):
    """The last rank does not contribute to the second of three means; then no rank does."""
    needs(2)
    of, absent = compression(name), comm.size - 1
    mean, alike = make(comm, of), (FactorsInOneProcess if name == "powersgd" else PayloadsInOneProcess)(of, comm.size)
    for step in range(STEPS):
        contributing = [rank for rank in range(comm.size) if step != 1 or rank != absent]
        before = rest_of(codec_of(mean))
        if comm.rank in contributing:
            mean.vector.copy_(vector(comm.rank, step))
            own_counts = mean.mean(0, SIZE, StepCounts(1, 2, comm.rank == 0))
            assert before is None or not np.array_equal(rest_of(codec_of(mean)), before)
        else:
            mean.vector.zero_()
            own_counts = mean.mean(0, SIZE, StepCounts(0))
            assert np.array_equal(rest_of(codec_of(mean)), before) and before.any()
            assert name == "powersgd" or mean.sent_bytes == 0
        assert own_counts == Agreed(len(contributing), len(contributing), 2 * len(contributing), True)
        assert equal_everywhere(comm, [mean.vector])
        vectors = [vector(rank, step) for rank in contributing]
        alike.form(contributing, vectors)
        assert torch.equal(mean.vector, vectors[0]) or (step == 2 and name == "powersgd")  # alike's has the older Q
    mean.vector.zero_()
    assert mean.mean(0, SIZE, StepCounts(0)).n_contributing == 0
    assert not mean.vector.any()
    mean.free()


# ---- in training ----


def test_a_gradient_is_one_bucket_and_is_compressed_when_it_is_complete(comm):
    torch.manual_seed(1)
    flat = FlatModel(nn.Sequential(*(nn.Linear(5, 5, dtype=torch.float64) for _ in range(3))))
    shapes = [tuple(p.shape) for p in flat.parameters]
    of = Compression(job("fp16", 2), shapes, torch.float64)
    with BucketReducer(comm, flat, 8, compression=of) as reducer:
        assert not reducer._can_overlap
        for step in range(2):
            flat.drop_gradient()
            reducer.weight = 2.0 ** (comm.rank + step)
            sum((p * (comm.rank + 1)).sum() for p in flat.parameters).backward()
            assert reducer.n_reduced == 0
            assert reducer.finish() == Agreed(comm.size, comm.size, 0, False)
            weighted = [(rank + 1) * 2.0 ** (rank + step) for rank in range(comm.size)]
            assert torch.equal(flat.gradient, torch.full_like(flat.gradient, sum(weighted) / comm.size))
        assert reducer.reduced.sent_bytes == (comm.size - 1) * (2 * flat.size + -2 * flat.size % 8)


@pytest.mark.parametrize(
    ("name", "leaving"),
    [("top-k", False), ("dgc", True), ("qsgd", False), ("powersgd", True)],
)
def test_a_run_is_its_simulation_to_the_bit(comm, folder, name, leaving):
    if leaving and comm.size < 2:
        pytest.skip("somebody has to stay")
    events = [{"worker": comm.size - 1, "at_iteration": 3, "change": "leave"}] if leaving else []
    this = job(name, comm.size, cluster={"events": events}, **CODECS.get(name, {}))
    weights = on_some(comm, this, folder / "real")
    if comm.rank == 0:
        assert simulate(this, folder / "virtual", Console(quiet=True)) == 0
        tensors = load_file(folder / "virtual" / "weights.safetensors")
        order = ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert np.array_equal(weights, np.concatenate([tensors[key].numpy().ravel() for key in order]))
        rows = {}
        for engine in ("real", "virtual"):
            assert failures(folder / engine / "trace.h5") == []
            rows[engine] = np.sort(
                load(folder / engine / "trace.h5").tables["exchanges"], order=("iteration", "worker")
            )
        for column in ("worker", "iteration", "wire_bytes", "n_received", "batch_size"):
            assert np.array_equal(rows["real"][column], rows["virtual"][column])
        assert (rows["real"]["wire_bytes"] > 0).all() == (comm.size > 1)
        if not leaving:
            plain = job("top-k", comm.size, ratio=1.0)
            assert simulate(plain, folder / "plain", Console(quiet=True)) == 0
            dense = load_file(folder / "plain" / "weights.safetensors")
            assert not torch.allclose(dense["0.weight"], tensors["0.weight"], rtol=0, atol=1e-9), "it is compressed"


def test_other_transports_are_staged_in_host_memory(comm):
    """As with a GPU, payloads travel through host memory whatever the transport's kind."""
    for name in ("top-k", "powersgd"):
        of, found = compression(name), []
        for transport in (HOST, Transport("staged")):
            mean = module.compressed_mean(comm, SIZE, torch.float64, transport, of)
            mean.vector.copy_(vector(comm.rank, 0))
            mean.mean(0, SIZE, StepCounts())
            found.append(mean.vector.clone())
            mean.free()
        assert torch.equal(*found)
