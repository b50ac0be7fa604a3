"""`hpcsync cite`: BibTeX of a run."""

import dataclasses

from typer.testing import CliRunner

from hpcsync.cli.app import app
from tests.unit.figures.test_figures import write
from tests.unit.trace.recorder import record


def test_cite_prints_an_entry_for_the_paradigm_and_for_the_version_that_ran(tmp_path):
    trace = record("dssp")
    trace = dataclasses.replace(trace, attributes={**trace.attributes, "hpcsync_version": "0.0.7"})
    run = write(tmp_path, trace)
    result = CliRunner().invoke(app, ["cite", str(run)])
    assert result.exit_code == 0 and result.stdout == CliRunner().invoke(app, ["cite", str(run / "trace.h5")]).stdout
    lines = result.stdout.splitlines()
    assert lines[:2] == ["% paradigm dssp", "@inproceedings{zhao2019dynamic,"]
    assert "  note = {Version 0.0.7}," in lines


def test_what_is_no_trace_is_refused_in_one_line(tmp_path):
    result = CliRunner().invoke(app, ["cite", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"hpcsync: {tmp_path}/trace.h5: no such file\n"
