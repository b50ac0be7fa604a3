"""What a script's optimizers leave to hpcsync; whole runs are in tests/unit/mpi/test_script_optimizers.py."""

from __future__ import annotations

import torch

from hpcsync.training.script_optimizers import unscale


class Scale:
    """Stands for a GradScaler's, in a GPU's memory: to read it is to wait for the GPU."""

    n_read = 0

    def __float__(self) -> float:
        self.n_read += 1
        return 4.0


def test_the_scale_of_a_scaler_is_read_once_for_all_parameters():
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(5)]
    for parameter in parameters[1:]:
        parameter.grad = torch.full((3,), 8.0)
    optimizer = torch.optim.SGD(parameters, 0.1)
    optimizer.grad_scale = scale = Scale()
    unscale(optimizer)
    assert parameters[0].grad is None and all((parameter.grad == 2).all() for parameter in parameters[1:])
    assert scale.n_read == 1
