"""The `[paradigm]` with layer separation (Stanza: Wu, Xu, Li and Xiong, arXiv 1812.10624)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from hpcsync.config.base import Count, Positive, Table
from hpcsync.config.cluster import Cluster
from hpcsync.config.errors import JobError, shown
from hpcsync.config.workloads import Script, Timing, WorkloadOptions
from hpcsync.planning.layer_groups import Groups
from hpcsync.planning.split_cost import Times


class StanzaOptions(Table):
    """Layer separation: convolution workers and fully-connected workers train one model.

    Fully-connected weights stay on their workers. [cluster.compute] sets the time of an iteration of the whole model.

    Parameters
    ----------
    cut
        Name of the submodule with which the fully-connected layers begin.
    fc_workers
        Number of fully-connected workers, which are the first workers; "auto": the number with the highest throughput
        (`hpcsync.planning.stanza_planner`).
    micro_batches
        Pieces of a batch: fully-connected workers compute one while the next is being transferred.
    fc_share
        Share of an iteration's time that the fully-connected layers take per batch; by default their share of the
        floating-point operations.
    forward_share
        Share of the convolutions' time that the forward pass takes.
    bucket_mb
        Size of a bucket of the gradient in MB, as under all-reduce.
    """

    name: Literal["stanza"]
    cut: Annotated[str, Field(min_length=1)] = Field(description="the name of a submodule, such as classifier")
    fc_workers: int | Literal["auto"] = Field(default=1, description='a whole number of at least 1, or "auto"')
    micro_batches: Count = 1
    fc_share: Annotated[float, Field(ge=0, le=1)] | None = None
    forward_share: Annotated[float, Field(ge=0, le=1)] = 1 / 3
    bucket_mb: Positive = 25.0

    @field_validator("fc_workers", mode="before")
    @classmethod
    def _whole_or_chosen(cls, fc_workers: Any) -> Any:
        if fc_workers != "auto" and (type(fc_workers) is not int or fc_workers < 1):
            raise ValueError('must be a whole number of at least 1, or "auto"')
        return fc_workers

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        return "all workers wait for each other in every iteration"

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of an iteration's time: forward pass below the cut, backward pass below it, and everything above.

        A script that does not pad its iterations need not set them.
        """
        return Times.of(1.0, self.fc_share or 0.0, self.forward_share)[:3]

    def groups(self, n_workers: int) -> Groups:
        """Return the groups of workers, once the number of fully-connected ones is chosen."""
        assert self.fc_workers != "auto"
        return Groups(n_workers, self.fc_workers)

    def check(self, workload: WorkloadOptions, cluster: Cluster) -> None:
        """Raise JobError if layers cannot be separated with this workload and cluster."""
        fewest = 2 if self.fc_workers == "auto" else 2 * self.fc_workers
        if cluster.workers < fewest:
            raise JobError(
                f"cluster.workers = {cluster.workers}: must be at least {fewest} with paradigm.fc_workers = "
                f"{shown(self.fc_workers)}: each of them needs a convolution worker of its own"
            )
        if isinstance(workload, Timing):
            self._check_sizes(workload)
        if isinstance(workload, Script):
            self._check_script(has_compute=cluster.compute is not None)
        elif workload.batch_size % self.micro_batches:
            raise JobError(
                f"workload.batch_size = {workload.batch_size}: must be a multiple of paradigm.micro_batches = "
                f"{self.micro_batches}"
            )
        for i, event in enumerate(cluster.events):
            if event.change == "leave":
                raise JobError(
                    f'cluster.events[{i}].change = "leave": must be another change with paradigm.name = "stanza", '
                    "where no worker can continue without the others"
                )

    def _check_script(self, *, has_compute: bool) -> None:
        """Raise JobError for options that need the model of a training script, unknown before its first batch."""
        if self.micro_batches > 1:
            raise JobError(
                f"paradigm.micro_batches = {self.micro_batches}: must be 1 in a training script, whose loop computes "
                "whole batches"
            )
        if self.fc_workers == "auto":
            raise JobError('paradigm.fc_workers = "auto": must be a number in a training script')
        if self.fc_share is None and has_compute:
            raise JobError("paradigm.fc_share: missing; a training script with [cluster.compute] must set it")

    def _check_sizes(self, workload: Timing) -> None:
        """Raise JobError if the sizes of a timing model do not allow separation."""
        for key in ("classifier", "activations"):
            if getattr(workload, key) == 0:
                raise JobError(f'workload.{key} = 0: must be at least 1 with paradigm.name = "stanza"')
        if self.cut != "classifier":
            raise JobError(f'paradigm.cut = {shown(self.cut)}: must be "classifier" with workload.name = "timing"')

    def refuse_simulated(self, workload: WorkloadOptions) -> None:
        """Raise JobError for a workload whose layers only a simulation can separate."""
        if isinstance(workload, Timing):
            raise JobError(
                'workload.name = "timing": must be another workload with paradigm.name = "stanza" to run, as it has '
                "no layers to compute; hpcsync simulate supports it"
            )
