"""Nothing in a file of a run reaches the terminal as a control character."""

import dataclasses

import numpy as np
import pytest
from typer.testing import CliRunner

from hpcsync.cli.app import app
from hpcsync.config import errors
from hpcsync.report import citations, live
from hpcsync.trace import reader
from tests.unit.figures.test_figures import write
from tests.unit.trace.recorder import record, with_rows

ESCAPE = "\x1b[31m\x07"
TEXTS = ("engine", "hpcsync_version", "git_commit", "mpi_library", "command", "created", "python_version", "hosts")
COMMANDS = (
    ("audit", "{run}"),
    ("explain", "{run}"),
    ("cite", "{run}"),
    ("report", "{run}", "-o", "{run}/report.html"),
    ("compare", "{run}", "{run}2"),
    ("export", "{run}", "--format", "csv", "--out", "{run}/out.csv"),
    ("figure", "waiting", "{run}", "{run}2", "--out", "{run}/waiting.svg"),
    ("watch", "{run}", "--once"),
    ("watch", "{run}", "--once", "--json"),
)


@pytest.fixture
def run(tmp_path):
    """A folder of a run whose trace and status have control characters in every text."""
    trace = record("bsp")
    trace = dataclasses.replace(trace, attributes={**trace.attributes, **dict.fromkeys(TEXTS, ESCAPE)})
    clocks = np.zeros(4, trace.tables["clocks"].dtype)
    clocks["rank"], clocks["host"] = range(4), ESCAPE
    run = write(tmp_path, with_rows(trace, "clocks", clocks))
    write(tmp_path, record("asp"), "run2")
    workers = live.Workers.model_construct(
        **{name: ((ESCAPE,) if name in ("host", "state") else (0,)) for name in live.Workers.model_fields}
    )
    decision = live.Decision.model_construct(controller=ESCAPE, worker=0, chosen=1.0, now_s=0.5, inputs={ESCAPE: 1.0})
    status = live.Status.model_construct(
        name=ESCAPE, paradigm=ESCAPE, n_servers=1, status="running", written_s=0.0, every_s=1.0, now_s=1.0, updates=1,
        samples=1, samples_per_s=1.0, loss=None, accuracy=None, target=ESCAPE, share=None, left_s=None, lead_bound=None,
        bound=ESCAPE, stalls=(), workers=workers,
        decisions=(decision,),
    )  # fmt: skip
    (run / "status.json").write_text(status.model_dump_json())
    return run


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_control_character_is_printed(run, command):
    result = CliRunner().invoke(app, [part.format(run=run) for part in command])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not controls(result.stdout + result.stderr)
    assert result.exit_code in (0, 1)


def controls(text):
    return {c for c in text if not c.isprintable() and c != "\n"}


def test_without_the_escapes_they_are_printed(run, monkeypatch):
    for module in (reader, citations):
        monkeypatch.setattr(module, "printable", lambda text: text)
    result = CliRunner().invoke(app, ["cite", str(run)])
    assert controls(result.stdout), "the control"
    assert errors.printable(ESCAPE) == r"\x1b[31m\x07"
