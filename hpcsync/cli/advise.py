"""Command `hpcsync advise`: the paradigm with which a job should be trained on its cluster.

Candidates are trained with real gradients in virtual time, in three trials of growing length (successive halving). All
of them get the same virtual time, seeds and choice of learning rates; the best third, and the reference, go on to the
next trial. The last one has seeds of its own. What is advised is then trained with further seeds, from which its time
is predicted: it was chosen because it was fast with the others.
"""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcsync.cli.advice_candidates import (
    AtAnEnd,
    Trained,
    at_an_end,
    best_rates,
    candidate,
    described,
    further,
    label_of,
    needs_no_options,
    stem,
)
from hpcsync.cli.advice_trials import BudgetSpent, Trials
from hpcsync.cli.report import check_text
from hpcsync.config import job as jobs
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, Script
from hpcsync.paradigms import OPTIONS
from hpcsync.planning.candidates import LINK_SHARE, RATES, Candidate, candidates, kept
from hpcsync.report.wording import plural, rounded
from hpcsync.system.atomic_files import whole
from hpcsync.system.signals import Interrupted, interrupt, on_signals
from hpcsync.system.standard_output import at_least_80_columns

if TYPE_CHECKING:
    from hpcsync.report.advice import Trial
    from hpcsync.report.summary import Summary
    from hpcsync.report.variants import Variants
    from hpcsync.trace.reader import Trace

SHARES = (1 / 9, 1 / 3, 1.0)  # of the virtual time of a trial
KEPT = (5, 3)  # candidates that are kept at least, after the first trial and the second
TRIAL_SEEDS = (1, 2)  # of the first trial and the second
FIRST_SEED = 1_000  # counted from the job's: seeds of the trials before the last
FURTHER_SEED = 2_000  # likewise: seeds of the prediction
REFERENCES = ("bsp", "allreduce")  # the first that can be simulated is kept to the end
MEETS_OTHERS = 1.5  # pushes at a time from which on a worker's rate may be the share that others leave it
MEASURED_UPDATES = 200  # of the reference without gradients, from which the length of the trials follows


class Asked(NamedTuple):
    """Options of the command line."""

    measured: Path | None = None
    paradigms: Sequence[str] = ()
    workers: Sequence[int] = ()
    extrapolate: bool = False
    seeds: int = 3
    budget_s: float | None = None
    at_once: int = 1
    overrides: Sequence[str] = ()
    out: Path | None = None
    as_json: bool = False


class Found(NamedTuple):
    """Trial that has ended, and the summaries by seed of each candidate with its best rate."""

    trial: Trial
    summaries: dict[Trained, dict[int, Summary]]


def main(path: Path, asked: Asked) -> int:
    """Advise on the job at this path, for each of the asked numbers of workers; return the exit status.

    Raises
    ------
    JobError
        For a job that cannot be advised on, before anything is simulated.
    """
    if asked.extrapolate and asked.measured is None:
        raise JobError("--extrapolate: must come with --from: times of further workers are drawn from a run's")
    labels = {label_of(candidate(text)) for text in asked.paradigms}
    if asked.paradigms and len(labels) < max(2, len(asked.paradigms)):
        given = ", ".join(asked.paradigms)
        raise JobError(f"--paradigm {given}: must be given at least twice, each time for another candidate")
    advisers = [_Adviser(path, asked, n_workers) for n_workers in asked.workers or (None,)]
    try:
        with on_signals(interrupt):
            return max([adviser.advise() for adviser in advisers])
    except Interrupted:
        print("hpcsync: interrupted; the same command resumes", file=sys.stderr)
        return 1


