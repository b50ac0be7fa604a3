"""A paradigm is one file: the job file, `show`, simulation and audit know a module in the folder of paradigms."""

import subprocess
import sys
from pathlib import Path

import pytest

TETHER = '''
"""Tether: SSP by another name, whose slack shrinks with the number of workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpcsync.paradigms.options import Count, OptionError, ParadigmOptions, Whole, computed
from hpcsync.paradigms.ssp import SSP


class Tether(SSP):
    """Bounded staleness."""

    name = "tether"

    def __init__(self, n_workers, *, length, slack):
        super().__init__(n_workers, staleness=length)


@dataclass(frozen=True, kw_only=True)
class TetherOptions(ParadigmOptions):
    """Workers are tied to each other.

    Parameters
    ----------
    length
        Largest lead.
    slack
        Not used.
    """

    name: Literal["tether"] = "tether"
    length: Count
    slack: Whole = computed(lambda given: given["length"] - 1, "`length` - 1")

    policy = Tether
    guarantees = ("lead", "slowest-runs")

    def _check_options(self):
        if self.slack > self.length:
            raise OptionError("paradigm.slack", self.slack, f"must be at most paradigm.length = {self.length}")

    @property
    def lead_bound(self):
        return self.length

    def describe(self, n_workers):
        return f"{n_workers} workers on a tether of {self.length}"

    @property
    def label(self):
        return f"tether of {self.length}"
'''

JOB = """
name = "tethered"

[workload]
name = "linear"
batch_size = 4
samples = 60
features = 5

[optimizer]
name = "sgd"
lr = 0.01

[stop]
updates = 60

[paradigm]
name = "tether"
length = 2

[cluster]
workers = 3
compute = {model = "constant", seconds = [0.01, 0.02, 0.04]}
"""

PROGRAM = """
import sys
import hpcsync.paradigms

hpcsync.paradigms.__path__.append(sys.argv[1])
hpcsync.paradigms.discover()

from hpcsync.cli.app import main

for command in sys.argv[2].split(";"):
    sys.argv = ["hpcsync", *command.split()]
    try:
        main()
    except SystemExit as end:
        print("exit", end.code or 0)
"""


def run(folder: Path, module: str | None, *commands: str) -> str:
    """Return what hpcsync prints for these commands, run with a module added to the folder of paradigms."""
    added = folder / "added"
    added.mkdir()
    if module is not None:
        (added / "tether.py").write_text(module)
    (folder / "job.toml").write_text(JOB)
    arguments = [sys.executable, "-c", PROGRAM, str(added), ";".join(commands)]
    ended = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    return ended.stdout + ended.stderr


def test_a_module_in_the_folder_is_a_paradigm(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        TETHER,
        "show job.toml",
        "simulate job.toml --out run",
        "audit run",
        "show job.toml --set paradigm.lenght=3",
        "show job.toml --set paradigm.length=0",
        "show job.toml --set paradigm.slack=3",
    )
    assert "tether: 3 workers on a tether of 2" in found
    assert 'name = "tether"\nlength = 2\nslack = 1\n' in found, "the resolved job"
    assert "start lead is at most 2" in found and "FAILED" not in found
    assert "paradigm.lenght = 3: unknown key; must be one of name, length, slack; did you mean length?" in found
    assert "paradigm.length = 0: must be at least 1" in found
    assert "paradigm.slack = 3: must be at most paradigm.length = 2" in found
    assert found.count("exit 0") == 3


def test_the_audit_fails_for_one_that_breaks_its_word(tmp_path: Path) -> None:
    broken = TETHER.replace("staleness=length)", "staleness=length + 2)")
    assert broken != TETHER
    found = run(tmp_path, broken, "simulate job.toml --out run", "audit run")
    assert "FAILED" in found and found.count("exit 0") == 1 and "exit 1" in found


@pytest.mark.parametrize("module", [None, TETHER.replace("(ParadigmOptions)", "")], ids=["no file", "no declaration"])
def test_without_a_declaration_it_is_unknown(tmp_path: Path, module: str | None) -> None:
    found = run(tmp_path, module, "show job.toml")
    assert 'paradigm.name = "tether": must be one of bsp, asp, ssp' in found


def test_two_declarations_of_a_name_are_refused(tmp_path: Path) -> None:
    twice = TETHER.replace('"tether"] = "tether"', '"ssp"] = "ssp"')
    assert "declare the paradigm ssp" in run(tmp_path, twice, "show job.toml")
