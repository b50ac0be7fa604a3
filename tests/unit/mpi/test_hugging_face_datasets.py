"""Data sets of Hugging Face, in the environment of `make scripts`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import hpcsync
from hpcsync.trace.reader import load

datasets = pytest.importorskip("datasets", reason="`make scripts` installs datasets")
pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # no thread for the progress bars of datasets

N, BATCH = 60, 4


def made(kind: str) -> Any:
    rows = {"x": [[float(i), 1.0] for i in range(N)], "label": [[float(i % 3)] for i in range(N)]}
    data = datasets.Dataset.from_dict(rows)
    data = (data.to_iterable_dataset() if kind == "iterable" else data).with_format("torch")
    return DataLoader(data, BATCH) if kind == "in a loader" else data


def rows_trained_on(comm: Any, folder: Path, paradigm: str, batches: Callable[[Any], Iterable[Any]]) -> list[float]:
    """Train on the batches; return the rows of all workers, sorted."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    seen: list[float] = []
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm) as sync:
        for batch in batches(sync):
            assert set(batch) == {"x", "label"} and batch["x"].shape == (BATCH, 2)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(batch["x"].float()), batch["label"].float()).backward()
            optimizer.step()
            seen += batch["x"][:, 0].tolist()
    return sorted(row for of_rank in comm.allgather(seen) for row in of_rank)


@pytest.mark.parametrize("kind", ["map-style", "iterable", "in a loader"])
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_every_row_is_trained_on_once_in_batches_of_dictionaries(comm, needs, folder, kind, paradigm):
    needs(2)
    n_workers = comm.size - (paradigm == "bsp")
    data = made(kind)
    rows = rows_trained_on(
        comm, folder, paradigm, lambda sync: sync.shard(data) if kind == "in a loader" else sync.shard(data, BATCH)
    )
    whole = N // BATCH // n_workers * n_workers * BATCH if kind == "iterable" else N // BATCH * BATCH
    assert len(rows) == len(set(rows)) and len(rows) >= whole and set(rows) <= set(map(float, range(N)))
    if comm.rank == 0:
        assert load(folder / "run" / "trace.h5").tables["updates"]["samples"][-1] == len(rows)


def test_rows_in_the_order_of_the_data_set_are_trained_on_by_every_worker(comm, needs, folder):
    """Negative control: each worker takes its batches from the start of the data set."""
    needs(2)
    loader = made("in a loader")
    rows = rows_trained_on(
        comm, folder, "allreduce", lambda sync: (batch for _, batch in zip(sync.shard(loader), loader, strict=False))
    )
    assert len(rows) > len(set(rows))
