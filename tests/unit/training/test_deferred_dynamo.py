"""The compiler is loaded when it is used, and only then. Each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MODEL = "import sys, torch\nmodel = torch.nn.Linear(4, 2)\n"
DEFER = "from hpcsync.training.deferred_dynamo import defer; defer()\n"
STEP = """
optimizer = torch.optim.{}(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
"""
LOADED = "print('torch._dynamo.symbolic_convert' in sys.modules)\n"


def output(code: str, **environ: str) -> str:
    environ = {**os.environ, **environ}
    argv = [sys.executable, "-c", code]
    return subprocess.run(argv, check=True, capture_output=True, text=True, env=environ).stdout.strip()


def test_an_optimizer_does_not_load_it_and_what_uses_the_compiler_gets_it() -> None:
    """A compiled function and a compiled step, after and before plain steps; and a module that is loaded stays."""
    use = "torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(2))\n"
    use += "torch.compile(optimizer.step, backend='eager')()\n"
    again = "from torch._dynamo import reset; reset()\n" + DEFER + STEP.format("SGD")
    plain = STEP.format("AdamW") + STEP.format("SGD") + LOADED
    assert output(MODEL + DEFER + plain + use + again + LOADED) == "False\nTrue"


@pytest.mark.parametrize(("environ", "loads"), [({"OMPI_COMM_WORLD_SIZE": "2"}, "False"), ({}, "True")])
def test_on_a_rank_importing_hpcsync_suffices(environ: dict[str, str], loads: str) -> None:
    """Without it, which is the control, the optimizer loads the compiler."""
    assert output(MODEL + "import hpcsync\n" + LOADED + STEP.format("SGD") + LOADED, **environ) == f"False\n{loads}"
