"""Garbage collection at the end of a process, in separate processes: none, unless nanobind would complain."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDS = {
    "the command line": "import sys\nfrom hpcsync.cli.app import main\nsys.argv = ['hpcsync', '--version']\nmain()\n",
    "a script": "from hpcsync.system.garbage import freeze\nfreeze()\n",
    "a script twice": "from hpcsync.system.garbage import freeze\nfreeze()\nfreeze()\n",
    "what was loaded": "from hpcsync.system.garbage import loading\nwith loading(): pass\n",
    "a rank": "import sys\nfrom hpcsync.cli.app import main\nfrom hpcsync.system.garbage import freeze\nfreeze()\n"
    "sys.argv = ['hpcsync', '--version']\nmain()\n",
}
KEPT = """
class Kept:
    def __del__(self):
        print("collected")
kept = Kept()
kept.itself = kept
"""
# What modules made with nanobind have: the type of their types. (None is installed beside the torch that is pinned.)
NANOBIND = "kind = type('nb_meta', (type,), {'__module__': 'nanobind'})\n"


def ended(code: str) -> str:
    """Run a process; return its output, which must not contain a complaint."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return result.stdout


@pytest.mark.parametrize("end", ENDS)
def test_objects_are_collected_if_nanobind_is_loaded(end: str) -> None:
    assert "collected" in ended(KEPT + NANOBIND + ENDS[end])


@pytest.mark.parametrize("end", ENDS)
def test_objects_are_not_collected_otherwise(end: str) -> None:
    """A collection over torch takes a third of a second, or more, on every rank."""
    assert "collected" not in ended(KEPT + ENDS[end])


@pytest.mark.parametrize("end", ENDS)
def test_triton_does_not_complain(end: str) -> None:
    """Triton is loaded as torch for CUDA loads it."""
    pytest.importorskip("triton")
    ended("import torch._dynamo\n" + ENDS[end])


def test_nothing_is_collected_while_modules_are_loaded() -> None:
    """Nor later what they have made; what is made afterwards is."""
    code = "from hpcsync.system.garbage import loading\nimport gc\nwith loading():\n" + "".join(
        f"    {line}\n" for line in [*KEPT.splitlines(), "del kept", "others = [[] for _ in range(10**5)]"]
    )
    made = "kept = Kept(); kept.itself = kept; del kept\n"
    assert ended(f"{code}gc.collect()\nprint('loaded', flush=True)\n{made}gc.collect()\n") == "loaded\ncollected\n"
