"""Roles of ranks, and shards of servers."""

import itertools

import numpy as np
import pytest

from hpcsync.core.roles import Roles

SPLITS = list(itertools.product((1, 2, 3, 7), (1, 2, 5)))


@pytest.mark.parametrize(("n_servers", "n_workers"), SPLITS)
def test_every_rank_has_one_role(n_servers, n_workers):
    roles = Roles(n_servers, n_workers)
    ranks = range(roles.n_ranks)
    assert len(ranks) == n_servers + n_workers
    assert [rank for rank in ranks if roles.is_server(rank)] == list(range(n_servers))
    assert [roles.worker(rank) for rank in ranks if not roles.is_server(rank)] == list(range(n_workers))
    assert [roles.worker(roles.rank_of(worker)) for worker in range(n_workers)] == list(range(n_workers))


def test_ranks_are_named_after_their_roles():
    assert list(map(Roles(2, 3).name, range(5))) == ["server-0", "server-1", "worker-0", "worker-1", "worker-2"]


def test_the_evaluator_is_on_rank_0_and_comes_after_the_workers():
    roles = Roles(2, 3)
    assert roles.rank_of(roles.evaluator) == 0
    assert roles.evaluator == 3


@pytest.mark.parametrize("size", [7, 8, 100, 101, 25_000_001])
@pytest.mark.parametrize("n_servers", [1, 2, 3, 7])
def test_shards_are_contiguous_even_and_cover_everything(n_servers, size):
    shards = Roles(n_servers, 1).shards(size)
    assert len(shards) == n_servers
    edges = [0, *(shard.stop for shard in shards)]
    assert [shard.start for shard in shards] == edges[:-1]
    assert edges[-1] == size
    assert np.ptp(np.diff(edges)) == (size % n_servers != 0)
    assert min(np.diff(edges)) >= 1
