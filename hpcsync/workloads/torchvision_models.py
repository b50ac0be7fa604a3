"""Convolutional networks of torchvision for planning: their sizes and operations.

They have no weights: everything is on the meta device unless it is to be measured.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcsync.config.errors import JobError, did_you_mean, shown
from hpcsync.planning.split_cost import Shape
from hpcsync.training import model_split


class Architecture(NamedTuple):
    """A network.

    Parameters
    ----------
    cut
        Submodule with which the fully-connected layers begin.
    image
        Channels, height and width of the input.
    """

    cut: str
    image: tuple[int, int, int] = (3, 224, 224)


ARCHITECTURES = {
    "alexnet": Architecture("classifier"),
    "vgg16": Architecture("classifier"),
    "vgg19": Architecture("classifier"),
    "inception_v3": Architecture("fc", (3, 299, 299)),
    "resnet50": Architecture("fc"),
    "resnet152": Architecture("fc"),
}


@functools.cache
def shape(name: str) -> Shape:
    """Return the sizes of a network's halves, with integer labels. Raises JobError as `build` does."""
    halves = build(name)
    image = torch.empty(1, *ARCHITECTURES[name].image, device="meta")
    return model_split.shape(halves, (image, torch.zeros(1, dtype=torch.long)))


def build(name: str, device: str = "meta") -> model_split.ModelSplit:
    """Return a network's halves; on other devices than meta with random weights.

    Raises
    ------
    JobError
        If the name is unknown, or torchvision is missing.
    """
    if name not in ARCHITECTURES:
        raise JobError(
            f"--model {shown(name)}: must be one of {', '.join(ARCHITECTURES)}{did_you_mean(name, ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[name]
    models = _torchvision_models(name)
    with torch.device(device):
        model: nn.Module = _inception_v3(models) if name == "inception_v3" else getattr(models, name)()
    return model_split.cut(model, architecture.cut)


def _inception_v3(models: Any) -> nn.Module:
    """Return Inception v3 without the auxiliary classifier.

    torchvision's forward depends on the training mode only for that classifier and cannot be traced for this reason;
    the one here computes the rest.
    """

    class InceptionV3(models.Inception3):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return the logits."""
            h: torch.Tensor = self._forward(x)[0]
            return h

    return InceptionV3(aux_logits=False, init_weights=False)


def _torchvision_models(name: str) -> Any:
    try:
        return importlib.import_module("torchvision.models")
    except ModuleNotFoundError:
        raise JobError(f"--model {shown(name)}: needs torchvision: pip install torchvision") from None
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        # Its operators were compiled for another torch and have not loaded (PyPI's torchvision with a torch without
        # CUDA), and importing it requires two of them. The networks use none, so placeholders suffice.
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        return importlib.import_module("torchvision.models")
