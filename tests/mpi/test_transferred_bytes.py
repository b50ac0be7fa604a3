"""Whole runs whose puts are counted at the windows: what is transferred is what the trace says."""

from __future__ import annotations

from typing import Any

import torch

from hpcsync.mpi.collectives import model_parts
from hpcsync.mpi.transport import tensor_window
from hpcsync.mpi.transport.tensor_window import TensorWindow
from hpcsync.trace.reader import load
from tests.mpi.training import on_some
from tests.unit.mpi import test_compression, test_stanza
from tests.unit.mpi.test_compression import SIZE
from tests.unit.mpi.test_stanza import ABOVE, BELOW, CUT


def test_the_payload_is_what_is_transferred(comm, needs, folder, monkeypatch):
    """The windows, the trace and the simulation count the same bytes."""
    needs(2)
    put: list[int] = []
    kinds = [kind for kind in _kinds(TensorWindow) if "put" in vars(kind)]
    for kind in kinds:
        monkeypatch.setattr(kind, "put", _counting(kind.put, put))
    servers = min(2, comm.size - 1)
    workers = comm.size - servers
    sparse = {"name": "top-k", "ratio": 0.05}
    on_some(comm, test_compression.job(workers, servers, sparse, "float32", updates=6), folder)
    sent = comm.gather((comm.rank, sum(put)))
    if comm.rank == 0:
        pushes = load(folder / "trace.h5").tables["pushes"]
        for rank, n_bytes in sent[servers:]:
            mine = pushes[pushes["worker"] == rank - servers]
            assert (mine["wire_bytes"] - 4 * SIZE).sum() == n_bytes
        k = 12 + 3 + 20 + 3  # of every matrix a twentieth, and all of the vectors
        assert set((pushes["wire_bytes"] - 4 * SIZE).tolist()) == {8 * k + 8 * servers}
        assert (pushes["encode_s"] > 0).all()
        assert (pushes["comm_s"] > pushes["pull_s"]).all()


def _kinds(kind: type) -> list[type]:
    return [kind, *(found for below in kind.__subclasses__() for found in _kinds(below))]


def _counting(put: Any, counts: list[int]) -> Any:
    def counted(self: Any, source: torch.Tensor, *args: Any) -> Any:
        counts.append(source.nbytes)
        return put(self, source, *args)

    return counted


def test_what_travels_is_what_the_trace_counts_and_the_formula_says(comm, needs, folder, monkeypatch):
    """Transfers are counted at the windows. No worker without the upper half receives its parameters."""
    needs(2)
    put: list[tuple[int, int, int]] = []  # to whom, how many bytes, how many numbers
    for kind in {kind for kind in vars(tensor_window).values() if isinstance(kind, type)}:
        if issubclass(kind, TensorWindow) and "put" in vars(kind) and kind is not TensorWindow:
            monkeypatch.setattr(kind, "put", _recorded(kind.put, put))
    shared: list[tuple[int, int]] = []  # ranks of the communicator, numbers
    share = model_parts.share
    monkeypatch.setattr(
        model_parts,
        "share",
        lambda tensors, comm: share([shared.append((comm.size, tensor.numel())) or tensor for tensor in tensors], comm),
    )
    this, updates = test_stanza.job(comm.size, pieces=2, updates=6), 6
    groups, b = this.groups, 4
    test_stanza.run(comm, this, folder)
    assert all(n_ranks == groups.n_fc for n_ranks, n in shared if n in (36 * 8, 8 * 3)), "weights of upper layers"
    sent = comm.gather((sum(n_bytes for _, n_bytes, _ in put), max((n for *_, n in put), default=0)))
    if comm.rank == 0:
        rows = load(folder / "trace.h5").tables["exchanges"]
        for worker, (n_bytes, largest) in enumerate(sent):
            n, size = (groups.n_fc, ABOVE) if groups.is_fc(worker) else (groups.n_convolution, BELOW)
            ring = 2 * (n - 1) * 8 * size // n
            mine = rows[rows["worker"] == worker]
            assert len(mine) == updates
            assert (mine["wire_bytes"] - ring).sum() == n_bytes
            assert largest <= b * CUT, "a part of the activations, or of their gradients; labels are octets"
        n_c, n_f = groups.n_convolution, groups.n_fc
        a_step = 2 * (n_c - 1) * BELOW * 8 + 2 * (n_f - 1) * ABOVE * 8 + 2 * n_c * b * CUT * 8 + n_c * b * 8  # labels
        assert abs(rows["wire_bytes"].sum() - updates * a_step) < updates * comm.size  # a ring's parts differ by a byte


def _recorded(put: Any, into: list[tuple[int, int, int]]) -> Any:
    def wrapped(self: Any, source: torch.Tensor, rank: int, offset: int) -> None:
        into.append((rank, source.nbytes, source.numel()))
        put(self, source, rank, offset)

    return wrapped
