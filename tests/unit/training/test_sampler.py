"""The data order: every batch once, in the same order for any workers."""

import itertools
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from hpcsync.training.sampler import batch_indices, batches, fetch, n_batches, sequence_indices


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def shares(size, n_workers, batch_size, epochs=range(1), seed=0) -> list[list[list[int]]]:
    """Return each worker's batches as lists of samples."""
    return [
        [
            x.tolist()
            for (x,) in batches(numbers(size), seed, worker, n_workers=n_workers, batch_size=batch_size, epochs=epochs)
        ]
        for worker in range(n_workers)
    ]


SHAPES = list(itertools.product((1, 2, 3, 5), (1, 4, 7), (7, 28, 61, 100)))


@pytest.mark.parametrize(("n_workers", "batch_size", "size"), SHAPES)
def test_together_the_workers_use_every_whole_batch_once(n_workers, batch_size, size):
    each = shares(size, n_workers, batch_size, range(2, 4))
    options = {"n_workers": n_workers, "batch_size": batch_size, "size": size, "epochs": range(2, 4)}
    assert [n_batches(worker, **options) for worker in range(n_workers)] == [len(share) for share in each]
    found = [batch for share in shares(size, n_workers, batch_size, range(2, 3)) for batch in share]
    samples = sorted(itertools.chain(*found))
    assert len(found) == size // batch_size
    assert {len(batch) for batch in found} == {batch_size}
    assert len(set(samples)) == len(samples) == size // batch_size * batch_size
    assert set(samples) <= set(range(size))


@pytest.mark.parametrize(("n_workers", "batch_size"), [(2, 4), (3, 5), (5, 2)])
def test_iteration_i_of_all_workers_is_batch_i_of_one_process(n_workers, batch_size):
    size = 2 * n_workers * batch_size  # whole batches for both, or the last ones would differ
    rounds = list(zip(*shares(size, n_workers, batch_size, range(3)), strict=True))
    (alone,) = shares(size, 1, n_workers * batch_size, range(3))
    assert [list(itertools.chain(*parts)) for parts in rounds] == alone
    (other_seed,) = shares(size, 1, n_workers * batch_size, range(3), seed=1)
    assert other_seed != alone


def test_workers_continue_where_the_last_training_epoch_ended():
    # 5 batches a training epoch for 2 workers: who begins alternates.
    in_two = [
        first + second
        for first, second in zip(shares(23, 2, 4, range(0, 1)), shares(23, 2, 4, range(1, 4)), strict=True)
    ]
    assert in_two == shares(23, 2, 4, range(4))
    assert [len(share) for share in shares(23, 2, 4, range(0, 1))] == [3, 2]
    assert [len(share) for share in shares(23, 2, 4, range(1, 2))] == [2, 3]


def test_training_epochs_differ_and_seeds_differ():
    orders = [shares(40, 1, 4, range(epoch, epoch + 1), seed)[0] for epoch in range(3) for seed in range(3)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_the_order_is_a_function_of_seed_and_number():
    forwards = [batch_indices(7, j, batch_size=3, size=20).tolist() for j in range(30)]
    backwards = [batch_indices(7, j, batch_size=3, size=20).tolist() for j in reversed(range(30))]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize("worker", range(4))
def test_a_worker_s_batches_are_every_nth_from_anywhere_without_end(worker):
    endless = batches(numbers(23), 7, worker, n_workers=4, batch_size=4, epochs=range(3, sys.maxsize))
    numbered = [j for j in range(3 * 5, 3 * 5 + 40) if j % 4 == worker]
    found = [x.tolist() for (x,) in itertools.islice(endless, 10)]
    assert found == [batch_indices(7, j, batch_size=4, size=23).tolist() for j in numbered]


def test_no_training_epochs_are_no_batches():
    assert shares(40, 2, 4, range(0)) == [[], []]


@pytest.mark.parametrize("batch_size", [0, 8])
def test_a_batch_that_the_data_set_cannot_fill_is_refused(batch_size):
    message = f"batch_size = {batch_size}: must be 1 to 7, the samples of the data set"
    with pytest.raises(ValueError, match=message):
        next(batches(numbers(7), 0, 0, n_workers=1, batch_size=batch_size, epochs=range(1)), None)
    with pytest.raises(ValueError, match=message):
        batch_indices(0, 0, batch_size=batch_size, size=7)


def test_no_training_epoch_draws_from_the_stream_of_a_workers_times():
    # A generator seeded with [seed, 2] is that of [seed, 2, 0].
    orders = {batch_indices(3, epoch, batch_size=20, size=20).tobytes() for epoch in range(5)}
    for words in ([3, 1], [3, 2, 0], [3, 2, 1]):
        assert np.random.default_rng(words).permutation(20).tobytes() not in orders


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        assert type(index) is int
        return {"x": torch.tensor([float(index)]), "y": index**2}


def test_other_data_sets_are_collated_as_pytorch_does():
    batch = fetch(Squares(), np.array([3, 1]))
    assert batch["x"].tolist() == [[3.0], [1.0]]
    assert batch["y"].tolist() == [9, 1]


def test_a_tensor_data_set_gives_rows_of_every_tensor():
    x, y = fetch(TensorDataset(torch.arange(6.0).view(3, 2), torch.tensor([5, 6, 7])), np.array([2, 0]))
    assert x.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert y.tolist() == [7, 5]


# ---- one sequence ----


@pytest.mark.parametrize("sizes", [[23], [1] * 30, [5, 11, 2, 40, 7], [100]], ids=str)
def test_pieces_of_the_sequence_are_one_sequence_whatever_their_sizes(sizes):
    """Sequences across the ends of one or several training epochs."""
    ends = np.cumsum([0, *sizes])
    pieces = [sequence_indices(7, first, n, size=23).tolist() for first, n in zip(ends, sizes, strict=False)]
    assert [len(piece) for piece in pieces] == sizes
    together = list(itertools.chain(*pieces))
    assert together == sequence_indices(7, 0, sum(sizes), size=23).tolist()
    for training_epoch in range(sum(sizes) // 23):
        assert sorted(together[23 * training_epoch : 23 * (training_epoch + 1)]) == list(range(23))


def test_its_training_epochs_are_those_of_equal_batches():
    """Equal batches, which omit the remainder of a training epoch."""
    equal = [batch_indices(7, batch, batch_size=5, size=23) for batch in range(4, 8)]
    assert np.concatenate(equal).tolist() == sequence_indices(7, 23, 20, size=23).tolist()
    assert sequence_indices(8, 23, 20, size=23).tolist() != sequence_indices(7, 23, 20, size=23).tolist()
