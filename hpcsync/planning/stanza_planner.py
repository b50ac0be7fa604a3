"""Number of nodes that should train the fully-connected layers, and the gain over a parameter server or a ring.

Stanza lets convolution workers train the layers below a cut and fully-connected (FC) workers those above it. Per
iteration, with P_c and P_f parameters of s bytes below and above the cut, a numbers and l bytes of labels per sample at
the cut, batches of b samples, links of W bytes per second in each direction and a latency alpha per message::

    bytes sent, parameter server, n workers     2 n (P_c + P_f) s
    bytes sent, ring all-reduce, n workers      2 (n - 1) (P_c + P_f) s
    bytes sent, Stanza, n_c and n_f workers     2 (n_c - 1) P_c s + 2 (n_f - 1) P_f s + 2 n_c b a s   (and n_c b l)

    ring of n, v bytes        T_ring(n, v) = 2 (n - 1) (alpha + v / (n W))
    one server, n - 1 workers T = t + 2 (alpha + (n - 1) (P_c + P_f) s / W)
    n servers on n workers    T = t + 2 (alpha + (n - 1) / n (P_c + P_f) s / W)
    ring all-reduce           T = t + T_ring(n, (P_c + P_f) s)

where t is the time of a batch on one node, and the update of a parameter server takes no time. For Stanza let m be the
largest number of convolution workers that an FC worker serves: n_c / n_f rounded up, since all wait for the last one. A
batch passes through five stages, in M equal pieces that are pipelined::

    c  forward below     u  m b (a s + l) / (M W)     f  above, m batches     d  m b a s / (M W)     g  backward below

The part of a computation's time that does not depend on the number of samples is spent for every piece.
u and d are the times of an FC worker's link, shared by the activations, and their gradients, of all convolution workers
that it serves. A convolution worker makes all its forward passes before its first backward pass. The first piece has
passed the layers above the cut at A, and is back at B; the last one at A' and B'; the chain ends at C, the iteration at
T::

    A = c + alpha + u + f                A' = A + (M - 1) max(c, u, f)
    B = A + alpha + d                    B' = B + (M - 1) max(c, u, f, d)
    C = max(max(B, M c) + M g, B' + g)   T = max(C + T_ring(n_c, P_c s), A' + T_ring(n_f, P_f s))

because FC workers may sum their gradients while those of the activations travel. No transfer overlaps a backward pass.

Notes
-----
The model leaves out: noise, and the wait for the slowest worker of an iteration; nodes and links that differ; the time
of optimizers, copies and summing; the sharing of links between the FC workers' ring and the gradients of activations;
slices of a ring that are not equal.

References
----------
X. Wu, H. Xu, B. Li and Y. Xiong, "Stanza: Layer Separation for Distributed Training in Deep Learning", 2018,
arXiv:1812.10624. Only the abstract and introduction were available: volumes and times are our own derivation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hpcsync.planning.layer_groups import Groups
from hpcsync.planning.split_cost import Shape, Times


class SplitProfile(NamedTuple):
    """Measured times and sizes of a model cut in two.

    Attributes
    ----------
    times
        Times of a batch on one node.
    shape
        Sizes of the two halves.
    batch
        Samples of a batch.
    """

    times: Times
    shape: Shape
    batch: int

    @property
    def cut_bytes(self) -> int:
        """Bytes of a batch's activations at the cut; their gradients have as many."""
        return self.batch * self.shape.activation_bytes


class Link(NamedTuple):
    """Network link of every node.

    Attributes
    ----------
    bandwidth
        Bytes per second in each direction.
    latency_s
        Seconds per message.
    """

    bandwidth: float
    latency_s: float


class StanzaLayout(NamedTuple):
    """Predicted iteration of a layout of n nodes.

    Attributes
    ----------
    name
        Name of the layout.
    n_fc
        Number of FC workers, 0 without layer separation.
    batches
        Batches computed per iteration.
    seconds
        Duration of an iteration.
    samples_per_s
        Throughput in samples per second.
    n_bytes
        Bytes sent by all nodes together, without labels.
    label_bytes
        Bytes of the labels.
    link_bytes
        Bytes through the busiest link in one direction, without labels.
    """

    name: str
    n_fc: int
    batches: int
    seconds: float
    samples_per_s: float
    n_bytes: int
    label_bytes: int
    link_bytes: float


