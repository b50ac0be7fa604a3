"""The kernels of the meta device are loaded when they are asked for. Each case is a process of its own."""

from __future__ import annotations

import subprocess
import sys

import torch

DEFER = "from hpcsync.training.deferred_meta import defer, restore; defer()\n"
LOADED = "print([name in sys.modules for name in ('torch._refs', 'torch._decomp', 'torch._prims')])\n"
SHAPE = "print(tuple(torch.empty(3, 4, device='meta').kthvalue(2).values.shape))\n"


def output(code: str, status: int = 0) -> str:
    found = subprocess.run([sys.executable, "-c", "import sys\n" + code], capture_output=True, text=True)
    assert found.returncode == status, found.stderr
    return found.stdout + found.stderr


def test_training_loads_nothing_of_them_and_the_meta_device_works_once_they_are_restored() -> None:
    step = """
import torch
from torch import nn
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
torch.nn.functional.cross_entropy(model(torch.ones(5, 1, 4, 4)), torch.arange(5) % 3).backward()
"""
    found = output(DEFER + step + LOADED + "restore(); restore()\n" + LOADED + SHAPE + "torch._meta_registrations.aten")
    assert found.splitlines() == ["[False, False, False]", "[True, True, True]", "(3,)"]


def test_without_restoring_them_it_would_not() -> None:
    assert "NotImplementedError" in output(DEFER + "import torch\n" + SHAPE, status=1)


def test_asking_for_a_name_of_them_loads_them() -> None:
    assert output(DEFER + "import torch\nfrom torch._meta_registrations import aten\n" + SHAPE) == "(3,)\n"
    assert output("import torch\n" + DEFER + SHAPE) == "(3,)\n"


def test_workloads_can_make_generators_without_the_kernels() -> None:
    make = "import torch; torch.Generator(); print('torch._refs' in sys.modules)"
    assert output(DEFER + "import hpcsync.workloads.registry\n" + make) == "False\n"
    needs_metaclass = hasattr(torch._C, "_set_generator_metaclass")  # not in every version of torch
    assert ("RuntimeError" in output(DEFER + make, status=int(needs_metaclass))) == needs_metaclass
