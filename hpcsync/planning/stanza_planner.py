"""How many of n nodes should train the fully-connected layers, and what it gains over a parameter server or a ring.

Stanza (Wu, Xu, Li and Xiong, arXiv 1812.10624) lets convolution workers train the layers below a cut and
fully-connected (FC) workers those above it. Only the paper's abstract and introduction could be read: volumes and times
are our own reading of them. Per iteration, with P_c and P_f parameters of s bytes below and above the cut, a numbers
and l bytes of labels a sample at the cut, batches of b samples, links of W bytes a second in each direction and
messages that take alpha:

    bytes sent, parameter server, n workers     2 n (P_c + P_f) s
    bytes sent, ring all-reduce, n workers      2 (n - 1) (P_c + P_f) s
    bytes sent, Stanza, n_c and n_f workers     2 (n_c - 1) P_c s + 2 (n_f - 1) P_f s + 2 n_c b a s   (and n_c b l)

    ring of n, v bytes        T_ring(n, v) = 2 (n - 1) (alpha + v / (n W))
    one server, n - 1 workers T = t + 2 (alpha + (n - 1) (P_c + P_f) s / W)
    n servers on n workers    T = t + 2 (alpha + (n - 1) / n (P_c + P_f) s / W)
    ring all-reduce           T = t + T_ring(n, (P_c + P_f) s)

where t is what a batch takes on one node, and a parameter server's update takes no time. For Stanza let m be the
most convolution workers that an FC worker serves: n_c / n_f, rounded up, for all wait for the last. A batch goes
through five stages, in M equal pieces, of which one is in each stage while the next is in the one before:

    c  forward below     u  m b (a s + l) / (M W)     f  above, m batches     d  m b a s / (M W)     g  backward below

u and d are what an FC worker's link takes, which the activations of all that it serves share, and their gradients. A
convolution worker makes all its forward passes before its first backward pass. The first piece has been above after A,
and is back after B; the last one after A' and B'; the chain is over after C, and the iteration after T:

    A = c + alpha + u + f                A' = A + (M - 1) max(c, u, f)
    B = A + alpha + d                    B' = B + (M - 1) max(c, u, f, d)
    C = max(max(B, M c) + M g, B' + g)   T = max(C + T_ring(n_c, P_c s), A' + T_ring(n_f, P_f s))

for FC workers may sum their gradients while those of the activations travel. Nothing hides behind a backward pass.

What this leaves out: noise, and that everybody waits for whoever is slowest in an iteration; nodes and links that are
not all alike; what optimizers, copies and summing take; that the FC workers' ring and the gradients of activations
share links; slices of a ring that are not equal.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hpcsync.planning.layer_groups import Groups
from hpcsync.planning.split_cost import Shape, Times


class SplitProfile(NamedTuple):
    """What a node takes for a batch, of so many samples, and how large everything is."""

    times: Times
    shape: Shape
    batch: int

    @property
    def cut_bytes(self) -> int:
        """The activations of a batch, and as much their gradients."""
        return self.batch * self.shape.activation_bytes


class Link(NamedTuple):
    """Of every node. bandwidth: bytes per second, up and down each; latency_s: of a message."""

    bandwidth: float
    latency_s: float


class StanzaLayout(NamedTuple):
    """An iteration of n nodes.

    n_fc: FC workers, 0 of a layout without. batches: computed in an iteration. n_bytes: sent by all nodes together,
    labels (label_bytes) not counted in. link_bytes: through the busiest link, in one direction, likewise.
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
    """rows: Stanza's layouts, by n_fc. best: the one with the most samples a second, of equals with the fewest FC
    workers. second: the next best, if there is another."""

    rows: tuple[StanzaLayout, ...]
    best: StanzaLayout
    second: StanzaLayout | None

    @property
    def margin(self) -> float:
        """How much faster the best one is than the second, as a share of that; inf without."""
        return math.inf if self.second is None else faster(self.best, self.second)


# ---- bytes ----


def parameter_server_bytes(profile: SplitProfile, n_workers: int) -> int:
    """n workers send a gradient and are sent the weights. Servers are on nodes of their own, however many."""
    return 2 * n_workers * profile.shape.model_bytes


def ring_bytes(profile: SplitProfile, n_workers: int) -> int:
    """The same for a parameter server that lies in shards on the n workers, who need send nobody their own shard's."""
    return 2 * (n_workers - 1) * profile.shape.model_bytes


