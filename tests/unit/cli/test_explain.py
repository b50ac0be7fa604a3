"""`hpcsync explain`: what it prints for a run of known times."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from rich.console import Console
from scipy.sparse import csr_array

from hpcsync.cli import explain
from hpcsync.config.errors import JobError
from hpcsync.report import explanation
from hpcsync.report.explanation import Explanation, WhatIf
from hpcsync.report.waiting import Waits
from hpcsync.simulator.what_if import study
from hpcsync.trace.reader import opened
from tests.unit.simulator.runs import simulated
from tests.unit.trace import peer_recorder
from tests.unit.trace.recorder import record, with_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under BSP in which worker 2 takes twice as long as the others."""
    return simulated(tmp_path_factory.mktemp("runs"), {"name": "bsp"}, [0.1, 0.1, 0.2]).path


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_straggler_is_named_with_its_cost(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(run.parent, as_json=False, simulated=True) == 0
    text = said(capsys)
    assert "The run took 8.00 s. Time of all workers: computation 67 %, waiting 33 %." in text
    assert "On average, each other worker waited 4.00 s of 8.00 s for worker 2, " in text
    assert "whose iterations take 2 times the median." in text
    assert "Waiting under BSP: all workers wait for each other in every iteration." in text
    assert "Simulated without stragglers, the run takes 0.50 times as long (slowdown S = 2.00)" in text
    assert "S_w = 2.00" in text
    assert "S_t = 1.00" in text


@pytest.mark.parametrize(
    ("paradigm", "words"),
    [
        ({"name": "local-sgd", "steps": 2}, "all workers wait for each other every 2 iterations"),
        ({"name": "easgd", "synchronous": True, "period": 2}, "all workers wait for each other every 2 iterations"),
        ({"name": "ssp", "staleness": 2}, "a worker more than 2 iterations ahead of the slowest waits for it"),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_waiting_is_told_with_the_options_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], paradigm: dict[str, object], words: str
) -> None:
    trace = simulated(tmp_path, paradigm, [0.1, 0.1, 0.2])
    assert explain.main(trace.path, as_json=False, simulated=False) == 0
    assert f": {words}." in said(capsys)


def test_all_numbers_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(run, as_json=True, simulated=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["duration_s"] == pytest.approx(8.0)
    assert {(each["worker"], each["for"]) for each in found["waits"]} == {(0, 2), (1, 2)}
    assert [each["seconds"] for each in found["waits"]] == pytest.approx([4.0, 4.0])
    assert [worker["caused_s"] for worker in found["workers"]] == pytest.approx([0.0, 0.0, 8.0])
    assert [worker["slowness"] for worker in found["workers"]] == pytest.approx([1.0, 1.0, 2.0])
    assert found["what_if"]["slowdown"] == pytest.approx(2.0)
    assert found["what_if"]["slowdown_by_worker"]["2"] == pytest.approx(2.0)


def test_without_simulations(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(run, as_json=False, simulated=False) == 0
    assert "simulated" not in said(capsys)
    with pytest.raises(JobError, match="^--paradigm: must be left out with --no-what-if, with which nothing is sim"):
        explain.main(run, as_json=False, simulated=False, paradigms=["asp"])


def test_a_run_without_stragglers_blames_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = simulated(tmp_path, {"name": "asp"}, [0.1, 0.2])
    assert explain.main(trace.path, as_json=False, simulated=True) == 0
    text = said(capsys)
    assert "No worker waited for another one to compute." in text
    assert "each other worker waited" not in text
    assert "for the server" not in text


def test_waiting_that_no_worker_has_caused_is_for_the_server(tmp_path: Path) -> None:
    trace = simulated(tmp_path, {"name": "asp"}, [0.1, 0.2])
    pushes = trace.tables["pushes"].copy()
    pushes["wait_s"] = pushes["compute_s"] / 4
    lines = list(explanation.sentences(explanation.explain(with_rows(trace, "pushes", pushes)), None))
    assert lines[0].endswith("Time of all workers: computation 80 %, waiting 20 %.")
    assert lines[1:] == [
        "No worker waited for another one to compute.",
        "20 % of all workers' time was spent waiting for the server (messages under way, or the server busy with "
        "others).",
    ]


def test_transfers_of_another_kind_are_said_to_be_assumed(tmp_path: Path) -> None:
    """All-reduce of four workers would take 2 * 3 / 4 times a gradient over the link, and not that of 2 * 4."""
    network = {"bandwidth_gbit": 0.001}
    trace = simulated(tmp_path, {"name": "bsp"}, [0.1] * 4, network=network)
    others = [{"name": "asp"}, {"name": "allreduce"}]
    lines = [*explanation.sentences(explanation.explain(trace), study(trace, others))]
    assert lines[-1].startswith("Transfers under all-reduce are assumed to take as long as those under BSP, although ")
    lines = [*explanation.sentences(explanation.explain(trace), study(trace, others[:1]))]
    assert "are assumed to take" not in lines[-1], "control: servers as well"
    free = simulated(tmp_path, {"name": "bsp"}, [0.1] * 4)
    lines = [*explanation.sentences(explanation.explain(free), study(free, others))]
    assert "are assumed to take" not in lines[-1], "control: transfers take no time"


def test_what_cannot_be_simulated_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = simulated(tmp_path, {"name": "bsp"}, [0.1, 0.3], stop={"seconds": 0.2})
    assert explain.main(trace.path, as_json=False, simulated=True) == 0
    assert "Not simulated with other times: it has no update." in said(capsys)


def test_a_run_without_an_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = simulated(tmp_path, {"name": "bsp"}, [0.1, 0.1])
    with h5py.File(trace.path, "r+") as file:  # as a kill before the first flush leaves it
        file.attrs["flushed_rows"] = np.zeros_like(file.attrs["flushed_rows"])
    assert explain.main(trace.path, as_json=False, simulated=True) == 0
    assert said(capsys).startswith("The trace has no iterations, so there is nothing to explain.")


def test_a_folder_without_a_trace_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"trace\.h5: no such file$"):
        explain.main(tmp_path, as_json=False, simulated=True)


def test_names_of_hosts_are_no_markup(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(run) as trace:
        found, what_if = explanation.explain(trace), study(trace, [])
    named = found._replace(hosts=("a", "b", "[/red]"))
    Console(width=120).print(explanation.view(named, [], what_if))
    assert "the median in place of worker 2 ([/red])" in said(capsys)


def test_times_between_many_workers_fit_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = simulated(tmp_path, {"name": "bsp"}, [0.01] * 12, jitter=0.2)
    found = explanation.explain(trace)
    assert 0 < found.waits.between_s.tocoo().data.min() < 0.01
    Console(width=80).print(explanation.view(found, [], None))
    shown = capsys.readouterr().out
    assert "(8 of 12 workers)" in shown
    assert "…" not in shown


def test_seconds_have_three_digits_or_all_before_the_point() -> None:
    assert [*map(explanation._seconds, (0.1234, 12.345, 999.4, 999.7, 12_345.6))] == [
        *("0.123 s", "12.3 s", "999 s", "1,000 s", "12,346 s")
    ]


def explained(waited_s: np.ndarray, **fields: object) -> Explanation:
    """Return the explanation of a run of 100 s, in which each worker waits (row) for others (column) or computes."""
    none_s, wait_s = np.zeros(len(waited_s)), waited_s.sum(axis=1)
    parts_s = np.stack([none_s, 100.0 - wait_s, wait_s, none_s], axis=1)
    waits = Waits(csr_array(waited_s), none_s, none_s, none_s, none_s)
    hosts = ("",) * len(waited_s)
    found = Explanation("BSP", "all wait", 100.0, parts_s, none_s, np.ones(len(waited_s)), waits, hosts)
    return found._replace(**fields)


def caused(*seconds: float) -> np.ndarray:
    """Return waiting times that sum to these seconds for each worker; all are those of one other worker."""
    between_s = np.zeros((len(seconds), len(seconds)))
    between_s[0, 1:], between_s[1, 0] = seconds[1:], seconds[0]
    return between_s


def lines_of(capsys: pytest.CaptureFixture[str], found: Explanation, what_if: WhatIf | None = None) -> list[list[str]]:
    """Return the words of each line of the view without its sentences."""
    Console(width=80).print(explanation.view(found, [], what_if))
    return [words for line in capsys.readouterr().out.splitlines() if (words := line.replace("\u2500", "").split())]


def test_the_three_workers_that_cost_most_are_named_and_the_slow_ones_are_said_to_be() -> None:
    found = explained(caused(0.0, 8.0, 20.0, 12.0, 6.0), iteration_s=np.array([1.0, 1.0, 1.3, 1.1, 1.0]))
    assert [line for line in explanation.sentences(found, None) if "each other worker" in line] == [
        "On average, each other worker waited 5.00 s of 100 s for worker 2, whose iterations take 1.3 times the "
        "median.",
        "On average, each other worker waited 3.00 s of 100 s for worker 3.",
        "On average, each other worker waited 2.00 s of 100 s for worker 1.",
    ]
    few = explained(caused(0.0, 3.9, 4.1, 0.0, 0.0))  # of four others
    assert few.culprits == [2], "less than 1 % of the run is not worth a sentence"
    least = list(explanation.sentences(explained(caused(0.0, 3.9, 0.0, 0.0, 0.0)), None))
    assert least[1:] == ["On average, no worker made the others wait for more than 1 % of the run."]


def test_other_waits_are_shares_of_all_time_also_of_that_between_iterations() -> None:
    found = explained(caused(0.0, 0.0), between_s=np.array([100.0, 100.0]))
    waits = found.waits._replace(timed_s=np.array([6.0, 0.0]), unknown_s=np.array([0.0, 3.9]))
    assert [line for line in explanation.sentences(found._replace(waits=waits), None) if "all workers'" in line] == [
        "1.5 % of all workers' time was spent waiting until a time set by the paradigm."
    ]


def test_waiting_times_are_those_between_the_workers_with_most_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    between_s = np.zeros((10, 10))
    between_s[9, 2:9] = 1.0
    head, *rows = lines_of(capsys, explained(between_s))[1:]
    assert head == ["worker", *"23456789"], "worker 9 waits most, and nobody waits for it"
    assert rows == [*([worker] for worker in "2345678"), ["9", *["1.00"] * 7]]
    assert lines_of(capsys, explained(np.zeros((3, 3)))) == []


@pytest.mark.parametrize(("seconds", "said"), [(4321.0, "4,321"), (43.21, "43.2"), (0.04321, "0.0432")])
def test_the_longest_wait_has_three_digits(capsys: pytest.CaptureFixture[str], seconds: float, said: str) -> None:
    assert lines_of(capsys, explained(caused(0.0, seconds)))[2] == ["0", said]


def test_simulations_are_shares_of_the_one_with_the_recorded_times(capsys: pytest.CaptureFixture[str]) -> None:
    what_if = WhatIf(100, 10.0, 8.0, 4.0, {2: 5.0}, {"transfers": 6.4}, 6.0, {"asp": 2.0}, (), ())
    (said,) = explanation._on_stragglers(what_if)
    assert said == (
        "Simulated without stragglers, the run takes 0.50 times as long (slowdown S = 2.00), "
        'with batches by speed (batches.policy = "equal-finish") 0.75, under asp 0.25.'
    )
    lines = [" ".join(words) for words in lines_of(capsys, explained(np.zeros((3, 3))), what_if)]
    assert lines[0] == "The first 100 samples, which took 10.0 s in the run:"
    assert lines[2:] == [
        "the recorded times 8.00 s 1.00",
        "the median in place of every time 4.00 s 0.50 S = 2.00",
        "the median in place of transfers 6.40 s 0.80 S_t = 1.25",
        "the median in place of worker 2 5.00 s 0.62 S_w = 1.60",
        "batches by speed 6.00 s 0.75",
        "asp 2.00 s 0.25",
    ]


def test_the_time_of_a_local_step_is_that_of_loading_and_computing() -> None:
    trace = record("ashl", jitter=0.3)
    pushes = trace.tables["pushes"].copy()
    pushes["load_s"] = 0.5
    assert pushes["local_steps"].max() > 1
    for worker, found_s in enumerate(explanation.explain(with_rows(trace, "pushes", pushes)).iteration_s):
        own = pushes[pushes["worker"] == worker]
        assert found_s == pytest.approx((own["load_s"] + own["compute_s"]).sum() / own["local_steps"].sum())


def test_with_separated_layers_a_worker_is_slow_beside_those_of_the_same_layers() -> None:
    """Worker 0 trains the fully-connected layers, which here take longer than the others."""
    paradigm = {"name": "stanza", "cut": "classifier", "fc_share": 0.8}
    workload = {"name": "timing", "parameters": 10, "classifier": 5, "activations": 1}
    trace = peer_recorder.record(paradigm, (1.0, 1.0, 1.0, 1.5), workload=workload, samples=320)
    found = explanation.explain(trace)
    assert found.iteration_s[0] > 2 * found.iteration_s[3]
    assert found.slowness == pytest.approx(
        found.iteration_s / [found.iteration_s[0], *3 * [np.median(found.iteration_s[1:])]]
    )


def test_a_model_that_arrives_after_the_end_is_no_iteration() -> None:
    trace = peer_recorder.record("push")
    rows = trace.tables["exchanges"]
    assert (rows["batch_size"] == 0).any()
    expected_s = [rows["compute_s"][(rows["worker"] == w) & (rows["batch_size"] > 0)].mean() for w in range(3)]
    assert explanation.explain(trace).iteration_s == pytest.approx(expected_s)


def test_hosts_are_those_of_the_workers_as_last_started() -> None:
    trace = record("asp")
    rank_of_host = [(0, b"server"), (1, b"a"), (2, b"b"), (3, b"c"), (4, b"d"), (0, b"server"), (1, b"x")]
    clocks = np.zeros(len(rank_of_host), trace.tables["clocks"].dtype)  # of a start, and of one with fewer ranks
    clocks["rank"], clocks["host"] = zip(*rank_of_host, strict=True)
    assert explanation.hosts_of(with_rows(trace, "clocks", clocks)) == ("x", "b", "c")
