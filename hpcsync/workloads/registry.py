"""Workloads of a job: a model, its data and its evaluation."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import reprlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job
from hpcsync.config.user_code import not_importable, raised
from hpcsync.config.workloads import Cifar, Digits, Function, Images, Linear, Script, Text, Timing
from hpcsync.training.flat_model import device_of
from hpcsync.training.gradient import Loss
from hpcsync.workloads import cifar, stripes, text
from hpcsync.workloads.vgg import Vgg

Evaluate = Callable[[nn.Module], tuple[float, float]]

EVALUATED_AT_ONCE = 1000  # images of a pass, which bounds the memory of their activations


@dataclass(frozen=True)
class Workload:
    """A model with its data.

    Parameters
    ----------
    model
        The model, freshly initialised from the job's seed.
    loss
        `loss(model, *batch)` returns the mean loss of a batch as a scalar tensor. None: no arithmetic. Batches are
        moved to the model's device before the call.
    train
        Map-style data set of tuples; None exactly if `loss` is None.
    evaluate
        `evaluate(model)` returns (loss, accuracy) on held-out data; the accuracy is NaN if it is not defined. It moves
        its data to the model's device (`hpcsync.training.flat_model.device_of`). None: no evaluation.
    """

    model: nn.Module
    loss: Loss | None
    train: Dataset[Any] | None
    evaluate: Evaluate | None


def build(job: Job) -> Workload:
    """Return the job's workload. The same job gives the same initial weights and data, bit for bit.

    Raises
    ------
    JobError
        If the workload is none, or too large for the memory of this machine.
    """
    with torch.random.fork_rng(devices=[]), _within_memory(job):
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
                raise JobError('workload.name = "script": must be another workload; start the training script itself')


@contextmanager
def _within_memory(job: Job) -> Iterator[None]:
    """Turn the errors of tensors that are too large into a JobError, except in a function of the user."""
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        if isinstance(job.workload, Function):
            raise
        reason = str(error).partition("\n")[0]
        raise JobError(f"workload: must fit into the memory of this machine: {reason}") from None


def _from_user(settings: Function) -> Workload:
    name = f"workload.name = {shown(settings.name)}"
    module, _, function = settings.name.partition(":")
    try:
        make = getattr(_imported(settings.name, module), function)
    except (ImportError, AttributeError) as error:
        raise not_importable(settings.name, error) from None
    if not callable(make):
        raise JobError(f"{name}: must name a function")
    try:
        inspect.signature(make).bind(**settings.options)
    except TypeError as error:
        raise JobError(f"workload.options = {shown(settings.options)}: must fit {settings.name}: {error}") from None
    try:
        workload = make(**settings.options)
    except JobError:
        raise
    except Exception as error:
        raise raised(settings.name, error) from None
    if not isinstance(workload, Workload):
        raise JobError(f"{name}: must return a hpcsync.Workload")
    return workload


def _imported(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (ImportError, JobError):
        raise
    except Exception as error:
        raise raised(name, error) from None


def aimed(evaluate: Evaluate, target_accuracy: float | None, *, has_accuracy: bool = False) -> Evaluate:
    """Return an evaluation of models, one of which is to reach a target.

    `has_accuracy` is whether the function has returned an accuracy already, before the run was resumed.

    It raises JobError if the user's function returns anything else than loss and accuracy, or at first no accuracy: no
    model could then reach the target. A later evaluation without an accuracy does not reach it, which is said once.
    One whose loss is not finite may have none.
    """
    said = False

    def judge(model: nn.Module) -> tuple[float, float]:
        nonlocal has_accuracy, said
        loss, accuracy = evaluated(evaluate, model)
        has_accuracy = has_accuracy or not math.isnan(accuracy)
        if target_accuracy is not None and math.isnan(accuracy) and math.isfinite(loss):
            key = f"stop.target_accuracy = {target_accuracy}"
            if not has_accuracy:
                raise JobError(
                    f"{key}: must be omitted: evaluate returns no accuracy (NaN); stop.target_loss is a target for its "
                    "loss"
                )
            if not said:
                print(
                    f"hpcsync: {key}: an evaluation has no accuracy (NaN), which does not reach it",
                    file=sys.stderr,
                    flush=True,
                )
            said = True
        return loss, accuracy

    return judge


def evaluated(evaluate: Evaluate, model: nn.Module) -> tuple[float, float]:
    """Return loss and accuracy of a model.

    Raises
    ------
    JobError
        If the user's function returns anything else.
    """
    result: Any = evaluate(model)
    try:
        loss, accuracy = map(float, result)
    except (TypeError, ValueError):
        raise JobError(f"evaluate must return (loss, accuracy), it returned {reprlib.repr(result)}") from None
    return loss, accuracy


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of a batch."""
    return functional.cross_entropy(model(x), y)


