"""Reference implementation of DSSP's two algorithms with plain lists, against which the fast one is compared."""

import math
from typing import NamedTuple

from hpcsync.paradigms.dssp import DSSP
from hpcsync.paradigms.events import Apply, Grant, Joined, PushInfo
from tests.unit.paradigms.schedule import run


def brute_force(pushed_s, interval_s, slowest_begin_s, slowest_interval_s, r_max, clamp):
    """Algorithm 2, lines 6 to 8, as written: every pair, then the smallest (distance, r, k)."""
    own_s = [pushed_s + r * interval_s for r in range(r_max + 1)]
    slowest_s = [slowest_begin_s + (k + 1) * slowest_interval_s for k in range(r_max + 1)]
    if clamp:
        slowest_s[0] = max(slowest_s[0], pushed_s)
    _, r, k = min((abs(slowest_s[k] - own_s[r]), r, k) for r in range(r_max + 1) for k in range(r_max + 1))
    return r, slowest_s[k] - own_s[r]


class Readings(NamedTuple):
    """What is read into b, c, i and j; True as in bounded mode, False as in paper mode."""

    b: bool
    c: bool
    i: bool
    j: bool

    @property
    def options(self):
        return {
            "first_costs": self.b,
            "enforce_max": self.c,
            "interval_begin": "grant" if self.i else "push",
            "overdue": "now" if self.j else "past",
        }


READINGS = {"bounded": Readings(True, True, True, True), "paper": Readings(False, False, False, False)}


class Reference:
    """Algorithms 1 and 2 for one run. t and r are named as in the paper, `ok` is its OK."""

    def __init__(self, n_workers, s_l, s_u, readings):
        self.s_l, self.s_u, self.read = s_l, s_u, readings
        self.t, self.r = [0] * n_workers, [0] * n_workers
        self.pushes, self.least = [0] * n_workers, 0
        self.active, self.blocked = set(range(n_workers)), {}
        self.pushed_s, self.ok_s = [[] for _ in range(n_workers)], [-math.inf] * n_workers
        self.intervals_s = [[] for _ in range(n_workers)]

    def lead(self, p):
        return self.t[p] - min(self.t[q] for q in self.active)

    def ok(self, p, now_s):
        self.ok_s[p] = now_s
        return ("ok", p, self.pushes[p] + 1, self.lead(p), self.r[p], now_s - self.blocked.pop(p, now_s))

    def release(self, now_s):
        ready = [q for q in self.blocked if self.lead(q) <= self.s_l]
        return [self.ok(q, now_s) for q in sorted(ready, key=lambda q: (self.t[q], q))]

    def left(self, p, now_s):
        self.active.discard(p)
        self.blocked.pop(p, None)
        self.least = min((self.t[q] for q in self.active), default=self.least)
        return self.release(now_s) if self.active else []

    def joined(self, p, now_s):
        self.t[p], self.r[p] = max(self.t[p], self.least), 0
        self.pushed_s[p], self.intervals_s[p] = [], []
        self.active.add(p)
        if self.lead(p) <= self.s_l:
            return [self.ok(p, now_s)]
        self.blocked[p] = now_s
        return []

    def pushed(self, p, now_s):
        # (i) The interval of the first push after a join is known too if it begins with the OK.
        begins_s = self.pushed_s[p][-1:] + [self.ok_s[p]] * (self.read.i and self.ok_s[p] > -math.inf)
        if begins_s:
            self.intervals_s[p].append(now_s - max(begins_s))
        self.pushed_s[p].append(now_s)
        self.pushes[p] += 1
        self.t[p] += 1
        self.least = min(self.t[q] for q in self.active)
        return [("apply", p), *self.decide(p, now_s), *self.release(now_s)]

    def decide(self, p, now_s):
        lead = self.lead(p)
        if self.read.c and lead > self.s_u:
            self.r[p] = 0
        elif self.r[p] > 0:
            self.r[p] -= 1
            return [self.ok(p, now_s)]
        elif lead <= self.s_l:
            return [self.ok(p, now_s)]
        elif self.t[p] == max(self.t[q] for q in self.active) and self.most(lead) > 0:
            r, slowest = self.controller(p, now_s)
            granted = min(r, self.most(lead))
            decision = ("decision", p, granted, r, slowest)
            if granted > 0:
                self.r[p] = granted - 1 if self.read.b else granted
                return [decision, self.ok(p, now_s)]
            self.blocked[p] = now_s
            return [decision]
        self.blocked[p] = now_s
        return []

    def most(self, lead):
        if not self.read.c:
            return self.s_u - self.s_l
        return self.s_u - lead + 1 if self.read.b else self.s_u - lead

    def begin_s(self, q):
        # (i) If its interval begins with the OK, of which there is none since a push that still waits.
        return max(self.pushed_s[q][-1], self.ok_s[q]) if self.read.i else self.pushed_s[q][-1]

    def controller(self, p, now_s):
        fewest = min(self.t[q] for q in self.active)
        slowest = [q for q in self.active if self.t[q] == fewest]
        if not all(self.intervals_s[q] for q in [p, *slowest]):
            return 0, None
        s = max(slowest, key=lambda q: (self.begin_s(q) + self.intervals_s[q][-1], -q))
        seen = now_s, self.intervals_s[p][-1], self.begin_s(s), self.intervals_s[s][-1]
        return brute_force(*seen, self.s_u - self.s_l, self.read.j)[0], s


def in_reference_terms(action):
    if isinstance(action, Apply):
        return ("apply", *action.workers)
    if isinstance(action, Grant):
        held_s = action.held_s
        return ("ok", action.worker, action.iteration, action.gap_iters, action.credits, held_s)
    inputs = dict(zip(DSSP.decision_fields, action.inputs, strict=True))
    slowest = None if math.isnan(inputs["slowest"]) else inputs["slowest"]
    return ("decision", action.worker, action.chosen, inputs["r_star"], slowest)


def disagreement(paradigm, s_l, s_u, readings, schedule):
    """Return the first event that this paradigm and the reference answer differently; None if there is none."""
    reference = Reference(schedule.n_workers, s_l, s_u, readings)
    for event, actions in run(paradigm, schedule, check=False).trace:
        answer = {PushInfo: reference.pushed, Joined: reference.joined}.get(type(event), reference.left)
        if [in_reference_terms(action) for action in actions] != answer(event.worker, event.now_s):
            return event
    return None
