"""Declaration of a paradigm: the keys of its [paradigm] table with their limits, and its traits.

A subclass of `ParadigmOptions` in a module of this folder is all that makes a paradigm known: the job file, both
engines, `hpcsync show`, figures, summaries, audits, citations and the documentation read it. Fields are keys of the job
file. Their types carry limits (`annotated_types`, `FINITE`, `Allowed`), which `hpcsync.config` checks; the docstring's
section *Parameters* describes them in the documentation, in Markdown. A new paradigm states the traits in which it
differs from the defaults here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from annotated_types import Ge, Gt, Le, Predicate

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.papers import Reference
from hpcsync.paradigms.peer_method import PeerMethod
from hpcsync.planning.layer_groups import Groups

# ---- types of options ----

FINITE = Predicate(math.isfinite)
Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0), FINITE]
NotNegative = Annotated[float, Ge(0), FINITE]
Finite = Annotated[float, FINITE]
Share = Annotated[float, Gt(0), Le(1)]
Part = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True)
class Allowed:
    """Limit of an option in words, as in "must be a whole number of at least 1".

    Attributes
    ----------
    words
        What is allowed.
    test
        Returns whether a value is allowed, which may be of any type. None: the type and its limits say it.
    """

    words: str
    test: Callable[[Any], bool] | None = None


def default(value: Any, words: str) -> Any:
    """Return a field with this default, which the documentation describes in these words."""
    return field(default=value, metadata={"words": words})


class Computed:
    """Place of a default that has not yet been computed."""


def computed(function: Callable[[Mapping[str, Any]], Any], words: str) -> Any:
    """Return a field whose default follows from the options before it, as `function` of these by name."""
    return field(default=Computed(), metadata={"words": words, "function": function})


class OptionError(ValueError):
    """Value that is not allowed beside others.

    Parameters
    ----------
    key
        Key of the job file, such as paradigm.steps_fine.
    value
        Its value; None: it is missing.
    must
        What it must be, such as "must be at most 3".
    """

    def __init__(self, key: str, value: Any, must: str) -> None:
        super().__init__(f"{key} = {value}: {must}")
        self.key, self.value, self.must = key, value, must


class JobTables(Protocol):
    """Tables of a job beside [paradigm], with which options may be in conflict."""

    @property
    def workload(self) -> Any:
        """Table [workload]."""

    @property
    def cluster(self) -> Any:
        """Table [cluster]."""

    @property
    def stop(self) -> Any:
        """Table [stop]."""

    @property
    def optimizer(self) -> Any:
        """Table [optimizer]."""


# ---- traits ----


class OuterMomentum(NamedTuple):
    """Momentum of the servers' steps along changes of weights: `hpcsync.training.update_rules.DelayedNesterov`."""

    momentum: float
    period: int
    between: float