def worker_counts(text: str) -> list[int]:
    """Return the numbers of an option `--workers`, such as "4,8". Raises JobError for another text."""
    try:
        found = [int(word) for word in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if any(n < 2 for n in found) or len(set(found)) < len(found):
        raise JobError(f"--workers {text}: must be different numbers of at least 2, such as 4,8")
    return found


class _Adviser:
    """One advice under way."""

    def __init__(self, path: Path, asked: Asked, n_workers: int | None) -> None:
        from hpcsync.config.user_code import import_beside

        self._asked = asked
        declared = jobs.load(path, asked.overrides)
        self._job = declared if n_workers is None else _of_workers(declared, n_workers, asked.measured is not None)
        _refuse(self._job, measured=asked.measured is not None)
        import_beside(path)
        self._out = asked.out or Path("runs") / f"{self._job.name}-advice"
        if n_workers is not None:
            self._out /= f"workers-{n_workers}"
        self._begin_s = 0.0
        self._left_out: dict[str, str] = {}
        self._noted: dict[int, dict[str, Any]] = {}  # what came of each trial, by number
        self._link_share = 0.0  # of a synchronous iteration
        self._ends: dict[str, AtAnEnd] = {}  # candidates whose best rate is at an end of those tried
        self._trace: Trace | None = None
        times: list[Any] = []
        if asked.measured is not None:
            from hpcsync.simulator.measured_cluster import computation_s
            from hpcsync.trace.reader import TraceError, load

            try:
                self._trace = load(asked.measured)
            except TraceError as error:
                raise JobError(f"--from: {error}") from None
            times = computation_s(self._trace, self._job, asked.extrapolate)
        self._trials = Trials(
            self._job,
            path,
            self._out,
            trace=self._trace,
            times=times,
            at_once=asked.at_once,
            keeps_scale=_states_scale(path, asked.overrides),
        )

    def advise(self) -> int:
        """Carry out the trials, print the advice and write it."""
        from hpcsync.run_dir import layout

        self._begin_s = time.monotonic()
        if self._asked.budget_s is not None:
            self._trials.until_s = self._begin_s + self._asked.budget_s / max(1, len(self._asked.workers))
        layout.refuse_taken(self._out)
        with layout.claimed(self._out):
            limit_s, iteration_s, self._link_share = self._limit_s()
            return self._carry_out(self._field(limit_s, iteration_s), limit_s)

    def _carry_out(self, field: Sequence[Trained], limit_s: float) -> int:
        """Try these candidates, in runs of `limit_s` virtual seconds at most."""
        from hpcsync.report import variants
        from hpcsync.report.advice import Trial

        check_text(self._out / "advice.json")
        if self._asked.workers:
            print(f"{self._job.cluster.workers} workers", file=sys.stdout if not self._asked.as_json else sys.stderr)
        print(f"{len(field)} candidates, up to {rounded(limit_s)} virtual s each, in {self._out}", file=sys.stderr)
        reference = next((name for name in REFERENCES if any(each.label == name for each in field)), None)
        order, first = [each.label for each in field], self._job.seed
        every = [each._replace(factor=factor) for each in field for factor in RATES]
        last, spent = None, ""
        try:
            for n, share in enumerate(SHARES):
                is_last = n == len(SHARES) - 1
                begin, n_seeds = (first, self._asked.seeds) if is_last else (first + FIRST_SEED, TRIAL_SEEDS[n])
                seeds = range(begin, begin + n_seeds)
                found: dict[Trained, dict[int, Summary]] = {}
                rates, about = every, ""
                while rates:
                    found |= self._trials.run(n + 1, rates, seeds, share * limit_s, about)
                    best = [trained for _, trained in best_rates(found, n_seeds).values()]
                    last = Found(Trial(n + 1, share, limit_s, n_seeds), {trained: found[trained] for trained in best})
                    self._note(last)
                    rates, about = [], "further learning rates"
                    if n == 0:
                        self._ends = at_an_end(found, n_seeds, self._trials.failed)
                        rates = further(self._ends)
                assert last is not None, "there are candidates"
                if not is_last:
                    every = self._best(last, KEPT[n], reference)
        except BudgetSpent as error:
            spent = str(error)
        except JobError as error:
            if last is None:
                raise
            spent = str(error)
            print(f"hpcsync: {spent}", file=sys.stderr)
        if last is None:
            print(f"hpcsync: {spent}", file=sys.stderr)
            return 1
        compared = variants.compare({trained.label: runs for trained, runs in last.summaries.items()})
        return self._say(compared, order, reference, last, spent)

    def _field(self, limit_s: float, iteration_s: float) -> list[Trained]:
        """Return the candidates that suit the job and every trial; note the others with the reason."""
        n_workers = self._job.cluster.workers
        if self._asked.paradigms:
            asked = [candidate(text) for text in self._asked.paradigms]
        else:
            link_share = 0.0 if self._job.compresses else self._link_share
            asked = candidates(n_workers, iteration_s, link_share, [*filter(needs_no_options, OPTIONS)])
        found = []
        for each in asked:
            trained = Trained(label_of(each), each)
            try:
                self._check(trained, float(f"{SHARES[0] * limit_s:.4g}"))
                found.append(trained)
            except JobError as error:
                self._left_out[trained.label] = str(error)
        if len(found) < 2:
            raise JobError(f"advise: fewer than two candidates suit the job: {'; '.join(self._left_out.values())}")
        return found

    def _check(self, trained: Trained, shortest_s: float) -> None:
        """Raise JobError for a candidate that does not suit the job, or the shortest trial."""
        from hpcsync.core.job_validation import check

        table = self._trials.table(trained, self._job.seed, 1e9)
        job = Job.from_table(table)
        jobs.refuse_unused(job, table)
        check(job)
        try:
            Job.from_table(self._trials.table(trained, self._job.seed, shortest_s))
        except JobError as error:
            raise JobError(f"the first trial is too short: {error}") from None

    def _limit_s(self) -> tuple[float, float, float]:
        """Return the seconds of the last trial and of a synchronous iteration, and the share of its transfers.

        The virtual time is that which the reference needs for the samples after which the job stops.
        """
        from hpcsync.simulator.measured_time import updates_s

        refusals: list[str] = []
        for name in REFERENCES:
            table = self._trials.table(Trained(name, Candidate({"name": name})), self._job.seed, 1e9)
            try:
                iteration_s = updates_s(Job.from_table(table), MEASURED_UPDATES)
                table["cluster"].pop("network", None)  # what remains is computing
                computing_s = updates_s(Job.from_table(table), MEASURED_UPDATES)
                break
            except JobError as error:
                refusals.append(str(error))
        else:
            neither = f"advise: neither {' nor '.join(REFERENCES)} can be simulated: "
            raise JobError(refusals[0] if len(set(refusals)) == 1 else neither + "; ".join(refusals))
        stop = self._job.stop
        assert not isinstance(self._job.workload, Script)
        limits = [] if stop.seconds is None else [stop.seconds]
        if stop.samples is not None:
            limits.append(stop.samples / (self._job.workload.batch_size * self._job.cluster.workers) * iteration_s)
        if stop.updates is not None:
            limits.append(stop.updates * iteration_s)
        return min(limits), iteration_s, 1 - computing_s / iteration_s if iteration_s else 0.0

    def _best(self, found: Found, least: int, reference: str | None) -> list[Trained]:
        """Return the best third of the candidates, and the reference."""
        from hpcsync.report.variants import merit

        labels = {trained.label: trained for trained in found.summaries}
        merits = [merit(runs.values(), found.trial.n_seeds) for runs in found.summaries.values()]
        chosen = [list(labels)[place] for place in sorted(kept(merits, least))]
        if reference in labels and reference not in chosen:
            chosen.insert(0, reference)
        return [labels[label] for label in chosen]

    def _note(self, found: Found) -> None:
        """Keep what each candidate did in a trial with its best rate, for `advice.json`."""
        from hpcsync.report.advice import trial_numbers

        rows = [
            {
                "label": trained.label,
                "lr_factor": trained.factor,
                "folder": f"trial-{found.trial.number}/{stem(trained)}",
                **trial_numbers(runs),
            }
            for trained, runs in found.summaries.items()
        ]
        limit_s = found.trial.share * found.trial.limit_s
        self._noted[found.trial.number] = {"limit_s": limit_s, "candidates": rows}

    def _say(self, compared: Variants, order: Sequence[str], reference: str | None, last: Found, spent: str) -> int:
        """Print what came of the last trial that ended, and write it; `spent` says how the budget ended the advice."""
        from rich.console import Console

        from hpcsync.report import advice as reports

        advice = reports.conclude(compared, order)
        chosen = {trained.label: trained for trained in last.summaries}
        lines = reports.verdict(advice, compared.target, last.trial)
        if reference not in (None, advice.advised) and advice.advised is not None and reference in chosen:
            runs = {trained.label: found for trained, found in last.summaries.items()}
            lines.append(reports.why(runs[advice.advised], runs[reference], reference))
        if last.trial.share == 1:
            earlier = [noted for number, noted in self._noted.items() if number < last.trial.number]
            if by_loss := reports.by_loss(earlier, len(chosen)):
                lines.append(by_loss)
        lines += [spent] if spent else []
        lines += self._unknown()
        factors = {label: trained.factor for label, trained in chosen.items()}
        job_file: Path | None = None
        predicted: dict[str, float] = {}
        if advice.advised is not None:
            simulated, by = self._further(chosen[advice.advised], last)
            predicted = reports.prediction(simulated)
            lines.append(self._prediction(predicted, by))
            if (at := self._ends.get(advice.advised)) is not None:
                end, beyond = ("largest", "larger") if at.step > 1 else ("smallest", "smaller")
                factor = f"{factors[advice.advised]:g} times the job's"
                lines.append(f"Its learning rate, {factor}, is the {end} that was tried: a {beyond} one may be better.")
            job_file = self._out / "advised.toml"
            advised, exceeded = self._advised(chosen[advice.advised], predicted, simulated, last.trial.limit_s)
            with whole(job_file) as unfinished:
                unfinished.write_text(advised.to_toml(), encoding="utf-8")
            lines.append(f"Job file: {job_file}, for {advised.cluster.ranks} ranks")
            if exceeded:
                limit = f"{advised.stop.seconds:g} s instead of {' and '.join(exceeded)}"
                lines.append(f"Its limit is {limit}, which simulated runs exceeded.")
        found = {
            "advised": advice.advised,
            "indistinguishable": advice.alike,
            "target": compared.target,
            "lines": lines,
            "workers": self._job.cluster.workers,
            "measured_workers": None if self._trace is None else self._trace.n_workers,
            "limit_s": last.trial.limit_s,
            "share": last.trial.share,
            "times": "the job's cluster" if self._trace is None else str(self._trace.path),
            "lr_factors": factors,
            "predicted": predicted,
            "ranking": reports.numbers(advice),
            "trials": [*self._noted.values()],
            "left_out": self._left_out,
            "failed": {described(trained): str(log) for trained, log in self._trials.failed.items()},
            "simulated": self._trials.n_simulated,
            "took_s": time.monotonic() - self._begin_s,
            "job": None if job_file is None else str(job_file),
        }
        with whole(self._out / "advice.json") as unfinished:
            unfinished.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if self._asked.as_json:
            print(json.dumps(found, indent=1))
        else:
            console = at_least_80_columns(Console(highlight=False, markup=False))
            console.print(reports.table(advice, factors))
            console.print()
            for line in lines:
                console.print(line, soft_wrap=True)
        return 0 if advice.advised is not None else 1

    def _further(self, trained: Trained, last: Found) -> tuple[list[Summary], str]:
        """Return the runs from which the time of what is advised is predicted, and in words with which seeds."""
        runs, by, why = None, "with other seeds than the trials", "the trials did not end"
        begin, number = self._job.seed + FURTHER_SEED, len(SHARES) + 1
        if last.trial.share == 1:
            try:
                runs = self._trials.run(number, [trained], range(begin, begin + self._asked.seeds), last.trial.limit_s)
            except BudgetSpent as spent:
                why = "the budget was spent"
                print(f"hpcsync: {spent}", file=sys.stderr)
            except JobError as error:
                why = f"trial {number} failed"
                print(f"hpcsync: {error}", file=sys.stderr)
        if runs is None:
            runs, by = last.summaries, f"with the seeds of the trials, hence optimistic: {why}"
        return [*runs[trained].values()], by

    def _prediction(self, predicted: Mapping[str, float], by: str) -> str:
        """Return a sentence that says a prediction."""
        from hpcsync.report.advice import coarseness

        if not predicted:
            return f"No prediction: not every run {by} reached the target."
        time_s = f"{rounded(predicted['seconds'])} s"
        if "low_s" in predicted:
            time_s += f" ({rounded(predicted['low_s'])} to {rounded(predicted['high_s'])} s in 80 % of runs)"
        coarse = coarseness(predicted, self._job.evaluation.every_samples)
        return " ".join(filter(None, (f"Predicted time to the target: {time_s}, {by}.", coarse)))

    def _unknown(self) -> Iterator[str]:
        """Yield what came of an earlier prediction, and what the advice does not know."""
        from hpcsync.report.summary import beside_prediction, summarize
        from hpcsync.simulator.measured_cluster import network, pushes_at_once

        if self._trace is not None:
            if said := beside_prediction(summarize(self._trace)):
                yield f"Prediction for {self._trace.path.parent.name}: {said}."
            if self._job.cluster.network is not None:
                yield "Links are those of [cluster.network] in the job file, not those of the run."
        if self._trace is None:
            yield "Times are those of [cluster] in the job file; --from RUN uses the times of a run."
        elif (measured := self._trace.n_workers) != (asked := self._job.cluster.workers):
            yield f"Times are extrapolated from {plural(measured, 'worker')}: {_extrapolated(measured, asked)}."
        elif self._job.cluster.network is None and network(self._trace):
            seen = "the total rate of concurrent pushes" if self._trace.job.has_servers else "derived from the workers'"
            yield f"Links have the rates measured in the run; that of a server's link is {seen}."
            if self._link_share >= LINK_SHARE and (n := pushes_at_once(self._trace)) >= MEETS_OTHERS:
                yield (
                    f"However, {n:.1f} pushes at a time shared the server's link: a worker's own link may be up to "
                    f"{n:.1f} times as fast as measured, and candidates without servers faster than simulated. "
                    "A run under allreduce measures the workers' links."
                )
        for label, reason in self._left_out.items():
            yield f"Not tried: {label} ({reason})."
        for trained, log in self._trials.failed.items():
            yield f"Left out: {described(trained)}, because a simulation failed (see {log})."

    def _advised(
        self, trained: Trained, predicted: Mapping[str, float], runs: Sequence[Summary], limit_s: float
    ) -> tuple[Job, list[str]]:
        """Return the job to run, and the limits of the user's that it does not have, in words.

        It is the user's job with the advised paradigm and learning rate, and its prediction. A number of samples or
        updates that one of these runs has exceeded would end it too early; without a limit in seconds it gets that of
        the trials instead.
        """
        table = self._trials.job_table(trained)
        stop, exceeded = table["stop"], []
        for key in ("samples", "updates"):
            if key in stop and max(getattr(run, key) for run in runs) > stop[key]:
                exceeded.append(plural(stop.pop(key), key.removesuffix("s")))
                stop.setdefault("seconds", float(f"{limit_s:.4g}"))
        return Job.from_table(table | ({"predicted": predicted} if predicted else {})), exceeded


def _extrapolated(n_measured: int, n_workers: int) -> str:
    """Return what is assumed of so many workers, in words."""
    if n_workers < n_measured:
        return "each seed draws a subset of them"
    speeds = "each seed draws their speeds" if n_measured > 1 else "their speeds are assumed to be the same"
    return f"for further ones {speeds}; the time that further workers cost a server is not known"


def _of_workers(job: Job, n_workers: int, measured: bool) -> Job:
    """Return the job with another number of workers; without its own times, which the measured ones replace."""
    table = tomllib.loads(job.to_toml())
    table["cluster"]["workers"] = n_workers
    table.pop("predicted", None)
    if measured:
        cluster = table["cluster"]
        cluster.pop("compute", None)
        cluster["events"] = [each for each in cluster.get("events", []) if each["change"] not in ("slow", "recover")]
    return Job.from_table(table)


def _states_scale(path: Path, overrides: Sequence[str]) -> bool:
    """Return whether the user states how the rate of asynchronous updates is scaled."""
    given = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("optimizer", {})
    return "async_lr_scale" in given or any("async_lr_scale" in text for text in overrides)


def _refuse(job: Job, *, measured: bool) -> None:
    """Raise JobError for a job on which there can be no advice."""
    if isinstance(job.workload, Script):
        raise JobError("advise: must be of a job with a workload, which can be simulated; a script cannot")
    if job.cluster.workers < 2:
        raise JobError(f"cluster.workers = {job.cluster.workers}: must be at least 2 for advice")
    if job.cluster.compute is None and job.cluster.times_from is None and not measured:
        raise JobError("cluster.compute: missing; give it, or the times of a run (--from RUN)")
    stop = job.stop
    if not stop.targets:
        raise JobError(
            "stop: must have target_accuracy or target_loss for advice: candidates are compared by the time to it"
        )
    if (stop.samples, stop.updates, stop.seconds) == (None, None, None):
        raise JobError(
            "stop: must have samples, updates or seconds for advice: a limit for runs that never reach the target"
        )
    if not job.evaluation.every_samples:
        raise JobError("evaluation.every_samples = 0: must be at least 1 for advice")
