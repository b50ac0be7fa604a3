"""Gradient compression: codecs of flat vectors, with error feedback, on NumPy or CuPy arrays.

`create` builds a codec by name; `hpcsync.compression.codec` defines the interface.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import DTypeLike

from hpcsync.compression.codec import Codec, Encoded, TensorLayout
from hpcsync.compression.dgc import DGC
from hpcsync.compression.error_feedback import ErrorFeedback
from hpcsync.compression.half_precision import Bf16, Fp16
from hpcsync.compression.one_bit import OneBit, Sign
from hpcsync.compression.powersgd import PowerSGD
from hpcsync.compression.qsgd import QSGD
from hpcsync.compression.sparse import RandomK, TopK

__all__ = ["CODECS", "Codec", "Encoded", "ErrorFeedback", "TensorLayout", "create"]

CODECS: dict[str, type[Codec]] = {
    "top-k": TopK,
    "random-k": RandomK,
    "dgc": DGC,
    "qsgd": QSGD,
    "one-bit": OneBit,
    "sign": Sign,
    "powersgd": PowerSGD,
    "fp16": Fp16,
    "bf16": Bf16,
}


def create(
    name: str,
    layout: TensorLayout,
    dtype: DTypeLike,
    *,
    seed: int = 0,
    error_feedback: bool | None = None,
    **options: Any,
) -> Codec:
    """Create a codec by name.

    Parameters
    ----------
    name
        A key of `CODECS`.
    layout
        Tensors in the flat vector.
    dtype
        Type of the vectors, float32 or float64.
    seed
        Seed of random choices.
    error_feedback
        Whether to add error feedback; None: the codec's default, `feeds_back`.
    **options
        top-k and random-k: ratio. dgc: ratio, momentum, nesterov, clip, warmup, warmup_ratios. qsgd: levels, bucket.
        powersgd: rank. one-bit, sign, fp16 and bf16: none.

    Returns
    -------
    Codec
        The codec, wrapped in `ErrorFeedback` if requested.

    Raises
    ------
    ValueError
        If the name is unknown or an option has a value that is not allowed.
    TypeError
        If the codec does not have an option.
    """
    if name not in CODECS:
        raise ValueError(f"name must be one of {', '.join(CODECS)}, got {name!r}")
    kind = CODECS[name]
    fed_back = kind.feeds_back if error_feedback is None else error_feedback
    if kind is RandomK:
        options["rescaled"] = not fed_back
    codec = kind(layout, dtype, seed=seed, **options)
    return ErrorFeedback(codec) if fed_back else codec
