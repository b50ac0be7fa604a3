"""How well clusters with more workers than were measured are predicted: the script, on few and short runs."""

import pandas as pd
import pytest

import extrapolation


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(extrapolation, "WORKERS", (2, 3))
    monkeypatch.setattr(extrapolation, "PROFILE_UPDATES", 40)
    monkeypatch.setattr(extrapolation, "ITERATIONS", 20)
    monkeypatch.setattr(
        extrapolation, "KINDS", {kind: extrapolation.KINDS[kind] for kind in ("alike", "of two kinds, 1:2")}
    )


def test_each_cluster_is_predicted_beside_what_comes(short, tmp_path, capsys):
    extrapolation.main(measured=2, clusters=2, out=tmp_path)
    rows = pd.read_csv(tmp_path / "extrapolation-2.csv")
    assert len(rows) == 2 * 2 * 2 * 2 and rows.notna().all(axis=None)
    ratio = rows["came_s"] / rows["seconds"]
    assert ratio[rows["kind"] == "alike"].between(0.9, 1.1).all(), "equal workers hold no surprise"
    assert ratio[rows["workers"] == 2].between(0.9, 1.1).all(), "nor do those that were measured"
    assert "Predicted from 2 workers" in capsys.readouterr().out


def test_no_two_runs_draw_the_same_times(short, tmp_path, monkeypatch):
    seeds, job = [], extrapolation.job
    monkeypatch.setattr(extrapolation, "job", lambda *given: (seeds.append(given[2]), job(*given))[1])
    extrapolation.main(measured=2, clusters=2, out=tmp_path)
    assert len(seeds) == 2 * 2 * (1 + 2 * 2) == len(set(seeds))
