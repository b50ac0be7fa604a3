"""`hpcsync explain`: what it prints for a run of known times."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from rich.console import Console

from hpcsync.cli import explain
from hpcsync.config.errors import JobError
from hpcsync.report import explanation
from hpcsync.simulator.what_if import study
from hpcsync.trace.reader import opened
from tests.unit.simulator.runs import simulated
from tests.unit.trace.recorder import with_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under BSP in which worker 2 takes twice as long as the others."""
    return simulated(tmp_path_factory.mktemp("runs"), {"name": "bsp"}, [0.1, 0.1, 0.2]).path


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_straggler_is_named_with_its_cost(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(run.parent, as_json=False, simulated=True) == 0
    text = said(capsys)
    assert "The run took 8 s. Time of all workers: computation 67 %, waiting 33 %." in text
    assert "Worker 2 cost each other worker 4 s of 8 s on average; its iterations take 2 times the median." in text
    assert "Waiting under BSP: all workers wait for each other in every iteration." in text
    assert "Without stragglers it would have taken 0.50 of the time (slowdown S = 2.00)" in text
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


def test_a_run_without_stragglers_blames_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = simulated(tmp_path, {"name": "asp"}, [0.1, 0.2])
    assert explain.main(trace.path, as_json=False, simulated=True) == 0
    text = said(capsys)
    assert "No worker waited for another one to compute." in text
    assert "cost each other worker" not in text
    assert "for the server" not in text


def test_waiting_that_no_worker_has_caused_is_for_the_server(tmp_path: Path) -> None:
    trace = simulated(tmp_path, {"name": "asp"}, [0.1, 0.2])
    pushes = trace.tables["pushes"].copy()
    pushes["wait_s"] = pushes["compute_s"] / 4
    lines = list(explanation.sentences(explanation.explain(with_rows(trace, "pushes", pushes)), None))
    assert lines[0].endswith("Time of all workers: computation 80 %, waiting 20 %.")
    assert lines[1:] == [
        "No worker waited for another one to compute.",
        "20 % of all workers' time was waiting for the server (messages under way, or the server busy with others).",
    ]


def test_transfers_of_another_kind_are_said_to_be_assumed(tmp_path: Path) -> None:
    """All-reduce of four workers would take 2 * 3 / 4 times a gradient over the link, and not that of 2 * 4."""
    network = {"bandwidth_gbit": 0.001}
    trace = simulated(tmp_path, {"name": "bsp"}, [0.1] * 4, network=network)
    others = [{"name": "asp"}, {"name": "allreduce"}]
    lines = [*explanation.sentences(explanation.explain(trace), study(trace, others))]
    assert lines[-1].startswith("Transfers under all-reduce are taken to last as long as those under BSP, though ")
    lines = [*explanation.sentences(explanation.explain(trace), study(trace, others[:1]))]
    assert "taken to last" not in lines[-1], "control: servers as well"
    free = simulated(tmp_path, {"name": "bsp"}, [0.1] * 4)
    lines = [*explanation.sentences(explanation.explain(free), study(free, others))]
    assert "taken to last" not in lines[-1], "control: transfers take no time"


def test_what_cannot_be_simulated_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = simulated(tmp_path, {"name": "bsp"}, [0.1, 0.3], stop={"seconds": 0.2})
    assert explain.main(trace.path, as_json=False, simulated=True) == 0
    assert "Not simulated with other times: it has no update." in said(capsys)


def test_a_run_without_an_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = simulated(tmp_path, {"name": "bsp"}, [0.1, 0.1])
    with h5py.File(trace.path, "r+") as file:  # as a kill before the first flush leaves it
        file.attrs["flushed_rows"] = np.zeros_like(file.attrs["flushed_rows"])
    assert explain.main(trace.path, as_json=False, simulated=True) == 0
    assert said(capsys).startswith("No iteration is in the trace, so there is nothing to explain.")


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
