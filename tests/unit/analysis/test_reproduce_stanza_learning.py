"""The reproduction of what a layout's accuracy is against time: equal learning in other times on other links."""

import numpy as np
from rich.console import Console

from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from hpcsync.workloads.registry import build
from reproductions import stanza_learning
from reproductions.simulating import simulate_all
from reproductions.stanza_learning import IN_PIECES, LINKS, SERVER, job


def test_links_are_those_on_which_the_gradient_takes_so_long():
    asked = job("narrow", "ring", 1.0, 7)
    n_parameters = sum(one.numel() for one in build(asked).model.parameters())
    gradient_s = 4 * n_parameters / (asked.cluster.network.bandwidth_gbit * 1e9 / 8)
    assert abs(gradient_s / stanza_learning.SECONDS / LINKS["narrow"] - 1.0) < 0.01


def test_a_link_changes_times_but_not_what_is_learnt(tmp_path, monkeypatch):
    monkeypatch.setattr(stanza_learning, "WORKLOAD", stanza_learning.WORKLOAD | {"hidden": 16, "samples": 64})
    monkeypatch.setattr(stanza_learning, "SAMPLES", 120)
    methods = (SERVER, IN_PIECES)
    runs = {f"{link}/{method}": job(link, method, 1.0, 7) for link in LINKS for method in methods}
    simulate_all(runs, tmp_path, 1, Console(quiet=True))
    for method in methods:
        narrow, wide = (load(tmp_path / link / method / layout.TRACE).frame("evaluations") for link in LINKS)
        assert np.array_equal(narrow["loss"], wide["loss"])
        assert (narrow["now_s"] > wide["now_s"]).all()
