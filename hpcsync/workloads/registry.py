"""What is trained: a model, its data and how it is judged."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job
from hpcsync.config.workloads import Cifar, Digits, Function, Images, Linear, Script, Text, Timing
from hpcsync.training.flat_model import device_of
from hpcsync.training.gradient import Loss
from hpcsync.workloads import cifar, stripes, text
from hpcsync.workloads.vgg import Vgg

Evaluate = Callable[[nn.Module], tuple[float, float]]

EVALUATED_AT_ONCE = 1000  # images, for the memory that their activations take


@dataclass(frozen=True)
class Workload:
    """A model with its data.

    model:    freshly initialised from the job's seed.
    loss:     `loss(model, *batch)`, the mean loss of a batch; None for a workload without arithmetic.
    train:    map-style data set of tuples; None exactly when loss is None.
    evaluate: `evaluate(model) -> (loss, accuracy)` on held-out data, accuracy NaN where there is none; None for nothing
              to evaluate. It moves its data to where the model is (`device_of`); batches are moved for `loss`.
    """

    model: nn.Module
    loss: Loss | None
    train: Dataset[Any] | None
    evaluate: Evaluate | None


def build(job: Job) -> Workload:
    """The job's workload; the same job gives the same initial weights and data, bit for bit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        match job.workload:
            case Digits():
                return _digits()
            case Images() as settings:
                return _images(settings, job.seed)
            case Cifar() as settings:
                return _cifar(settings)
            case Linear() as settings:
                return _linear(settings, job.seed)
            case Text() as settings:
                return _text(settings)
            case Timing() as settings:
                return Workload(_Parameters(settings.parameters), None, None, None)
            case Function() as settings:
                return _from_user(settings)
            case Script():
                raise JobError('workload.name = "script": must be another: start the training script itself')


def import_beside(path: str | Path) -> None:
    """A workload may be a function in a file beside the job, or in the folder that hpcsync was started in."""
    folders = [str(Path(path).parent.resolve()), os.getcwd()]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _from_user(settings: Function) -> Workload:
    name = f"workload.name = {shown(settings.name)}"
    module, _, function = settings.name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise JobError(f"{name}: must name a function that can be imported: {error}") from None
    if not callable(make):
        raise JobError(f"{name}: must name a function")
    try:
        inspect.signature(make).bind(**settings.options)
    except TypeError as error:
        raise JobError(f"workload.options = {shown(settings.options)}: must fit {settings.name}: {error}") from None
    workload = make(**settings.options)
    if not isinstance(workload, Workload):
        raise JobError(f"{name}: must return a hpcsync.workloads.registry.Workload")
    return workload


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def classification(x: torch.Tensor, y: torch.Tensor) -> Evaluate:
    """Mean cross-entropy and accuracy on these samples."""

    def evaluate(model: nn.Module) -> tuple[float, float]:
        model.eval()
        targets = y.to(device_of(model))
        with torch.no_grad():
            logits = torch.cat([model(part) for part in x.to(targets.device).split(EVALUATED_AT_ONCE)])
        loss = functional.cross_entropy(logits, targets)
        return float(loss), float((logits.argmax(1) == targets).double().mean())

    return evaluate


def _digits() -> Workload:
    """scikit-learn's 1797 handwritten digits of 8 x 8 pixels (UCI Optical Recognition of Handwritten Digits), split
    1437 to 360 by a fixed permutation; a convolutional network of 13,706 parameters."""
    package = importlib.util.find_spec("sklearn")  # importing it would take over a second in every process
    assert package is not None and package.origin is not None
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    x = torch.from_numpy(rows[:, :-1].astype(np.float32) / 16.0).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(rows[:, -1].astype(np.int64))
    n_train = 1437
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    train = TensorDataset(x[:n_train], y[:n_train])
    return Workload(model, cross_entropy, train, classification(x[n_train:], y[n_train:]))


def _images(settings: Images, seed: int) -> Workload:
    """Drawn ones, 500 more of which are held out."""
    x, y = stripes.draw(settings.samples + 500, settings.size, seed)
    training, held_out = (slice(settings.samples), slice(settings.samples, None))
    return _vgg(settings, stripes.CLASSES, (x[training], y[training]), (x[held_out], y[held_out]))


def _cifar(settings: Cifar) -> Workload:
    """50,000 images of 32 x 32 pixels to train on and 10,000 to judge by, of 10 or 100 classes; no augmentation."""
    training, test = cifar.read(settings.name, Path(settings.folder))
    return _vgg(settings, cifar.ARCHIVES[settings.name].classes, training, test)


def _vgg(settings: Images | Cifar, classes: int, training: cifar.Samples, held_out: cifar.Samples) -> Workload:
    """Images stay bytes until the model standardises them, by the training data's mean and standard deviation."""
    x, y = training
    mean, std = stripes.mean_and_std(x)
    model = Vgg(
        x.shape[-1],
        classes,
        mean=mean,
        std=std,
        width=settings.width,
        hidden=settings.hidden,
        dropout=settings.dropout,
    )
    return Workload(model, cross_entropy, TensorDataset(x, y), classification(*held_out))


def half_squared_error(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 0.5 * functional.mse_loss(model(x).squeeze(1), y)


def _linear(settings: Linear, seed: int) -> Workload:
    """Least squares in float64: rows of x are standard normal, y = x w* + noise. The optimum is
    `numpy.linalg.lstsq(x, y)`; evaluation reports the loss on the training rows and no accuracy."""
    generator = np.random.default_rng([seed, 1])
    x = torch.from_numpy(generator.standard_normal((settings.samples, settings.features)))
    optimum = torch.from_numpy(generator.standard_normal(settings.features))
    y = x @ optimum + settings.noise * torch.from_numpy(generator.standard_normal(settings.samples))
    model = nn.Linear(settings.features, 1, bias=False, dtype=torch.float64)

    def evaluate(model: nn.Module) -> tuple[float, float]:
        with torch.no_grad():
            return float(half_squared_error(model, x.to(device_of(model)), y.to(device_of(model)))), float("nan")

    return Workload(model, half_squared_error, TensorDataset(x, y), evaluate)


def _text(settings: Text) -> Workload:
    """The source of the running Python's standard library, every tenth file or so held out; a transformer of 248,930
    parameters, unless the job says otherwise. Another version of Python has another text."""
    training, held_out = text.characters()
    context = settings.context
    model = text.Transformer(context, settings.layers, settings.width, settings.heads)
    return Workload(model, text.loss, text.windows(training, context), text.evaluation(held_out, context))


class _Parameters(nn.Module):
    """Numbers that only travel: a matrix as near to square as can be, as most of a model's are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        rows = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
        self.values = nn.Parameter(torch.zeros(rows, size // rows))
