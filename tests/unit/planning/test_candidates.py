"""Candidates of an advice: valid jobs for every number of workers, each once; the best third is kept."""

import pytest

from hpcsync.cli.advice_candidates import label_of
from hpcsync.config.job import Job, default_servers
from hpcsync.paradigms import OPTIONS
from hpcsync.planning.candidates import candidates, kept


@pytest.mark.parametrize("workers", [2, 3, 5, 64])
def test_every_candidate_is_a_job_of_its_own(workers):
    labels = []
    for candidate in candidates(workers, 0.1):
        table = {
            "name": "x",
            "workload": {"name": "linear"},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "stop": {"seconds": 1000.0},
            "paradigm": candidate.paradigm,
            "cluster": {"workers": workers, "servers": default_servers(candidate.paradigm)},
        }
        Job.from_table(table | ({"batches": candidate.batches} if candidate.batches else {}))
        labels.append(label_of(candidate))
    assert len(set(labels)) == len(labels) >= 18
    assert labels[:2] == ["allreduce", "bsp"]


def test_every_paradigm_but_layer_separation_is_a_candidate():
    assert {each.paradigm["name"] for each in candidates(4, 0.1)} >= {
        *OPTIONS.keys() - {"stanza", "k-batch-sync", "k-async"}
    }


def test_the_best_third_is_kept_and_at_least_so_many():
    merits = [(0, float(each)) for each in (5, 1, 4, 2, 3, 0, 6)]
    assert kept(merits, 1) == [5, 1, 3]
    assert kept(merits, 5) == [5, 1, 3, 4, 2]
    assert kept(merits[:2], 5) == [1, 0]
    assert kept([(1, 0.0), (0, 9.0)], 1) == [1]  # one has not arrived