class Plan(NamedTuple):
    """Stanza's layouts for a number of nodes.

    Attributes
    ----------
    rows
        All layouts, by `n_fc`.
    best
        Layout with the highest throughput; among equals the one with the fewest FC workers.
    second
        Next best layout; None if there is no other.
    """

    rows: tuple[StanzaLayout, ...]
    best: StanzaLayout
    second: StanzaLayout | None

    @property
    def margin(self) -> float:
        """Throughput of the best layout over that of the second, minus 1; inf without a second."""
        return math.inf if self.second is None else faster(self.best, self.second)


# ---- bytes ----


def parameter_server_bytes(profile: SplitProfile, n_workers: int) -> int:
    """Return the bytes sent per iteration with a parameter server on nodes of its own.

    Each of the n workers sends a gradient and receives the weights, for any number of servers.
    """
    return 2 * n_workers * profile.shape.model_bytes


def ring_bytes(profile: SplitProfile, n_workers: int) -> int:
    """Return the bytes sent per iteration by ring all-reduce.

    A parameter server in shards on the n workers sends as many, since no worker sends its own shard.
    """
    return 2 * (n_workers - 1) * profile.shape.model_bytes


def stanza_bytes(profile: SplitProfile, groups: Groups) -> int:
    """Return the bytes sent per iteration by Stanza, without labels (see `label_bytes`)."""
    rings = (groups.n_convolution - 1) * profile.shape.conv_bytes + (groups.n_fc - 1) * profile.shape.fc_bytes
    return 2 * (rings + groups.n_convolution * profile.cut_bytes)


def label_bytes(profile: SplitProfile, groups: Groups) -> int:
    """Return the bytes of labels sent per iteration by Stanza."""
    return groups.n_convolution * profile.batch * profile.shape.label_bytes


def ring_link_bytes(n_bytes: int, n_workers: int) -> float:
    """Return the bytes that a node of a ring sends, and receives, to sum `n_bytes` bytes.

    The same holds for a server in shards on all workers.
    """
    return 2 * (n_workers - 1) / n_workers * n_bytes


def convolution_link_bytes(profile: SplitProfile, groups: Groups) -> float:
    """Return the bytes that a convolution worker sends, without labels, and receives."""
    return ring_link_bytes(profile.shape.conv_bytes, groups.n_convolution) + profile.cut_bytes


def fc_link_bytes(profile: SplitProfile, groups: Groups) -> float:
    """Return the bytes that the FC worker with the most convolution workers sends, and receives, without labels."""
    return ring_link_bytes(profile.shape.fc_bytes, groups.n_fc) + most_served(groups) * profile.cut_bytes


# ---- seconds ----


def most_served(groups: Groups) -> int:
    """Return the largest number of convolution workers that one FC worker serves."""
    return max(len(groups.served(fc)) for fc in groups.fc)


def ring_s(link: Link, n_workers: int, n_bytes: int) -> float:
    """Return the seconds of a ring all-reduce of `n_bytes` bytes on equal, otherwise idle links."""
    return 2 * (n_workers - 1) * (link.latency_s + n_bytes / n_workers / link.bandwidth)


def stanza_s(profile: SplitProfile, link: Link, groups: Groups, micro_batches: int = 1) -> float:
    """Return the seconds of an iteration of Stanza with batches in `micro_batches` pieces."""
    m, pieces, times = most_served(groups), micro_batches, profile.times
    forward, backward = (times.below_s(whole_s, pieces) for whole_s in (times.conv_forward_s, times.conv_backward_s))
    above = times.above_s(m / pieces)
    down = m * profile.cut_bytes / pieces / link.bandwidth
    up = down + m * profile.batch * profile.shape.label_bytes / pieces / link.bandwidth
    first_above = forward + link.latency_s + up + above
    first_back = first_above + link.latency_s + down
    last_above = first_above + (pieces - 1) * max(forward, up, above)
    last_back = first_back + (pieces - 1) * max(forward, up, above, down)
    chain = max(max(first_back, pieces * forward) + pieces * backward, last_back + backward)
    return max(
        chain + ring_s(link, groups.n_convolution, profile.shape.conv_bytes),
        last_above + ring_s(link, groups.n_fc, profile.shape.fc_bytes),
    )