def stanza_bytes(profile: SplitProfile, groups: Groups) -> int:
    """Without labels: `label_bytes`."""
    rings = (groups.n_convolution - 1) * profile.shape.conv_bytes + (groups.n_fc - 1) * profile.shape.fc_bytes
    return 2 * (rings + groups.n_convolution * profile.cut_bytes)


def label_bytes(profile: SplitProfile, groups: Groups) -> int:
    return groups.n_convolution * profile.batch * profile.shape.label_bytes


def ring_link_bytes(n_bytes: int, n_workers: int) -> float:
    """What a node of a ring sends, and receives, to sum so many bytes; or of a server in shards on all workers."""
    return 2 * (n_workers - 1) / n_workers * n_bytes


def convolution_link_bytes(profile: SplitProfile, groups: Groups) -> float:
    """What a convolution worker sends, labels not counted in, and receives."""
    return ring_link_bytes(profile.shape.conv_bytes, groups.n_convolution) + profile.cut_bytes


def fc_link_bytes(profile: SplitProfile, groups: Groups) -> float:
    """What the FC worker that serves the most sends, and receives, labels not counted in."""
    return ring_link_bytes(profile.shape.fc_bytes, groups.n_fc) + most_served(groups) * profile.cut_bytes


# ---- seconds ----


def most_served(groups: Groups) -> int:
    return max(len(groups.served(fc)) for fc in groups.fc)


def ring_s(link: Link, n_workers: int, n_bytes: int) -> float:
    """Summing so many bytes on equal links, which nobody else uses."""
    return 2 * (n_workers - 1) * (link.latency_s + n_bytes / n_workers / link.bandwidth)


def stanza_s(profile: SplitProfile, link: Link, groups: Groups, micro_batches: int = 1) -> float:
    m, pieces = most_served(groups), micro_batches
    forward, backward = profile.times.conv_forward_s / pieces, profile.times.conv_backward_s / pieces
    above = profile.times.above_s(m) / pieces
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
    return profile.times.batch_s + ring_s(link, n_nodes, profile.shape.model_bytes)


def dedicated_server_s(profile: SplitProfile, link: Link, n_nodes: int) -> float:
    """One of the nodes is the server, through whose link all push and read: n_nodes - 1 compute."""
    return profile.times.batch_s + 2 * (link.latency_s + (n_nodes - 1) * profile.shape.model_bytes / link.bandwidth)


def sharded_server_s(profile: SplitProfile, link: Link, n_nodes: int) -> float:
    """Every node computes, and is the server of an equal shard."""
    once = ring_link_bytes(profile.shape.model_bytes, n_nodes) / 2
    return profile.times.batch_s + 2 * (link.latency_s + once / link.bandwidth)


# ---- layouts ----


def stanza(profile: SplitProfile, link: Link, groups: Groups, micro_batches: int = 1) -> StanzaLayout:
    seconds = stanza_s(profile, link, groups, micro_batches)
    link_bytes = max(convolution_link_bytes(profile, groups), fc_link_bytes(profile, groups))
    batches, labels = groups.n_convolution, label_bytes(profile, groups)
    per_s = _per_s(profile, batches, seconds)
    return StanzaLayout(
        "stanza", groups.n_fc, batches, seconds, per_s, stanza_bytes(profile, groups), labels, link_bytes
    )


def without_separation(profile: SplitProfile, link: Link, n_nodes: int) -> tuple[StanzaLayout, ...]:
    """On the same number of nodes: one parameter server with n_nodes - 1 workers, a parameter server in shards on
    n_nodes workers, and ring all-reduce among n_nodes workers."""
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
    """How many of n_nodes, at least 2, should train the fully-connected layers: 1 to n_nodes / 2 are all tried. More
    would be given nothing."""
    every = [Groups(n_nodes, n_fc) for n_fc in range(1, n_nodes // 2 + 1)]
    rows = tuple(stanza(profile, link, groups, micro_batches) for groups in every)
    best, *others = sorted(rows, key=lambda row: (-row.samples_per_s, row.n_fc))
    return Plan(rows, best, others[0] if others else None)


def faster(one: StanzaLayout, other: StanzaLayout) -> float:
    """By which share of the other's samples a second."""
    return 0.0 if one.samples_per_s == other.samples_per_s else one.samples_per_s / other.samples_per_s - 1
