"""The `[workload]` of the job file: what is trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from hpcsync.config.base import Count, NotNegative, Table, matching
from hpcsync.config.errors import JobError
from hpcsync.planning.split_cost import Shape

Dropout = Annotated[float, Field(ge=0, lt=1)]


class Digits(Table):
    """Handwritten digits (8 x 8 pixels) and a small convolutional network."""

    name: Literal["digits"]
    batch_size: Count = 32


class Images(Table):
    """Drawn images of `size` x `size` pixels, `samples` of them to train on, and a small VGG.

    width, hidden, dropout: of `learning.vgg.Vgg`.
    """

    name: Literal["images"]
    batch_size: Count = 32
    samples: Count = 2000
    size: Annotated[int, Field(ge=8, le=256, multiple_of=8)] = 16
    width: Count = 8
    hidden: Count = 256
    dropout: Dropout = 0.0


class Cifar(Table):
    """CIFAR-10 or CIFAR-100, whose archive is in `folder`, relative to the job file, and a small VGG.

    width, hidden, dropout: of `learning.vgg.Vgg`.
    """

    name: Literal["cifar10", "cifar100"]
    batch_size: Count = 64
    folder: str = "data"
    width: Count = 16
    hidden: Count = 512
    dropout: Dropout = 0.0

    def found(self, folder: Path) -> Cifar:
        """This workload with the absolute path of its folder, which is looked for from here."""
        return self.model_copy(update={"folder": str((folder / self.folder).resolve())})


class Linear(Table):
    """Least squares in float64 with a known optimum."""

    name: Literal["linear"]
    batch_size: Count = 32
    features: Count = 10
    samples: Count = 1000
    noise: NotNegative = 0.1


class Text(Table):
    """The source of Python's standard library, character by character, and a small transformer in float32.

    batch_size: sequences, of `context` characters each. width: of the transformer, shared among its `heads`.
    """

    name: Literal["text"]
    batch_size: Count = 16
    context: Annotated[int, Field(ge=1, le=4096)] = 64
    layers: Count = 2
    width: Count = 96
    heads: Count = 4

    @model_validator(mode="after")
    def _heads_are_alike(self) -> Self:
        if self.width % self.heads != 0:
            raise JobError(f"workload.width = {self.width}: must be a multiple of workload.heads = {self.heads}")
        return self


class Timing(Table):
    """No arithmetic: a vector of this many float32 parameters travels, for schedules and measurements.

    For layer separation at "classifier": so many of them belong to the fully-connected layers, and so many float32
    activations of a sample cross the cut.
    """

    name: Literal["timing"]
    batch_size: Count = 32
    parameters: Count = 1000
    classifier: Annotated[int, Field(ge=0)] = 0
    activations: Annotated[int, Field(ge=0)] = 0

    @field_validator("classifier")
    @classmethod
    def _not_all(cls, classifier: int, info: ValidationInfo) -> int:
        if classifier >= (parameters := info.data.get("parameters", math.inf)):
            raise ValueError(f"must be less than workload.parameters = {parameters}")
        return classifier

    @property
    def shape(self) -> Shape:
        return Shape(self.parameters - self.classifier, self.classifier, self.activations)


class Function(Table):
    """A workload of the user's own: `name` is "package.module:function", called with the options."""

    name: Annotated[str, matching(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", '"package.module:function"')]
    batch_size: Count = 32
    options: dict[str, Any] = {}


class Script(Table):
    """A training script that connects by itself: model and data are its own. Only traces hold such jobs."""

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
