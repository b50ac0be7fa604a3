"""Simulated runs of small jobs with separated layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from hpcsync.config.job import Job
from hpcsync.simulator.simulate import prepare
from hpcsync.workloads.registry import Workload, build, half_squared_error
from tests.unit.jobs import make_job
from tests.unit.recorder import Recorder

LR = 0.1
NESTEROV = {"name": "sgd", "lr": LR, "momentum": 0.9, "nesterov": True}
GBIT, LATENCY_S = 125e6, 1e-3
NETWORK = {"bandwidth_gbit": 1.0, "latency_us": 1e6 * LATENCY_S}
TIMING = {"name": "timing", "batch_size": 8, "parameters": 3_000_000, "classifier": 1_000_000, "activations": 50_000}
FC_SHARE = 0.2
ALEXNET = {"name": "timing", "batch_size": 128, "activations": 9216, "classifier": 58_631_144}
ALEXNET |= {"parameters": 2_469_696 + ALEXNET["classifier"]}


def separated(n_convolution: int, n_fc: int, *, pieces: int = 1, cluster: Any = (), **tables: Any) -> Job:
    options = {"cut": "classifier", "fc_workers": n_fc, "fc_share": FC_SHARE, "micro_batches": pieces}
    compute = {"compute": {"model": "constant", "seconds": tables.pop("seconds", 1.0)}}
    return make_job(
        **{
            "paradigm": {"name": "stanza", **options, **tables.pop("options", {})},
            "optimizer": NESTEROV,
            "stop": {"updates": 6},
            "cluster": {"workers": n_convolution + n_fc, **compute, **dict(cluster)},
            **tables,
        }
    )


class Net(nn.Module):
    def __init__(self, *, noisy: bool, dtype: torch.dtype) -> None:
        super().__init__()
        norm, dropout = (nn.BatchNorm1d(6), nn.Dropout(0.3)) if noisy else (nn.Identity(), nn.Identity())
        self.features = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), norm, nn.Linear(6, 4))
        self.classifier = nn.Sequential(nn.Tanh(), dropout, nn.Linear(4, 1))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def workload(job: Job, *, noisy: bool = False, dtype: torch.dtype = torch.float64) -> Workload:
    torch.manual_seed(job.seed)
    linear, net = build(job), Net(noisy=noisy, dtype=dtype)
    linear.train.tensors = tuple(tensor.to(dtype) for tensor in linear.train.tensors)
    return Workload(net, half_squared_error, linear.train, None if noisy else linear.evaluate)


class Run:
    def __init__(self, job: Job, training: Workload | None = None) -> None:
        self.workload = training or Workload(nn.Linear(1, 1), None, None, None)  # a placeholder without arithmetic
        self.trace = Recorder()
        self.simulation: Any = prepare(job, self.workload)(self.trace)
        self.simulation.run()

    @property
    def weights(self) -> np.ndarray:
        return flat(self.workload.model)

    def iteration_s(self) -> float:
        """Return the duration of the iterations, which are all equally long."""
        took = np.diff(self.trace.array("updates")["now_s"])
        assert np.allclose(took, took[0], rtol=1e-9)
        return float(took[0])


def flat(model: nn.Module) -> np.ndarray:
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


def trained(job: Job) -> np.ndarray:
    return Run(job, workload(job)).weights
