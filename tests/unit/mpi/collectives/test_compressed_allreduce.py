"""The compressed all-reduce without messages; all else is tested on real ranks."""

from __future__ import annotations

from unittest.mock import MagicMock

import numpy as np
import torch

from hpcsync.mpi.collectives import compressed_allreduce
from hpcsync.mpi.collectives.compressed_allreduce import GatheredMean
from hpcsync.mpi.transport.tensor_window import HOST


def test_payloads_of_more_than_2_gib_together_are_counted_by_mpi(monkeypatch):
    """Open MPI 5 and mpi4py take counts and places below 2^31."""
    monkeypatch.setattr(compressed_allreduce, "Backoff", MagicMock())
    comm, of, sizes = MagicMock(rank=2, size=3), MagicMock(), np.array([1 << 31, 5, 100])
    comm.Dup.return_value = comm
    mean = GatheredMean(comm, 8, torch.float32, HOST, of)
    mean._payload = torch.full((100,), 7, dtype=torch.uint8)
    mean._form(sizes, True)
    words, counts, begins, _ = comm.Allgatherv.call_args.args[1]
    assert max(*counts, *begins) < 1 << 31
    assert (np.array(counts) * words.itemsize >= sizes).all()
    assert (np.cumsum(counts) <= [*begins[1:], len(words)]).all(), "no rank's place overlaps the next one's"
    assert words[begins[2] :].view(np.uint8)[:100].tolist() == [7] * 100
    payloads, _ = of.decode_mean.call_args.args
    assert [len(payload) for payload in payloads] == sizes.tolist() and (payloads[2] == 7).all()
