"""Layer separation (Stanza: Wu, Xu, Li and Xiong, arXiv 1812.10624)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from hpcsync.paradigms.options import (
    Allowed,
    Count,
    JobTables,
    OptionError,
    ParadigmOptions,
    Part,
    Positive,
    default,
)
from hpcsync.paradigms.papers import Reference, arxiv
from hpcsync.paradigms.peer_method import SummedGradients
from hpcsync.planning.layer_groups import Groups
from hpcsync.planning.split_cost import Times

WU = Reference(
    "wu2018stanza",
    "article",
    ("Wu, Xiaorui", "Xu, Hong", "Li, Bo", "Xiong, Yongqiang"),
    "Stanza: Layer Separation for Distributed Training in Deep Learning",
    2018,
    arxiv("1812.10624"),
)


def _whole_or_auto(fc_workers: Any) -> bool:
    return fc_workers == "auto" or (type(fc_workers) is int and fc_workers >= 1)


@dataclass(frozen=True, kw_only=True)
class StanzaOptions(ParadigmOptions):
    """Layer separation: convolution workers and fully-connected workers train one model.

    Fully-connected weights stay on their workers. [cluster.compute] sets the time of an iteration of the whole model.

    Parameters
    ----------
    cut
        Submodule at which the fully-connected layers begin.
    fc_workers
        Number of workers, the first ones, that train the fully-connected layers; at most half of all. `"auto"`: the
        number with the highest predicted throughput.
    micro_batches
        Equal pieces of a batch; one is computed above the cut while the next is computed below.
    fc_share
        Share of an iteration's time (`[cluster.compute]`) above the cut.
    forward_share
        Share of the forward pass in the time below the cut.
    bucket_mb
        Megabytes of the gradient that are summed at a time.
    """

    name: Literal["stanza"] = "stanza"
    cut: Annotated[str, MinLen(1), Allowed("the name of a submodule, such as classifier")]
    fc_workers: Annotated[int | Literal["auto"], Allowed('a whole number of at least 1, or "auto"', _whole_or_auto)] = 1
    micro_batches: Count = 1
    fc_share: Part | None = default(None, "by floating-point operations")
    forward_share: Part = default(1 / 3, "1/3")
    bucket_mb: Positive | None = default(None, "25 on one node; between nodes a quarter of the gradient, from 1 to 8")

    contribution = "activation"
    one_model = True
    needs_all = True
    separates_layers = True
    least_workers = 2
    papers = (WU,)
    place = 150
    colour = "#661100"
    waiting = "all workers, in every iteration"
    update = "the mean of all gradients; fully-connected weights stay on a few workers"
    source = "Wu et al., 2018"

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of an iteration's time: forward pass below the cut, backward pass below it, and everything above.

        A script that does not pad its iterations need not set them.
        """
        return Times.of(1.0, self.fc_share or 0.0, self.forward_share)[:3]

    def method(self, n_workers: int, seed: int) -> SummedGradients:
        """Return the exchange within each group of workers."""
        return SummedGradients("separated-layers", self.bucket_mb)

    def groups(self, n_workers: int) -> Groups:
        """Return the groups of workers, once the number of fully-connected ones is chosen."""
        assert self.fc_workers != "auto"
        return Groups(n_workers, self.fc_workers)

    @property
    def layer_pieces(self) -> int:
        """Number of pieces in which separated layers compute a batch."""
        return self.micro_batches

    def work_share(self, worker: int, n_workers: int) -> float:
        """Return the worker's share of the computation of a whole iteration."""
        forward, backward, above = self.shares
        return above if self.groups(n_workers).is_fc(worker) else forward + backward

    def pieces(self, worker: int, n_workers: int) -> int:
        """Return the number of pieces of a batch: 1 for a convolution worker, whose model divides the batch itself."""
        return self.micro_batches if self.groups(n_workers).is_fc(worker) else 1

    @property
    def open_keys(self) -> tuple[str, ...]:
        """Options whose values are chosen when the run starts."""
        return tuple(key for key in ("fc_share", "fc_workers") if getattr(self, key) in (None, "auto"))

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        return f"Stanza, {self.fc_workers} fully-connected"

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        return "one model with separated layers; each update is the mean of all convolution workers' batches"

    def check(self, job: JobTables) -> None:
        """Raise OptionError if layers cannot be separated with this workload and cluster."""
        workload, cluster = job.workload, job.cluster
        number, n_fc = ('"auto"', 1) if self.fc_workers == "auto" else (self.fc_workers, self.fc_workers)
        if cluster.workers < 2 * n_fc:
            raise OptionError(
                "cluster.workers",
                cluster.workers,
                f"must be at least {2 * n_fc} with paradigm.fc_workers = {number}: each of them needs a convolution "
                "worker of its own",
            )
        if workload.name == "timing":
            self._check_sizes(workload)
        if workload.name == "script":
            self._check_script(has_compute=cluster.compute is not None)
        elif workload.batch_size % self.micro_batches:
            must = f"must be a multiple of paradigm.micro_batches = {self.micro_batches}"
            raise OptionError("workload.batch_size", workload.batch_size, must)
        for i, event in enumerate(cluster.events):
            if event.change == "leave":
                raise OptionError(
                    f"cluster.events[{i}].change",
                    "leave",
                    'must be another change with paradigm.name = "stanza", where no worker can continue without the '
                    "others",
                )

    def _check_script(self, *, has_compute: bool) -> None:
        """Raise OptionError for options that need the model of a training script, unknown before its first batch."""
        if self.micro_batches > 1:
            raise OptionError(
                "paradigm.micro_batches",
                self.micro_batches,
                "must be 1 in a training script, whose loop computes whole batches",
            )
        if self.fc_workers == "auto":
            raise OptionError("paradigm.fc_workers", "auto", "must be a number in a training script")
        if self.fc_share is None and has_compute:
            raise OptionError("paradigm.fc_share", None, "a training script with [cluster.compute] must set it")

    def _check_sizes(self, workload: Any) -> None:
        """Raise OptionError if the sizes of a timing model do not allow separation."""
        for key in ("classifier", "activations"):
            if getattr(workload, key) == 0:
                raise OptionError(f"workload.{key}", 0, 'must be at least 1 with paradigm.name = "stanza"')
        if self.cut != "classifier":
            raise OptionError("paradigm.cut", self.cut, 'must be "classifier" with workload.name = "timing"')

    def check_real(self, job: JobTables) -> None:
        """Raise OptionError for a workload whose layers only a simulation can separate."""
        if job.workload.name == "timing":
            raise OptionError(
                "workload.name",
                "timing",
                'must be another workload with paradigm.name = "stanza" to run, as it has no layers to compute; '
                "hpcsync simulate supports it",
            )
