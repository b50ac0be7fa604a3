"""Candidates of an advice: valid jobs for every number of workers, each once; the best third is kept."""

import pytest

from hpcsync.cli.advice_candidates import candidate, label_of, needs_no_options
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.config.overrides import default_servers
from hpcsync.paradigms import OPTIONS
from hpcsync.planning.candidates import COMPRESSED, candidates, kept


@pytest.mark.parametrize("workers", [2, 3, 5, 64])
def test_every_candidate_is_a_job_of_its_own(workers):
    labels = []
    for each in candidates(workers, 0.1, link_share=1.0):
        table = {
            "name": "x",
            "workload": {"name": "linear"},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "stop": {"seconds": 1000.0},
            "paradigm": each.paradigm,
            "cluster": {"workers": workers, "servers": default_servers(each.paradigm)},
        }
        added = {"batches": each.batches, "compression": each.compression}
        Job.from_table(table | {key: given for key, given in added.items() if given})
        labels.append(label_of(each))
    assert len(set(labels)) == len(labels) >= 18
    assert labels[:2] == ["allreduce", "bsp"]


def test_every_paradigm_that_is_not_listed_is_tried_with_its_defaults_if_it_needs_no_options():
    listed = candidates(4, 0.1, 0.0)
    of_both = candidates(4, 0.1, 0.0, ["bsp", "tether"])
    assert [label_of(each) for each in of_both] == [*map(label_of, listed), "tether"]
    lacking = OPTIONS.keys() - {each.paradigm["name"] for each in listed}
    assert {name for name in lacking if not needs_no_options(name)} == {"stanza", "k-batch-sync", "k-async"}
    assert needs_no_options("asp") and not needs_no_options("ssp")


def test_options_follow_from_the_number_of_workers_and_the_time_of_an_iteration():
    of = {
        name: [each.paradigm.get(key) for each in candidates(6, 0.1, 0.0) if each.paradigm["name"] == name]
        for name, key in (("k-sync", "k"), ("k-batch-async", "k"), ("local-sgd", "steps"), ("adsp", "check_period_s"))
    }
    assert of == {"k-sync": [3, 5, "throughput"], "k-batch-async": [6], "local-sgd": [4, 16], "adsp": [5.0]}
    of_two = [each.paradigm["k"] for each in candidates(2, 0.1, 0.0) if each.paradigm["name"] == "k-sync"]
    assert of_two == [1, "throughput"]


def test_pushes_are_compressed_where_links_take_long_enough():
    n_compressed = {
        share: sum(bool(each.compression) for each in candidates(4, 0.1, share)) for share in (0.0, 0.09, 0.1, 0.9)
    }
    assert n_compressed == {0.0: 0, 0.09: 0, 0.1: len(COMPRESSED), 0.9: len(COMPRESSED)}


def test_a_label_is_the_option_that_asks_for_the_candidate():
    for each in candidates(4, 0.1, link_share=1.0):
        if len(each.paradigm) == 1:
            again = candidate(label_of(each))
            assert (again.paradigm, again.batches, again.compression) == (each.paradigm, each.batches, each.compression)
    both = candidate("bsp + batches by speed + top-k")
    assert both.batches and both.compression == {"name": "top-k"}
    with pytest.raises(JobError, match="must have batches by speed and a codec once at most"):
        candidate("bsp + top-k + fp16")


def test_the_best_third_is_kept_and_at_least_so_many():
    merits = [(0, float(each)) for each in (5, 1, 4, 2, 3, 0, 6)]
    assert kept(merits, 1) == [5, 1, 3]
    assert kept(merits, 5) == [5, 1, 3, 4, 2]
    assert kept(merits[:2], 5) == [1, 0]
    assert kept([(1, 0.0), (0, 9.0)], 1) == [1]  # one has not arrived
