"""torchvision's networks: their parameters, and the cut at the fully-connected layers."""

import sys

import pytest
import torch

from hpcsync.workloads import torchvision_models
from hpcsync.workloads.torchvision_models import ARCHITECTURES, Architecture, build, shape
from tests.unit.jobs import refusal

# Parameters below and above the cut, numbers there, and the operations of a sample's forward pass, in 10^9.
SIZES = {
    "alexnet": (2_469_696, 58_631_144, 9_216, 1.43),
    "vgg16": (14_714_688, 123_642_856, 25_088, 30.94),
    "vgg19": (20_024_384, 123_642_856, 25_088, 39.26),
    "inception_v3": (21_785_568, 2_049_000, 2_048, 11.43),
    "resnet50": (23_508_032, 2_049_000, 2_048, 8.18),
    "resnet152": (58_143_808, 2_049_000, 2_048, 23.03),
}


def sizes(name: str) -> tuple[int, int, int, float]:
    of = shape(name)
    return of.conv_parameters, of.fc_parameters, of.activations, round((of.conv_flops + of.fc_flops) / 1e9, 2)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sizes(name: str) -> None:
    assert sizes(name) == SIZES[name]


def test_another_cut_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shape.cache_clear()
    monkeypatch.setitem(ARCHITECTURES, "alexnet", Architecture("classifier.4"))
    try:
        assert sizes("alexnet")[:3] != SIZES["alexnet"][:3]
        assert sizes("alexnet")[3] == SIZES["alexnet"][3], "all of it together is the same"
    finally:
        shape.cache_clear()


def test_the_share_of_the_layers_above() -> None:
    of = shape("alexnet")
    # Matrices of 9216 x 4096, 4096 x 4096 and 4096 x 1000, a multiplication and an addition for each element.
    assert of.fc_flops == 2 * (9216 * 4096 + 4096 * 4096 + 4096 * 1000)
    assert of.fc_share == of.fc_flops / (of.fc_flops + of.conv_flops) == pytest.approx(0.082, abs=5e-4)


def test_off_the_meta_device_it_computes() -> None:
    below, above = build("alexnet", "cpu")
    assert above.eval()(below.eval()(torch.zeros(2, *ARCHITECTURES["alexnet"].image))).shape == (2, 1000)
    assert all(p.is_meta for half in build("alexnet") for p in half.parameters())


def test_an_unknown_network() -> None:
    known = ", ".join(ARCHITECTURES)
    assert refusal(shape, "vgg-16") == f'--model "vgg-16": must be one of {known}; did you mean vgg16?'


def test_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    assert refusal(build, "alexnet") == '--model "alexnet": needs torchvision: pip install torchvision'


def test_other_mistakes_of_torchvision_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(torchvision_models.importlib, "import_module", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        build("alexnet")
