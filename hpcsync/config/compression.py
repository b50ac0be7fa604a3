"""The `[compression]` of the job file: compression of the workers' pushes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, ValidationInfo, field_validator

from hpcsync.config.base import Amount, Count, Positive, Share, Table
from hpcsync.config.errors import JobError, shown
from hpcsync.config.paradigms import kind_of
from hpcsync.paradigms.options import ParadigmOptions

RATIOS = "a list of numbers greater than 0 and at most 1"


def _ratios(ratios: Any) -> Any:
    each = ratios if isinstance(ratios, list | tuple) else []
    if not each or not all(type(ratio) in (int, float) and 0 < ratio <= 1 for ratio in each):
        raise ValueError(f"must be {RATIOS}")
    return tuple(map(float, each))


class DenseOptions(Table):
    """No compression."""

    name: Literal["none"]


class CodecOptions(Table):
    """A codec.

    Parameters
    ----------
    name
        Name of the codec.
    gbytes_per_s
        Throughput of the compression in a simulation, in 10^9 bytes of the vector per second; by default it takes no
        time.
    """

    name: str
    gbytes_per_s: Amount | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `hpcsync.compression.create`, without name and layout."""
        return self.model_dump(exclude={"name", "gbytes_per_s"}, exclude_none=True)


class BiasedOptions(CodecOptions):
    """A biased codec. By default its error is added to the next push (error feedback)."""

    error_feedback: bool = True


class UnbiasedOptions(CodecOptions):
    """A codec whose error is zero on average, or nearly so. By default it has no error feedback."""

    error_feedback: bool = False


class TopKOptions(BiasedOptions):
    """Top-k sparsification: the share `ratio` of the elements with the largest magnitude."""

    name: Literal["top-k"]
    ratio: Share | None = 0.01  # None: the paradigm says it


class RandomKOptions(BiasedOptions):
    """Random sparsification: the share `ratio` of the elements, drawn at random."""

    name: Literal["random-k"]
    ratio: Share | None = 0.01  # None: the paradigm says it


class DgcOptions(CodecOptions):
    """Deep gradient compression (DGC): the largest elements of accumulated gradients, with momentum correction.

    Parameters
    ----------
    ratio
        Share of the elements to send.
    momentum, nesterov
        Momentum of the correction, and its kind.
    clip
        Largest norm of a gradient.
    warmup
        Pushes of the warm-up, during which the ratio falls to `ratio`.
    warmup_ratios
        Ratios of the warm-up, each for the same number of pushes; by default five that fall by a constant factor.
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
            raise ValueError(
                f"must have at most as many entries as the warm-up has pushes, compression.warmup = {warmup}"
            )
        return ratios


class QsgdOptions(UnbiasedOptions):
    """QSGD: each element is rounded at random to one of `levels` levels of the norm of its bucket."""

    name: Literal["qsgd"]
    levels: Annotated[int, Field(ge=1, le=32767)] = 127
    bucket: Count = 512


class OneBitOptions(BiasedOptions):
    """One-bit quantisation: each element becomes the mean of the negative elements or that of the others."""

    name: Literal["one-bit"]


class SignOptions(BiasedOptions):
    """Sign quantisation: each element becomes the mean magnitude with its sign."""

    name: Literal["sign"]


class PowerSgdOptions(BiasedOptions):
    """PowerSGD: each matrix becomes a product of two matrices of rank `rank`."""

    name: Literal["powersgd"]
    rank: Count = 2


class Fp16Options(UnbiasedOptions):
    """Conversion to float16: half of the bits of float32, a quarter of those of float64."""

    name: Literal["fp16"]


class Bf16Options(UnbiasedOptions):
    """Conversion to bfloat16: as float16, with a wider range and fewer digits."""

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

TAKE_RATIO = ("top-k", "random-k")  # names of those whose ratio a paradigm may set

UNCOMPRESSED = {  # paradigms that transfer something else than gradients and changes
    "position": "which transfers weights; these cannot be compressed",
    "activation": "which transfers activations; these cannot be compressed",
}


def takes_ratio(compression: CompressionOptions) -> bool:
    """Return whether a paradigm may set the ratio of this compression."""
    return isinstance(compression, TopKOptions | RandomKOptions)


def with_defaults(table: Any, paradigm: Any) -> Any:
    """Return the table with the defaults of a job with this [paradigm].

    A paradigm that sets every worker's ratio has no error feedback by default.

    Raises
    ------
    JobError
        If a ratio is given that would not be used.
    """
    has_ratio = isinstance(table, dict) and table.get("name") in TAKE_RATIO
    if has_ratio and (kind := kind_of(paradigm)) is not None and kind.ratios:
        if table.get("ratio") is not None:
            raise JobError(
                f"compression.ratio = {shown(table['ratio'])}: must be omitted with paradigm.name = "
                f"{shown(paradigm['name'])}, whose {' and '.join(kind.ratios)} set it"
            )
        return {"error_feedback": False, **table, "ratio": None}
    return table


def check(compression: CompressionOptions, paradigm: ParadigmOptions, momentum: Any) -> None:
    """Raise JobError if the compression does not fit the paradigm or the optimizer's momentum."""
    name, having = f"compression.name = {shown(compression.name)}", f"with paradigm.name = {shown(paradigm.name)}"
    if isinstance(compression, DenseOptions):
        return
    if (because := UNCOMPRESSED.get(paradigm.contribution)) is not None:
        raise JobError(f'{name}: must be "none" {having}, {because}')
    if isinstance(compression, DgcOptions):
        if paradigm.contribution != "gradient":
            raise JobError(
                f"{name}: must be another {having}, which transfers no gradients; the momentum of dgc is for these"
            )
        refuse_momentum(compression, momentum)


def refuse_momentum(compression: CompressionOptions, momentum: Any) -> None:
    """Raise JobError if the optimizer has a momentum beside that of the compression."""
    if isinstance(compression, DgcOptions) and momentum != 0:
        raise JobError(
            f'optimizer.momentum = {shown(momentum)}: must be 0 or omitted with compression.name = "dgc", '
            "which has its own momentum, compression.momentum"
        )