def all_reduce_s(profile: SplitProfile, link: Link, n_nodes: int) -> float:
    """Return the seconds of an iteration with ring all-reduce."""
    return profile.times.batch_s + ring_s(link, n_nodes, profile.shape.model_bytes)


def dedicated_server_s(profile: SplitProfile, link: Link, n_nodes: int) -> float:
    """Return the seconds of an iteration with one node as the server, whose link all n_nodes - 1 workers use."""
    return profile.times.batch_s + 2 * (link.latency_s + (n_nodes - 1) * profile.shape.model_bytes / link.bandwidth)


def sharded_server_s(profile: SplitProfile, link: Link, n_nodes: int) -> float:
    """Return the seconds of an iteration in which every node computes and serves an equal shard."""
    once = ring_link_bytes(profile.shape.model_bytes, n_nodes) / 2
    return profile.times.batch_s + 2 * (link.latency_s + once / link.bandwidth)


# ---- layouts ----


def stanza(profile: SplitProfile, link: Link, groups: Groups, micro_batches: int) -> StanzaLayout:
    """Return the layout of Stanza with these groups."""
    seconds = stanza_s(profile, link, groups, micro_batches)
    link_bytes = max(convolution_link_bytes(profile, groups), fc_link_bytes(profile, groups))
    batches, labels = groups.n_convolution, label_bytes(profile, groups)
    per_s = _per_s(profile, batches, seconds)
    return StanzaLayout(
        "stanza", groups.n_fc, batches, seconds, per_s, stanza_bytes(profile, groups), labels, link_bytes
    )


def without_separation(profile: SplitProfile, link: Link, n_nodes: int) -> tuple[StanzaLayout, ...]:
    """Return the layouts without layer separation on the same number of nodes.

    They are one parameter server with n_nodes - 1 workers, a parameter server in shards on n_nodes workers, and ring
    all-reduce among n_nodes workers.
    """
    n, sent = n_nodes, ring_bytes(profile, n_nodes)
    through_link = ring_link_bytes(profile.shape.model_bytes, n)

    def layout(name: str, batches: int, seconds: float, n_bytes: int, link_bytes: float) -> StanzaLayout:
        return StanzaLayout(name, 0, batches, seconds, _per_s(profile, batches, seconds), n_bytes, 0, link_bytes)

    dedicated_s = dedicated_server_s(profile, link, n)
    through_server = parameter_server_bytes(profile, n - 1)
    return (
        layout("dedicated server", n - 1, dedicated_s, through_server, through_server / 2),
        layout("sharded server", n, sharded_server_s(profile, link, n), sent, through_link),
        layout("ring all-reduce", n, all_reduce_s(profile, link, n), sent, through_link),
    )


def _per_s(profile: SplitProfile, batches: int, seconds: float) -> float:
    return batches * profile.batch / seconds if seconds > 0 else math.inf


def choose(profile: SplitProfile, link: Link, n_nodes: int, *, micro_batches: int = 1) -> Plan:
    """Choose the number of FC workers by trying 1 to n_nodes / 2; more would have no work.

    Parameters
    ----------
    profile
        Times and sizes of the model.
    link
        Link of every node.
    n_nodes
        Number of nodes, at least 2.
    micro_batches
        Pieces that a batch is cut into.

    Returns
    -------
    Plan
        All layouts and the best one.
    """
    every = [Groups(n_nodes, n_fc) for n_fc in range(1, n_nodes // 2 + 1)]
    rows = tuple(stanza(profile, link, groups, micro_batches) for groups in every)
    best, *others = sorted(rows, key=lambda row: (-row.samples_per_s, row.n_fc))
    return Plan(rows, best, others[0] if others else None)


def faster(one: StanzaLayout, other: StanzaLayout) -> float:
    """Return the throughput of one layout over that of the other, minus 1."""
    return 0.0 if one.samples_per_s == other.samples_per_s else one.samples_per_s / other.samples_per_s - 1