@dataclass(frozen=True, kw_only=True)
class ParadigmOptions:
    """Options and traits of a paradigm.

    Attributes
    ----------
    policy
        Creates the state machine of the servers from the number of workers and the options; None: there are no servers.
    contribution
        What a worker sends: its gradient, the change of its weights, its weights, or activations of separated layers.
    of_one_version
        True if every contribution of an update is computed from the version just before that update.
    grants_first
        True if workers are granted before the update that contains their contributions.
    waits_for_update
        True if a worker is granted in the answer in which an update takes its contribution, whenever that is.
    one_model
        True if all workers together make the same step, without servers.
    lr_scale
        Default of `optimizer.async_lr_scale`.
    shares_samples
        True if each grant takes the next samples of the run, so that a worker's share follows from its steps.
    timed_steps
        True if a push may consist of as many local steps as fit into a given time.
    drops
        Why contributions are dropped: "late" ones are not of the current version, "stale" ones exceed a bound.
    ratios
        Options that set the compression ratio, None for a compression without one.
    excludes
        Options beside which others have no effect: these, and why.
    form_key
        Option that names the form of the paradigm.
    separates_layers
        True if workers train different layers.
    pairwise
        True if a worker that averages with a peer changes the peer's weights, too.
    least_workers
        Smallest number of workers.
    page
        Page of the documentation; by default it has the paradigm's name.
    waiting, update, source
        Cells of the documentation's table of paradigms. Messages use `waiting` where neither a bound on the lead nor a
        guarantee says who waits.
    colour
        Colour in figures.
    place
        Position in lists of all paradigms.
    """

    name: str

    policy: ClassVar[Callable[..., Paradigm] | None] = None
    contribution: ClassVar[Literal["gradient", "change", "position", "activation"]] = "gradient"
    of_one_version: ClassVar[bool] = False
    grants_first: ClassVar[bool] = False
    waits_for_update: ClassVar[bool] = False
    one_model: ClassVar[bool] = False
    lr_scale: ClassVar[float | str] = 1.0
    shares_samples: ClassVar[bool] = False
    timed_steps: ClassVar[bool] = False
    drops: ClassVar[Literal["", "late", "stale"]] = ""
    ratios: ClassVar[tuple[str, ...]] = ()
    excludes: ClassVar[Mapping[str, tuple[tuple[str, ...], str]]] = MappingProxyType({})
    form_key: ClassVar[str] = "name"
    separates_layers: ClassVar[bool] = False
    pairwise: ClassVar[bool] = False
    least_workers: ClassVar[int] = 1
    page: ClassVar[str] = ""
    waiting: ClassVar[str] = ""
    update: ClassVar[str] = ""
    source: ClassVar[str] = ""
    colour: ClassVar[str] = "#000000"
    place: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        for each in fields(self):
            if isinstance(getattr(self, each.name), Computed):
                object.__setattr__(self, each.name, each.metadata["function"](vars(self)))
        self._check_options()

    def _check_options(self) -> None:
        """Raise OptionError if options contradict each other."""

    def check(self, job: JobTables) -> None:
        """Raise OptionError if the options do not fit the other tables of the job."""

    def check_real(self, job: JobTables) -> None:
        """Raise OptionError for a job that only a simulation can run."""

    # ---- what follows from the options ----

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `policy`."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "name"}

    def arguments(self, job: JobTables) -> dict[str, Any]:
        """Return the keyword arguments of `policy` for this job."""
        return self.options

    @property
    def phases(self) -> tuple[ParadigmOptions, ...]:
        """Paradigms that follow each other, from a decision "switch" to the next; by default this one alone."""
        return (self,)

    @property
    def has_servers(self) -> bool:
        """True if servers hold the weights."""
        return self.policy is not None

    @property
    def steps_on_workers(self) -> bool:
        """True if every worker has its own weights and an optimizer that updates them."""
        return not self.has_servers or self.contribution != "gradient"

    @property
    def allocates(self) -> bool:
        """True if batches may be allocated by the workers' speeds."""
        return self.contribution == "gradient"

    @property
    def form(self) -> str:
        """Name of the paradigm, or of its form."""
        return str(getattr(self, self.form_key))

    @property
    def stated_form(self) -> str:
        """The option that makes the paradigm what it is, as in a job file, for messages."""
        return f'paradigm.{self.form_key} = "{self.form}"'

    @property
    def _exchange(self) -> PeerMethod | None:
        """What workers without servers do, for its traits; None: there are servers."""
        return self.method(max(2, self.least_workers), 0)

    @property
    def lead_bound(self) -> float:
        """Largest lead over the slowest worker at which a worker starts, in iterations or pushes; inf: no bound.

        Without servers it follows from `method`, whose workers exchange together or not.
        """
        exchange = self._exchange
        return 0 if exchange is not None and exchange.synchronous else math.inf

    @property
    def lead_aim(self) -> float:
        """Lead that is aimed at, guaranteed or not."""
        return self.lead_bound

    def zero_time_workers(self, n_workers: int) -> int:
        """Return how many workers can iterate for ever while the others compute."""
        return n_workers if self.lead_bound < math.inf else 1

    @property
    def counts_workers(self) -> bool:
        """True if an update takes one contribution of each of several workers, so that a departure may complete it."""
        return False

    @property
    def merges(self) -> bool:
        """True if the push of a blocked worker is added to the next update, whoever makes it."""
        return False

    @property
    def mixes_pushes(self) -> bool:
        """True if an update can be of pushes with which workers are at different steps."""
        return self.merges

    @property
    def applies_at_release(self) -> bool:
        """True if the push of a blocked worker is an update of its own, made when the worker is released."""
        return False

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Keys of `[stop]` from which decisions follow, so that a resumed run must keep them."""
        return ()

    @property
    def needs_all(self) -> bool:
        """True if the run can be resumed only with all of its workers."""
        return False

    @property
    def uses_evaluations(self) -> bool:
        """True if the policy decides by evaluations of the model."""
        return False

    @property
    def requests_evaluations(self) -> bool:
        """True if the policy asks for evaluations itself, beside those of `evaluation.every_samples`."""
        return False

    @property
    def exchange_every(self) -> int:
        """Iterations from one push, or exchange of `method`, to the next, unless the policy sets another number."""
        exchange = self._exchange
        return 1 if exchange is None else exchange.period

    def moving_rate(self, n_workers: int) -> float:
        """Return the factor of the servers' updates that takes the place of the learning rate; 1 where none does."""
        return 1.0

    def outer(self, n_workers: int) -> OuterMomentum | None:
        """Return the momentum of the servers' steps along changes; None: they add the changes."""
        return None

    @property
    def aborts(self) -> bool:
        """True if the computation of a worker may be cancelled."""
        return False

    def pieces(self, worker: int, n_workers: int) -> int:
        """Return the number of pieces in which this worker's loop computes a batch."""
        return 1

    def k_at_first(self, n_workers: int) -> int | None:
        """Return the contributions of the first update, if updates take a number of them."""
        return None

    @property
    def k_rules(self) -> tuple[str, ...]:
        """Rules by which that number changes during the run: "loss", "state"."""
        return ()

    @property
    def discounts(self) -> bool:
        """True if a contribution weighs one over its staleness."""
        return False

    @property
    def commits_at_first(self) -> int | None:
        """First number of pushes of each worker in a period, if the policy sets one."""
        return None

    @property
    def credits_max(self) -> int | None:
        """Most iterations that a controller of the lead can grant beyond its lower bound; None: there is none."""
        return None

    def peers(self, n_workers: int, seed: int) -> Any:
        """Return the `gossip.PeerSelection`; None: all workers exchange with all, or with servers."""
        return None

    def method(self, n_workers: int, seed: int) -> PeerMethod | None:
        """Return what workers without servers do at the end of an iteration; None: there are servers."""
        return None

    @property
    def delay_correction(self) -> tuple[float, float | None] | None:
        """Strength and decay of the servers' correction of delayed gradients (`update_rules`); None: there is none."""
        return None

    # ---- separated layers ----

    def groups(self, n_workers: int) -> Groups | None:
        """Return the groups of workers that train different layers; None if all train the whole model."""
        return None

    @property
    def layer_pieces(self) -> int:
        """Number of pieces in which separated layers compute a batch; 1 without."""
        return 1

    def work_share(self, worker: int, n_workers: int) -> float:
        """Return the worker's share of the computation of a whole iteration."""
        return 1.0

    @property
    def open_keys(self) -> tuple[str, ...]:
        """Options whose values are chosen when the run starts."""
        return ()

    # ---- audit and papers ----

    @property
    def guarantees(self) -> tuple[str, ...]:
        """Guarantees that the audit of a run with servers verifies, as named in `hpcsync.audit.bounds`."""
        return ()

    @property
    def papers(self) -> tuple[Reference, ...]:
        """Papers behind the paradigm."""
        return ()

    # ---- in words ----

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        if self.lead_bound == math.inf:
            if "nobody-waits" in self.guarantees or not self.has_servers:
                return "no worker waits for another"
            return self.waiting.replace("`", "") or "workers wait as its policy decides"
        if self.lead_bound > 0:
            unit = "pushes" if self.steps_on_workers else "iterations"
            return f"a worker more than {self.lead_bound:g} {unit} ahead of the slowest waits for it"
        n = self.exchange_every
        if n == 1 and self.contribution == "change":  # of as many local steps as are granted
            return "all workers wait for each other after every push"
        return f"all workers wait for each other {'in every iteration' if n == 1 else f'every {n} iterations'}"

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        return self.name.upper()

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        return self.bound

    def details(self, n_workers: int) -> list[tuple[str, str]]:
        """Return further rows of `hpcsync show`, as names and values."""
        return []

    def moves(self, size: str, sent: str, *, compressed: bool) -> tuple[str, str]:
        """Return when bytes move, and which.

        Parameters
        ----------
        size
            Bytes of the weights, in words.
        sent
            Bytes that a worker sends, in words that follow those of the bytes that it receives.
        compressed
            Whether pushes are compressed.
        """
        if not self.has_servers:
            return every(self.exchange_every), f"{size} of weights from each worker to others"
        if self.contribution == "change":
            return "a push moves", f"{size} of weights to the worker, and {sent} of weight change from it"
        return "an iteration moves", f"{size} of weights to the worker, and {sent} of gradient from it"

    def sent(self, nominal: Callable[[float], str], takes_ratio: bool, compression: str) -> str:
        """Return the bytes of a compressed push in words.

        Parameters
        ----------
        nominal
            Returns the bytes in words for a compression ratio; NaN: as the compression is configured.
        takes_ratio
            Whether the options in `ratios` set that of the compression.
        compression
            Name of the compression.
        """
        return f"{nominal(math.nan)} ({compression})"


def every(n: int) -> str:
    """Return the name of the row that says what `n` iterations move."""
    return "an iteration moves" if n == 1 else f"every {n} iterations move"
