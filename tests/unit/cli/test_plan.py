"""Command plan stanza: numbers, output, files and errors."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from hpcsync.cli import app
from hpcsync.cli import plan as plans
from hpcsync.planning.layer_groups import Groups
from hpcsync.planning.split_cost import Shape, Times
from hpcsync.planning.stanza_planner import Link, SplitProfile, choose, stanza_s, without_separation

ASKED = {"--model": "alexnet", "--nodes": "10", "--bandwidth-gbit": "10", "--batch": "128"}
TOML = "conv_forward_ms = 20\nconv_backward_ms = 40.5\nfc_ms = 8\nfc_fixed_ms = 5\n"
RECORDED = Times(0.02, 0.0405, 0.008, 0.005)
ALEXNET = (2_469_696, 58_631_144, 9_216)
LINKS = Link(1.25e9, 50e-6)


def plan(**changed: str) -> Result:
    """Run the command with these options, named with _ instead of -."""
    options = ASKED | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return CliRunner().invoke(app.app, ["plan", "stanza", *(word for pair in options.items() for word in pair)])


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    path = tmp_path / "times.toml"
    path.write_text(TOML)
    return str(path)


def numbers(tmp_path: Path, **changed: str) -> dict:
    result = plan(json=str(tmp_path / "plan.json"), **changed)
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "plan.json").read_text())


def test_numbers_are_those_of_the_planner(recorded: str, tmp_path: Path) -> None:
    found = numbers(tmp_path, profile=recorded)
    profile = SplitProfile(RECORDED, Shape(*ALEXNET), 128)
    expected = choose(profile, LINKS, 10)
    assert found["stanza"] == [row._asdict() for row in expected.rows]
    assert found["others"] == [row._asdict() for row in without_separation(profile, LINKS, 10)]
    assert (found["best_n_fc"], found["margin"]) == (expected.best.n_fc, expected.margin)
    gained = expected.best.samples_per_s / found["others"][2]["samples_per_s"] - 1
    assert found["faster_than"]["ring all-reduce"] == pytest.approx(gained)
    assert found["stanza"] != numbers(tmp_path, profile=recorded, latency_us="500")["stanza"], "the control"


def test_options_reach_the_planner(recorded: str, tmp_path: Path) -> None:
    changed = {"latency_us": "7", "micro_batches": "4", "bandwidth_gbit": "1", "batch": "64", "nodes": "4"}
    found = numbers(tmp_path, profile=recorded, **changed)
    profile = SplitProfile(RECORDED, Shape(*ALEXNET), 64)
    seconds = [stanza_s(profile, Link(1.25e8, 7e-6), Groups(4, n_fc), micro_batches=4) for n_fc in (1, 2)]
    assert [row["seconds"] for row in found["stanza"]] == seconds


def test_samples_per_second_are_divided_by_operations(tmp_path: Path) -> None:
    found = numbers(tmp_path, samples_per_second="2560")
    times, share = found["times"], found["shape"]["fc_share"]
    assert share == pytest.approx(0.08208, abs=1e-5)
    assert times["fc_s"] == pytest.approx(share * 128 / 2560)
    assert times["conv_backward_s"] == pytest.approx(2 * times["conv_forward_s"])
    assert sum(times[f"{part}_s"] for part in ("conv_forward", "conv_backward", "fc")) == pytest.approx(128 / 2560)


def test_times_are_measured_without_profile_and_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stand_in(halves: object, loss: object, batch: Sequence[torch.Tensor]) -> Times:
        assert [tuple(tensor.shape) for tensor in batch] == [(128, 3, 224, 224), (128,)]
        return RECORDED

    monkeypatch.setattr(plans, "measured", stand_in)
    found = numbers(tmp_path)
    source = found["times"].pop("source")
    assert source.startswith("measured on this machine: ") and source.endswith(", one thread")
    assert found["times"] == RECORDED._asdict()


def test_the_table(recorded: str) -> None:
    lines = plan(profile=recorded, nodes="4").output.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("layout ")) + 1
    names = ["stanza,"] * 2 + ["dedicated", "sharded", "ring", "*"]
    assert [line.split()[0] for line in lines[begin : begin + 6]] == names
    assert [line for line in lines if " FC *" in line] == [lines[begin]], "the choice is marked"
    assert max(map(len, lines)) <= 80
    conclusion = " ".join(" ".join(lines[begin + 5 :]).split())
    assert conclusion.startswith("* 1 fully-connected worker (FC) and 3 convolution workers, ")
    assert " % more samples/s than with 2 samples/s: " in conclusion
    assert " and 1 convolution worker\n  samples/s: " in plan(profile=recorded, nodes="2").output


def test_the_best_of_all_layouts_is_marked(tmp_path: Path) -> None:
    asked = {"model": "resnet50", "bandwidth_gbit": "100", "samples_per_second": "256"}
    output = plan(**asked).output
    (starred,) = [line for line in output.splitlines() if " * " in line]
    assert starred.startswith("sharded server *")
    conclusion = "* sharded server: 1.12 times the samples/s of the best layout that separates layers, which is "
    assert f"{conclusion}1 fully-connected worker (FC) and 9 convolution workers, " in " ".join(output.split())
    found = numbers(tmp_path, **asked)
    rows = {
        **{f"stanza, {row['n_fc']} FC": row for row in found["stanza"]},
        **{row["name"]: row for row in found["others"]},
    }
    assert found["best"] == max(rows, key=lambda name: rows[name]["samples_per_s"]) == "sharded server"


@pytest.mark.parametrize("rate", ["1e-6", "1e9"])
@pytest.mark.parametrize("link", [("1e-6", "1e9"), ("1e9", "0")])
def test_numbers_are_finite_at_the_ends_of_what_is_allowed(rate: str, link: tuple[str, str], tmp_path: Path) -> None:
    for batch in ("1", "1000000000"):
        found = numbers(tmp_path, samples_per_second=rate, bandwidth_gbit=link[0], latency_us=link[1], batch=batch)
        shown = json.dumps([found["stanza"], found["others"], found["times"], found["margin"], found["faster_than"]])
        assert "NaN" not in shown and "Infinity" not in shown


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "vgg"}, '--model "vgg": must be one of alexnet, vgg16, vgg19, inception_v3, resnet50, resnet152'),
        ({"nodes": "1"}, "--nodes 1: must be a whole number of at least 2"),
        ({"bandwidth_gbit": "0"}, "--bandwidth-gbit 0.0: must be a number from 1e-06 to 1e+09"),
        ({"bandwidth_gbit": "nan"}, "--bandwidth-gbit nan: must be a number from 1e-06 to 1e+09"),
        ({"batch": "0"}, "--batch 0: must be a whole number from 1 to 1e+09: samples of a worker's batch"),
        ({"latency_us": "inf"}, "--latency-us inf: must be a number from 0 to 1e+09"),
        ({"micro_batches": "129"}, "--micro-batches 129: must be a divisor of --batch 128"),
        ({"samples_per_second": "-1"}, "--samples-per-second -1.0: must be a number from 1e-06 to 1e+09"),
        ({"samples_per_second": "1e-320"}, "--samples-per-second 1e-320: must be a number from 1e-06 to 1e+09"),
        ({"bandwidth_gbit": "1e300"}, "--bandwidth-gbit 1e+300: must be a number from 1e-06 to 1e+09"),
        ({"samples_per_second": "9", "profile": "p"}, "--samples-per-second 9.0: must be left out with --profile p"),
        ({"profile": "none.toml"}, "--profile none.toml: No such file or directory"),
        ({"profile": "none.toml", "json": "none/x.json"}, "--json none/x.json: No such file or directory"),
    ],
)
def test_user_errors_are_one_line(
    changed: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = plan(**changed)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"hpcsync: {message}") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conv_forward_ms = 'x'\nconv_backward_ms = 1\nfc_ms = 1", 'conv_forward_ms = "x": must be a number'),
        ("conv_forward_ms = 1\nconv_backward_ms = 0\nfc_ms = 1", "conv_backward_ms = 0: must be at least 1e-06"),
        (
            "conv_forward_ms = 1\nconv_backward_ms = 1",
            "fc_ms: missing; must be a number from 1e-06 to 1e+09: milliseconds of a batch above the cut, forward and ",
        ),
        (f"{TOML}fc_msx = 1", "fc_msx = 1: unknown key; must be one of conv_forward_ms, "),
        (TOML.replace("= 5", "= 9"), "fc_fixed_ms = 9.0: must be at most fc_ms = 8.0, of which it is a part"),
        ("conv_forward_ms", "must be TOML: "),
    ],
)
def test_errors_in_a_profile_are_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "times.toml"
    path.write_text(text)
    result = plan(profile=str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"hpcsync: --profile {path}: {message}") and result.stderr.count("\n") == 1
