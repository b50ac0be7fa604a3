"""The `[workload]` of the job file: model and data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from hpcsync.config.base import NotNegative, Table, matching
from hpcsync.config.errors import JobError
from hpcsync.planning.split_cost import Shape

BatchSize = Annotated[int, Field(ge=1, le=2**31 - 1)]  # range of the trace
Samples = Annotated[int, Field(ge=1, le=10**8)]
Size = Annotated[int, Field(ge=1, le=10**6)]
Width = Annotated[int, Field(ge=1, le=1024)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class Digits(Table):
    """Handwritten digits (8 x 8 pixels) and a small convolutional network."""

    name: Literal["digits"]
    batch_size: BatchSize = 32


class Images(Table):
    """Synthetic images of stripes and a small VGG.

    Parameters
    ----------
    samples
        Number of training images.
    size
        Width and height of an image in pixels.
    width, hidden, dropout
        See `hpcsync.workloads.vgg.Vgg`.
    """

    name: Literal["images"]
    batch_size: BatchSize = 32
    samples: Samples = 2000
    size: Annotated[int, Field(ge=8, le=256, multiple_of=8)] = 16
    width: Width = 8
    hidden: Size = 256
    dropout: Dropout = 0.0


class Cifar(Table):
    """CIFAR-10 or CIFAR-100 and a small VGG.

    Parameters
    ----------
    folder
        Folder of the archive, relative to the job file.
    width, hidden, dropout
        See `hpcsync.workloads.vgg.Vgg`.
    """

    name: Literal["cifar10", "cifar100"]
    batch_size: BatchSize = 64
    folder: str = "data"
    width: Width = 16
    hidden: Size = 512
    dropout: Dropout = 0.0

    def found(self, folder: Path) -> Cifar:
        """Return this workload with the absolute path of its folder, relative to `folder` before."""
        return self.model_copy(update={"folder": str((folder / self.folder).resolve())})


class Linear(Table):
    """Least squares in float64 with a known optimum."""

    name: Literal["linear"]
    batch_size: BatchSize = 32
    features: Size = 10
    samples: Samples = 1000
    noise: NotNegative = 0.1


class Text(Table):
    """The source of Python's standard library, character by character, and a small transformer in float32.

    Parameters
    ----------
    batch_size
        Sequences of a batch.
    context
        Characters of a sequence.
    layers, width, heads
        Blocks, width and attention heads of the transformer; heads divide the width.
    """

    name: Literal["text"]
    batch_size: BatchSize = 16
    context: Annotated[int, Field(ge=1, le=4096)] = 64
    layers: Annotated[int, Field(ge=1, le=256)] = 2
    width: Annotated[int, Field(ge=1, le=4096)] = 96
    heads: Annotated[int, Field(ge=1, le=4096)] = 4

    @model_validator(mode="after")
    def _heads_are_alike(self) -> Self:
        if self.width % self.heads != 0:
            raise JobError(f"workload.width = {self.width}: must be a multiple of workload.heads = {self.heads}")
        return self


class Timing(Table):
    """No arithmetic: a vector of float32 parameters is transferred, for schedules and measurements.

    Parameters
    ----------
    parameters
        Size of the vector.
    classifier
        With layer separation, which cuts at "classifier": parameters of the fully-connected layers.
    activations
        With layer separation: float32 activations per sample at the cut.
    """

    name: Literal["timing"]
    batch_size: BatchSize = 32
    parameters: Annotated[int, Field(ge=1, le=10**11)] = 1000
    classifier: Annotated[int, Field(ge=0)] = 0
    activations: Annotated[int, Field(ge=0, le=10**11)] = 0

    @field_validator("classifier")
    @classmethod
    def _not_all(cls, classifier: int, info: ValidationInfo) -> int:
        if classifier >= (parameters := info.data.get("parameters", math.inf)):
            raise ValueError(f"must be less than workload.parameters = {parameters}")
        return classifier

    @property
    def shape(self) -> Shape:
        """Sizes of the halves under layer separation."""
        return Shape(self.parameters - self.classifier, self.classifier, self.activations)


class Function(Table):
    """A workload of the user: a function that returns a `hpcsync.Workload`.

    Parameters
    ----------
    name
        "package.module:function".
    options
        Keyword arguments of the function.
    """

    name: Annotated[str, matching(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", '"package.module:function"')]
    batch_size: BatchSize = 32
    options: dict[str, Any] = {}


class Script(Table):
    """A training script with its own model and data (`hpcsync.connect`). Only traces hold such jobs."""

    name: Literal["script"]


WORKLOADS = ("digits", "images", "cifar10", "cifar100", "linear", "text", "timing")


def _workload_tag(table: Any) -> str | None:
    name = table.get("name") if isinstance(table, dict) else getattr(table, "name", None)
    if isinstance(name, str) and ":" in name:
        return "function"
    return name if name in (*WORKLOADS, "script") else None


WorkloadOptions = Annotated[
    Annotated[Digits, Tag("digits")]
    | Annotated[Images, Tag("images")]
    | Annotated[Cifar, Tag("cifar10")]
    | Annotated[Cifar, Tag("cifar100")]
    | Annotated[Linear, Tag("linear")]
    | Annotated[Text, Tag("text")]
    | Annotated[Timing, Tag("timing")]
    | Annotated[Script, Tag("script")]
    | Annotated[Function, Tag("function")],
    Discriminator(_workload_tag),
]
