"""`len(sync.shard(...))` is the number of batches that follow, on every worker and under every paradigm."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

import hpcsync
from hpcsync.core.iterations import Iterations
from tests.unit.mpi.test_checkpoints import killed

DATA = TensorDataset(torch.arange(46.0)[:, None], torch.arange(46.0)[:, None])  # 11 batches of 4
PARADIGMS = {
    "bsp": {},
    "asp": {},
    "ssp": {"staleness": 1},
    "easgd": {"period": 2},
    "k-sync": {"k": 1},
    "allreduce": {},
    "local-sgd": {"steps": 2},
    "gossip": {"mode": "push"},
}


def train(comm: MPI.Intracomm, out: Path, paradigm: str, **how: Any) -> tuple[list[int], list[int]]:
    """Return the lengths of loops, and how many batches each had."""
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    lengths, counted = [], []
    with hpcsync.connect(model, sgd, paradigm, comm=comm, out=out, **PARADIGMS[paradigm], **how) as sync:
        for data, batch_size, epochs in ((DATA, 4, 1), (DataLoader(DATA, 4, shuffle=True), None, 2), (DATA, 4, 3)):
            batches = sync.shard(data, batch_size, epochs)
            lengths.append(len(batches))
            counted.append(0)
            for x, y in batches:
                assert len(batches) == lengths[-1], "it stays"
                sgd.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                sync.step()
                counted[-1] += 1
    return lengths, counted


@pytest.mark.once
@pytest.mark.parametrize("paradigm", PARADIGMS)
@pytest.mark.parametrize("forgets", [False, True], ids=["", "as-one-process"])
def test_a_loop_has_as_many_batches_as_its_length(comm, only, folder, monkeypatch, paradigm, forgets):
    """The control: the length of the whole data set."""
    only(3)
    if forgets:
        monkeypatch.setattr(Iterations, "_n_batches", lambda self, asked, number: 11 * asked.epochs)
    lengths, counted = train(comm, folder / "a", paradigm)
    assert (lengths == counted) != forgets or (forgets and counted == [0, 0, 0])
    if comm.rank == 0 and paradigm in ("bsp", "asp", "ssp", "easgd", "k-sync") and not forgets:
        assert lengths == [0, 0, 0], "a server has none"


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_a_resumed_loop_is_as_long_as_what_is_left_of_it(comm, only, folder, paradigm):
    only(3)
    how = {"checkpoint": {"updates": 9, "keep": 9}}
    whole = train(comm, folder / "a", paradigm, **how)
    lengths, counted = train(comm, killed(comm, folder / "a"), paradigm, resume=True, **how)
    assert lengths == counted
    assert sum(counted) < sum(whole[1]) or not sum(counted)


class Stream(IterableDataset[Any]):
    """Samples that are read from the beginning."""

    def __iter__(self) -> Any:
        return iter(range(8))


@pytest.mark.once
def test_a_length_that_is_not_known_is_a_type_error(comm, only, folder):
    only(2)
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    sampled = DataLoader(DATA, 4, sampler=WeightedRandomSampler(torch.ones(46), 20))
    with hpcsync.connect(model, sgd, "allreduce", comm=comm, out=folder / "a") as sync:
        for given, said in (
            ((DATA, 4, None), "epochs = None"),
            ((Stream(), 4), "only reading tells"),
            ((sampled,), "only"),
        ):
            with pytest.raises(TypeError, match=said) as refused:
                len(sync.shard(*given))
            assert "\n" not in str(refused.value)
    divided = {"batches": {"policy": "equal-finish", "total": 8, "predictor": "last"}}
    with hpcsync.connect(model, sgd, "allreduce", comm=comm, out=folder / "b", **divided) as sync:
        assert sync.shard(DATA, 4), "it is not empty for all that"
        with pytest.raises(TypeError, match="batches are allocated"):
            len(sync.shard(DATA, 4))


def drawn(
    comm: MPI.Intracomm, out: Path, paradigm: str, way: str, epochs: int = 3, left: bool = False, **how: Any
) -> list[list[int]]:
    """Return the samples of each training epoch, and of a loop after the run; `left`: loops end after two batches."""
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    found: list[list[int]] = []
    with hpcsync.connect(model, sgd, paradigm, comm=comm, out=out, **PARADIGMS[paradigm], **how) as sync:
        loader = DataLoader(DATA, 4, shuffle=True)
        batches = sync.shard(loader)
        for epoch in range(epochs):
            if way == "calls" and epoch:
                batches = sync.shard(loader)
            found.append([])
            iterator = iter(batches)
            for x, y in islice(iterator, len(batches)) if way == "counted" else iterator:
                sgd.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                sync.step()
                found[-1] += x.flatten().int().tolist()
                if left and len(found[-1]) == 8:
                    break
    return [*found, list(batches)]


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_one_object_has_the_batches_of_every_training_epoch(comm, only, folder, paradigm):
    """Libraries such as the Trainers of Lightning and transformers loop over one; some do not ask for a batch more."""
    only(3)
    expected = drawn(comm, folder / "a", paradigm, "calls")
    n_batches = sum(map(len, comm.allgather([x for epoch in expected for x in epoch]))) // 4
    assert n_batches == 3 * 11 and expected[-1] == []
    for way in ("ended", "counted"):
        assert drawn(comm, folder / way, paradigm, way) == expected
    left = drawn(comm, folder / "left-calls", paradigm, "calls", left=True)
    assert left[:-1] == [epoch[:8] for epoch in expected[:-1]]
    assert drawn(comm, folder / "left", paradigm, "ended", left=True)[:-1] == left[:-1]
    stopped = drawn(comm, folder / "stopped", paradigm, "ended", stop={"samples": 24})
    assert comm.rank < (paradigm == "bsp") or (stopped[0] and not any(stopped[1:]))


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_one_object_has_what_is_left_when_the_run_resumes(comm, only, folder, paradigm):
    only(3)
    how = {"epochs": 8, "checkpoint": {"updates": 2, "keep": 99}}  # the first one comes some updates later
    whole = drawn(comm, folder / "a", paradigm, "ended", **how)
    left = drawn(comm, killed(comm, folder / "a"), paradigm, "ended", resume=True, **how)
    assert (left[-2] == whole[-2] and 0 < sum(map(len, left)) < sum(map(len, whole))) or not any(whole)
    assert all(mine == its[len(its) - len(mine) :] for mine, its in zip(left, whole, strict=True))


@pytest.mark.once
@pytest.mark.parametrize("iterator", [False, True], ids=["endless", "iterator"])
def test_what_has_no_training_epochs_continues_where_a_loop_was_left(comm, only, folder, iterator):
    only(2)
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    found: list[Any] = []
    with hpcsync.connect(model, sgd, "allreduce", comm=comm, out=folder / "a") as sync:
        batches = sync.shard(iter(range(99)), 1) if iterator else sync.shard(range(44), 4, None)
        found += next(batches).tolist()
        for _ in range(2):
            for _, batch in zip(range(2), batches, strict=False):
                model(torch.ones(1)).sum().backward()
                sync.step()
                found += batch.tolist()
    assert len(found) == len({*found}) == (5 if iterator else 20)
    assert not iterator or found == [*range(comm.rank, 10, 2)]


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
@pytest.mark.parametrize("part", [False, True])
def test_data_of_which_each_worker_has_another_part_are_said_to_differ(comm, only, folder, paradigm, part, capsys):
    """Each worker uses its share of its part: half of the samples are left out."""
    only(3)
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    mine = Subset(DATA, range((comm.rank % 2) * part, 46, 2))
    with hpcsync.connect(model, sgd, paradigm, comm=comm, out=folder / "a") as sync:
        for x, y in sync.shard(DataLoader(mine, 2, shuffle=True)):
            sgd.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            sync.step()
    if comm.rank == 0:
        assert ("the workers have read different data" in capsys.readouterr().err) == part


@pytest.mark.once
def test_workers_that_begin_endless_data_again_at_other_times_read_the_same(comm, only, folder, capsys):
    only(3)
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    with hpcsync.connect(model, sgd, "asp", comm=comm, out=folder / "a") as sync:
        few, many = sync.shard(DataLoader(Subset(DATA, range(8)), 4), epochs=None), sync.shard(DataLoader(DATA, 4))
        for _, (x, y) in islice(zip(few, many, strict=False), 2 + 3 * comm.rank):
            sgd.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            sgd.step()
    assert "different data" not in capsys.readouterr().err


@pytest.mark.once
@pytest.mark.parametrize(("name", "n_steps", "n_lost"), [("easgd", 3, 8), ("easgd", 4, 0), ("async-diloco", 3, 0)])
def test_samples_that_no_push_contains_are_said(comm, only, folder, name, n_steps, n_lost, capsys):
    """The last step of each worker, where a worker that leaves does not push it."""
    only(3)
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    options = {"period" if name == "easgd" else "steps": 2}
    with hpcsync.connect(model, sgd, name, **options, comm=comm, out=folder / "a") as sync:
        for x, y in islice(sync.shard(DataLoader(DATA, 4)), n_steps):
            sgd.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            sgd.step()
    if comm.rank == 0:
        said = f"{n_lost} samples of the last steps are in no push: workers push every 2 steps"
        assert (said in capsys.readouterr().err) == (n_lost > 0)


def endlessly(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
@pytest.mark.parametrize("how", [iter, endlessly])
@pytest.mark.parametrize("stops", [False, True])
def test_loops_may_draw_each_batch_by_next(comm, only, folder, paradigm, how, stops, capsys):
    """On servers it finds none, and on workers none after the end of the run: this ends the block."""
    only(3)
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    n_steps, stop = 0, {"samples": 24} if stops else {}
    with hpcsync.connect(model, sgd, paradigm, comm=comm, out=folder / "a", stop=stop) as sync:
        batches = how(sync.shard(DataLoader(DATA, 4, shuffle=True), epochs=9 if how is iter else 1))
        for _ in range(5):
            x, y = next(batches)
            sgd.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            sgd.step()
            n_steps += 1
    expected = 24 // 4 // sync.n_workers if stops else 5
    assert n_steps == (0 if sync.worker is None else expected)
    if comm.rank == 0:
        assert ("the with block ended in line" in capsys.readouterr().err) == stops
    with pytest.raises(StopIteration), hpcsync.connect(model, sgd, comm=comm.Split(comm.rank)):
        next(iter([]))  # this says nothing of a run