def classification(x: torch.Tensor, y: torch.Tensor) -> Evaluate:
    """Return an evaluation of mean cross-entropy and accuracy on these samples."""

    def evaluate(model: nn.Module) -> tuple[float, float]:
        model.eval()
        targets = y.to(device_of(model))
        with torch.no_grad():
            logits = torch.cat([model(part) for part in x.to(targets.device).split(EVALUATED_AT_ONCE)])
        loss = functional.cross_entropy(logits, targets)
        return float(loss), float((logits.argmax(1) == targets).double().mean())

    return evaluate


@functools.cache
def _digits_rows() -> NDArray[np.float64]:
    """Return the images, a row of 64 pixels and the digit for each, in the order of the split."""
    package = importlib.util.find_spec("sklearn")  # importing it would take over a second in every process
    assert package is not None and package.origin is not None
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return rows[np.random.default_rng(0).permutation(len(rows))]


def _digits() -> Workload:
    """Return scikit-learn's handwritten digits and a convolutional network of 13,706 parameters.

    The 1797 images of 8 x 8 pixels (UCI Optical Recognition of Handwritten Digits) are split 1437 to 360 by a fixed
    permutation.
    """
    rows = _digits_rows()
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
    """Return a small VGG on drawn images; 500 further images are held out."""
    x, y = stripes.draw(settings.samples + 500, settings.size, seed)
    training, held_out = (slice(settings.samples), slice(settings.samples, None))
    return _vgg(settings, stripes.CLASSES, (x[training], y[training]), (x[held_out], y[held_out]))


def _cifar(settings: Cifar) -> Workload:
    """Return a small VGG on 50,000 training and 10,000 test images of 32 x 32 pixels, without augmentation."""
    training, test = cifar.read(settings.name, Path(settings.folder))
    return _vgg(settings, cifar.ARCHIVES[settings.name].classes, training, test)


def _vgg(settings: Images | Cifar, classes: int, training: cifar.Samples, held_out: cifar.Samples) -> Workload:
    """Return a small VGG on images of bytes, which it standardises by the training data's mean and deviation."""
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
    """Return half the mean squared error of a batch."""
    return 0.5 * functional.mse_loss(model(x).squeeze(1), y)


def _linear(settings: Linear, seed: int) -> Workload:
    """Return least squares in float64: rows of x are standard normal, y = x w* + noise.

    The optimum is `numpy.linalg.lstsq(x, y)`. Evaluation reports the loss on the training rows and no accuracy.
    """
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
    """Return the source of the running Python's standard library and a transformer of 248,930 parameters by default.

    About every tenth file is held out. Another version of Python has another text.
    """
    training, held_out = text.characters()
    context = settings.context
    model = text.Transformer(context, settings.layers, settings.width, settings.heads)
    return Workload(model, text.loss, text.windows(training, context), text.evaluation(held_out, context))


class _Parameters(nn.Module):
    """Parameters that are only transferred: a matrix as close to square as possible, as in most models.

    The zeros are NumPy's, whose pages take memory only once they are used: `show` uses none.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        rows = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
        self.values = nn.Parameter(torch.from_numpy(np.zeros((rows, size // rows), np.float32)))
