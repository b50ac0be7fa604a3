"""When `hpcsync run` starts the ranks again, and how many, after starts that end as given."""

import signal
from pathlib import Path

import pytest

from hpcsync.cli import run as cli
from hpcsync.cli.run import _Attempt
from hpcsync.run_dir import unfinished
from hpcsync.run_dir.status_file import read
from hpcsync.system.allocation import Left
from tests.unit.run_dir.test_status_file import writer

FOLDER = Path("runs/mine")
FINISHED = _Attempt(0)


def died(n_ranks, *, has_checkpoint=True, made_checkpoint=True):
    return _Attempt(1, n_ranks, FOLDER, has_checkpoint, made_checkpoint)


@pytest.fixture
def starts(monkeypatch):
    """Return a function that runs a job whose starts end as given, and returns the status and the starts made."""

    def play(ends, n_left=None):
        ends, made = iter(ends), []

        def start(path, overrides, ranks, out, resume, **options):
            made.append((ranks, out, resume))
            return next(ends)

        monkeypatch.setattr(cli, "_run", start)
        monkeypatch.setattr(cli.allocation, "left", lambda n: Left(n if n_left is None else n_left, {}))
        return cli.run(Path("job.toml"), [], 4, None), made

    return play


def test_a_death_restarts_with_what_is_left(starts, capsys):
    assert starts([died(4), FINISHED], 3) == (0, [(4, None, False), (3, FOLDER, True)])
    assert capsys.readouterr().err == "hpcsync: restarting 3 of 4 ranks\n"


def test_an_end_without_death_does_not(starts):
    assert starts([_Attempt(1)]) == (1, [(4, None, False)])


def test_three_deaths_in_a_row_without_a_new_checkpoint_end_it(starts, capsys):
    vain, good = died(4, made_checkpoint=False), died(4)
    status, made = starts([vain, vain, good, vain, vain, vain, FINISHED])
    assert (status, len(made)) == (1, 6)
    assert "died 3 times without a new checkpoint: not restarted" in capsys.readouterr().err


def test_fewer_ranks_without_a_checkpoint_would_begin_another_job(starts, capsys):
    status, made = starts([died(4, has_checkpoint=False, made_checkpoint=False), FINISHED], 3)
    assert (status, len(made)) == (1, 1)
    assert capsys.readouterr().err == "hpcsync: 3 of 4 ranks are left, and no checkpoint: not restarted\n"


@pytest.mark.parametrize("step", ["looks for nodes", "prepares the start"])
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 1), (signal.SIGTERM, 75)])
def test_a_signal_between_two_starts_ends_it(tmp_path, monkeypatch, step, number, expected):
    monkeypatch.chdir(tmp_path)
    FOLDER.mkdir(parents=True)
    writer(FOLDER)[0].close("running")

    def left(n):
        return signal.raise_signal(number) if step == "looks for nodes" else Left(n, {})

    def start(path, overrides, ranks, out, resume, **_):
        return signal.raise_signal(number) if resume else died(4)

    monkeypatch.setattr(cli.allocation, "left", left)
    monkeypatch.setattr(cli, "_run", start)
    assert cli.run(Path("job.toml"), [], 4, None) == expected
    assert read(FOLDER).status == "interrupted"


@pytest.mark.parametrize("n_left", [4, 3])
def test_who_watches_waits_until_it_is_not_restarted(tmp_path, monkeypatch, n_left):
    monkeypatch.chdir(tmp_path)
    FOLDER.mkdir(parents=True)
    made, _ = writer(FOLDER)
    made.close("running")
    assert unfinished.close(FOLDER, "failed", may_restart=True) is None
    seen = []
    monkeypatch.setattr(cli.allocation, "left", lambda n: seen.append(read(FOLDER).status) or Left(n_left, {}))
    monkeypatch.setattr(cli, "_run", lambda *_, **__: seen.append(read(FOLDER).status) or next(ends))
    ends = iter([died(4, has_checkpoint=False), FINISHED])
    cli.run(Path("job.toml"), [], 4, None)
    assert seen == ["running"] * (3 if n_left == 4 else 2)
    assert (seen[-1], read(FOLDER).status) == ("running", "failed")
