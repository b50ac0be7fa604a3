"""Deep gradient compression (Lin et al., ICLR 2018): sparse pushes with a momentum of each worker's own."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import DTypeLike

from hpcsync.compression.codec import Array, Encoded, TensorLayout, blocks, must_be_share, namespace
from hpcsync.compression.sparse import Elements, Sparse, largest

STAGES = 5  # of the warm-up, unless its ratios are given


class DGC(Sparse):
    """Of every matrix, the largest of what has been gathered. The optimizer must not have a momentum of its own.

    momentum: m of u = m u + g, gathered in v = v + u (Equation 4); with nesterov u = m (u + g), v = v + u + g.
    clip:     largest norm of a worker's gradient, before it is gathered: the threshold for one worker (section 3.2).
    warmup:   so many vectors are sent at larger ratios, in equal stages: `warmup_ratios`, by default
              ratio^((e + 1) / (w + 1)) in stage e of w = 5, as in the authors' code.

    What is sent is taken out of v and, so that old gradients do not push on, out of u (Equation 5). Small tensors are
    sent whole, with plain momentum: nothing is taken out of their u. The same holds for all tensors while the ratio
    is so large that everything is sent.
    """

    keeps_rest = True  # v

    def __init__(
        self,
        layout: TensorLayout,
        dtype: DTypeLike,
        *,
        seed: int = 0,
        ratio: float = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        clip: float | None = None,
        warmup: int = 0,
        warmup_ratios: Sequence[float] | None = None,
    ) -> None:
        super().__init__(layout, dtype, seed=seed, ratio=ratio)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; 0 <= momentum < 1 is needed")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip is {clip}; more than 0 is needed")
        if warmup < 0:
            raise ValueError(f"warmup is {warmup}; 0 or more is needed")
        if warmup_ratios is None:
            warmup_ratios = [ratio ** ((stage + 1) / (STAGES + 1)) for stage in range(STAGES)]
        for one in warmup_ratios:
            must_be_share("warmup_ratios", one)
        if warmup and not warmup_ratios:
            raise ValueError("warmup_ratios is empty; one for each stage of the warm-up is needed")
        self.momentum = momentum
        self.nesterov = nesterov
        self.clip = clip
        self.warmup = warmup
        self.warmup_ratios = list(warmup_ratios)
        self.gathered: Array | None = None  # v
        self._momenta: Array | None = None  # u
        self._encoded = 0

    def ratio_of(self, i: int) -> float:
        """The ratio of the i-th vector, counted from 0."""
        return self.ratio if i >= self.warmup else self.warmup_ratios[i * len(self.warmup_ratios) // self.warmup]

    def _encode(self, vector: Array, ratio: float) -> Encoded:
        u, v = self._gather(vector)
        counts = self.counts(self.ratio_of(self._encoded))
        self._encoded += 1
        if counts is None:
            values = v.copy()
            v.fill(0)
            return Elements(values)
        selected = self.select(v, counts)
        for tensor, indices in enumerate(selected):
            if not self.layout.is_small(tensor):
                u[indices] = 0
        chosen = namespace(v).concatenate(selected)
        values = v[chosen]
        v[chosen] = 0
        return Elements(values, chosen)

    def _gather(self, vector: Array) -> tuple[Array, Array]:
        """Add a gradient to the momenta and these to what is gathered; both."""
        xp = namespace(vector)
        if self.gathered is None or self._momenta is None:
            self.gathered, self._momenta = xp.zeros_like(vector), xp.zeros_like(vector)
        scale = 1.0
        if self.clip is not None and (norm := float(xp.linalg.norm(vector))) > self.clip:
            scale = self.clip / norm
        for block in blocks(len(vector)):
            g, u, v = vector[block], self._momenta[block], self.gathered[block]
            if scale != 1.0:
                g = g * scale
            if self.nesterov:
                u += g
                u *= self.momentum
                v += g
            else:
                u *= self.momentum
                u += g
            v += u
        return self._momenta, self.gathered

    def _select(self, tensor: Array, count: int) -> Array:
        return largest(tensor, count)
