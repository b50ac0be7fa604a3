"""The `[paradigm]` of the job file that separates layers (Stanza: Wu, Xu, Li and Xiong, arXiv 1812.10624)."""

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
    """Convolution workers and fully-connected workers train one model; fully-connected weights stay where they are.

    cut: the submodule, by its name, with which the fully-connected layers begin. fc_workers: how many of the workers,
    the first ones, train these; "auto": as many as give the most samples a second, by `planning.node_assignment`.
    micro_batches: pieces of a batch, so that the fully-connected workers compute one while the next is under way.
    [cluster.compute] says what an iteration of the whole model takes, of which fully-connected layers have the share
    fc_share, for each batch that they are given (unless it is said, by their floating-point operations), and the
    convolutions the rest, forward_share of it for the forward pass.
    bucket_mb: as under all-reduce.
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
        return "in every iteration all wait for all"

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of what an iteration of the whole model takes: the forward pass below the cut, the backward pass there, and
        what is above it. A script that does not pad its iterations need not know them."""
        return Times.of(1.0, self.fc_share or 0.0, self.forward_share)[:3]

    def groups(self, n_workers: int) -> Groups:
        """Who is what, once that is chosen."""
        assert self.fc_workers != "auto"
        return Groups(n_workers, self.fc_workers)

    def check(self, workload: WorkloadOptions, cluster: Cluster) -> None:
        """Raises JobError where layers cannot be separated so: of this model, among these workers."""
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
                    f'cluster.events[{i}].change = "leave": must be another with paradigm.name = "stanza", where '
                    "nobody can go on without the others"
                )

    def _check_script(self, *, has_compute: bool) -> None:
        """Before a training script's first batch nothing is known of what its model computes."""
        if self.micro_batches > 1:
            raise JobError(
                f"paradigm.micro_batches = {self.micro_batches}: must be 1 in a training script, whose loop computes a "
                "batch as a whole"
            )
        if self.fc_workers == "auto":
            raise JobError('paradigm.fc_workers = "auto": must be a number in a training script')
        if self.fc_share is None and has_compute:
            raise JobError("paradigm.fc_share: missing; a training script must give it beside compute")

    def _check_sizes(self, workload: Timing) -> None:
        """Of a model that is nothing but its sizes."""
        for key in ("classifier", "activations"):
            if getattr(workload, key) == 0:
                raise JobError(f'workload.{key} = 0: must be at least 1 with paradigm.name = "stanza"')
        if self.cut != "classifier":
            raise JobError(f'paradigm.cut = {shown(self.cut)}: must be "classifier" with workload.name = "timing"')

    def refuse_simulated(self, workload: WorkloadOptions) -> None:
        """Raises JobError for a workload of which only a simulation can separate layers."""
        if isinstance(workload, Timing):
            raise JobError(
                'workload.name = "timing": must be another with paradigm.name = "stanza" to run: there are no layers '
                "to compute; hpcsync simulate takes it"
            )
