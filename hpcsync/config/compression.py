"""The `[compression]` of the job file: what a worker's pushes are turned into before they travel."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, ValidationInfo, field_validator

from hpcsync.config.base import Count, Positive, Share, Table
from hpcsync.config.errors import JobError, shown

RATIOS = "a list of numbers greater than 0 and at most 1"


def _ratios(ratios: Any) -> Any:
    each = ratios if isinstance(ratios, list | tuple) else []
    if not each or not all(type(ratio) in (int, float) and 0 < ratio <= 1 for ratio in each):
        raise ValueError(f"must be {RATIOS}")
    return tuple(map(float, each))


class DenseOptions(Table):
    """Nothing is compressed."""

    name: Literal["none"]


class CodecOptions(Table):
    """gbytes_per_s: how fast vectors are compressed in a simulation; absent, in no time."""

    name: str
    gbytes_per_s: Positive | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What `compression.create` is given besides the name and the vector's layout."""
        return self.model_dump(exclude={"name", "gbytes_per_s"}, exclude_none=True)


class BiasedOptions(CodecOptions):
    """What is lost is sent with the next push, unless that is turned off."""

    error_feedback: bool = True


class UnbiasedOptions(CodecOptions):
    """What is lost is lost: on average nothing, or next to nothing."""

    error_feedback: bool = False


class TopKOptions(BiasedOptions):
    """The largest elements, a share of `ratio` of them."""

    name: Literal["top-k"]
    ratio: Share | None = 0.01  # None: the paradigm says it


class RandomKOptions(BiasedOptions):
    """Elements drawn at random, a share of `ratio` of them."""

    name: Literal["random-k"]
    ratio: Share | None = 0.01  # None: the paradigm says it


class DgcOptions(CodecOptions):
    """Deep gradient compression: the largest elements of accumulated gradients with a momentum.

    nesterov: the momentum's kind. clip: the largest norm of a gradient. warmup: pushes with ratios that come down to
    `ratio`; warmup_ratios: these, each for as many pushes; absent, five that come down by the same factor.
    """

    name: Literal["dgc"]
    ratio: Share = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    clip: Positive | None = None
    warmup: Annotated[int, Field(ge=0)] = 0
    warmup_ratios: Annotated[tuple[float, ...], BeforeValidator(_ratios)] | None = None

    @field_validator("warmup_ratios")
    @classmethod
    def _of_a_warmup(cls, ratios: tuple[float, ...] | None, info: ValidationInfo) -> tuple[float, ...] | None:
        if ratios is not None and (warmup := info.data.get("warmup")) is not None and warmup < len(ratios):
            raise ValueError(f"must be at most as many as the pushes that they are for, compression.warmup = {warmup}")
        return ratios


class QsgdOptions(UnbiasedOptions):
    """Every element is rounded at random to one of so many levels of the norm of its bucket."""

    name: Literal["qsgd"]
    levels: Annotated[int, Field(ge=1, le=32767)] = 127
    bucket: Count = 512


class OneBitOptions(BiasedOptions):
    """Every element is the mean of the negative ones or that of the others."""

    name: Literal["one-bit"]


class SignOptions(BiasedOptions):
    """Every element is the mean magnitude, with its sign."""

    name: Literal["sign"]


class PowerSgdOptions(BiasedOptions):
    """Every matrix is the product of two thin ones, of this rank."""

    name: Literal["powersgd"]
    rank: Count = 2


class Fp16Options(UnbiasedOptions):
    """Half the bits, or a quarter."""

    name: Literal["fp16"]


class Bf16Options(UnbiasedOptions):
    """Half the bits, or a quarter, in a wider range."""

    name: Literal["bf16"]


CompressionOptions = Annotated[
    DenseOptions
    | TopKOptions
    | RandomKOptions
    | DgcOptions
    | QsgdOptions
    | OneBitOptions
    | SignOptions
    | PowerSgdOptions
    | Fp16Options
    | Bf16Options,
    Discriminator("name"),
]

UNCOMPRESSED = ("easgd", "local-sgd", "gossip")  # paradigms that exchange weights


def with_defaults(table: Any, paradigm: Any) -> Any:
    """The table of a job with this [paradigm]: ashl gives every worker its ratio, and what is not sent is lost unless
    error_feedback says so. Raises JobError for a ratio that would not be used."""
    takes_ratio = isinstance(table, dict) and table.get("name") in ("top-k", "random-k")
    if takes_ratio and isinstance(paradigm, dict) and paradigm.get("name") == "ashl":
        if table.get("ratio") is not None:
            raise JobError(
                f'compression.ratio = {shown(table["ratio"])}: must be left out with paradigm.name = "ashl", whose '
                "ratio_coarse and ratio_fine say it"
            )
        return {"error_feedback": False, **table, "ratio": None}
    return table


def check(compression: CompressionOptions, paradigm: str, momentum: Any) -> None:
    """Raises JobError where pushes of this paradigm, for an optimizer of this momentum, cannot be compressed so."""
    name, having = f"compression.name = {shown(compression.name)}", f"with paradigm.name = {shown(paradigm)}"
    if isinstance(compression, DenseOptions):
        return
    if paradigm in UNCOMPRESSED:
        raise JobError(f'{name}: must be "none" {having}, where weights travel, which must be whole')
    if paradigm == "stanza":
        raise JobError(f'{name}: must be "none" {having}, where activations travel, which must be whole')
    if isinstance(compression, DgcOptions):
        if paradigm in ("ashl", "adsp"):
            raise JobError(f"{name}: must be another {having}, where no gradients travel: its momentum is for these")
        if momentum != 0:
            raise JobError(
                f'optimizer.momentum = {shown(momentum)}: must be 0, or left out, with compression.name = "dgc", '
                "which has a momentum of its own, compression.momentum"
            )
