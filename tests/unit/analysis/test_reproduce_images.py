"""The reproduction on images: the residual network, its normalisation in evaluation, and the test of finished runs."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

from hpcsync.run_dir import layout
from hpcsync.workloads.registry import build
from reproductions import final_model, headline, images, residual_network
from reproductions.simulating import simulate_all

SHORT = 1 / 128  # 256 samples
FEW = 300  # test images


def workload(seed):
    return build(headline.job(images.PROBLEM, "BSP", 1.0, seed))


@pytest.fixture(scope="module")
def built():
    return workload(7)


def norms(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


# ---- the network ----


def test_the_shortcut_has_no_parameters_and_is_padded_with_zeros():
    torch.manual_seed(1)
    x = torch.randn(5, 8, 12, 12)
    for n, size in ((8, 12), (16, 6)):
        block = residual_network.Block(8, n)
        residual = block(x)
        nn.init.zeros_(norms(block)[-1].weight)  # nothing is left but the shortcut
        shortcut = block(x)
        assert shortcut.shape == (5, n, size, size)
        assert torch.equal(shortcut[:, :8], x[:, :, :: 12 // size, :: 12 // size].relu())
        assert not shortcut[:, 8:].any()
        assert not torch.equal(residual, shortcut)


def test_the_network_is_the_printed_one_with_one_block_of_each_size(built):
    layers = [m for m in built.model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [(m.weight.shape[1], m.weight.shape[0]) for m in layers] == [
        (3, 8),
        *[(8, 8), (8, 8)],
        *[(8, 16), (16, 16)],
        *[(16, 32), (32, 32)],
        (32, 10),
    ]
    assert len(norms(built.model)) == 7 and all(m.bias is None for m in layers[:-1])


def test_the_seed_determines_weights_and_training_images(built):
    again, other = workload(7), workload(8)
    for name, tensor in built.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    assert torch.equal(built.train.tensors[0], again.train.tensors[0])
    assert not torch.equal(built.model[-1].weight, other.model[-1].weight)
    assert not torch.equal(built.train.tensors[0], other.train.tensors[0])


def test_validation_images_are_those_of_every_seed(built):
    other = workload(8)
    other.model.load_state_dict(built.model.state_dict())
    assert built.evaluate(built.model) == other.evaluate(other.model)
    with torch.no_grad():
        other.model[-1].bias[3] += 1.0
    assert built.evaluate(built.model) != other.evaluate(other.model)


def test_evaluation_normalises_by_running_statistics(built):
    x = built.train.tensors[0][:64]
    model = workload(7).model
    model.train()
    model(x)
    alone, together = (model.train()(x[:32])[:4], model(x)[:4])
    assert not torch.allclose(alone, together, atol=1e-3), "in training the other images of the batch matter"
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert torch.allclose(model(x[:32])[:4], model(x)[:4], atol=1e-5)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())
    whole = model(x)
    norms(model)[-1].running_var *= 4
    assert not torch.allclose(model(x), whole, atol=1e-3)


# ---- the test of finished runs ----


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(images, "TESTED", FEW)
    monkeypatch.setattr(images, "all_test_images", lambda: residual_network.test_images(FEW))


def by_hand(weights, statistics=1.0):
    """Count what is right, image by image, with the variances times a number."""
    model = workload(7).model.eval()
    model.load_state_dict(load_file(weights))
    for norm in norms(model):
        norm.running_var *= statistics
    pictures, classes = next(residual_network.test_images(FEW))
    with torch.no_grad():
        return [int(model(x[None]).argmax()) == int(y) for x, y in zip(pictures, classes, strict=True)]


def test_a_finished_run_is_tested_once_with_its_final_model(tmp_path, few):
    problem = replace(images.PROBLEM, evaluations=2)
    job = headline.job(problem, "ASP", 1.0, 7, SHORT)
    simulate_all({"images/tuned/ASP/7": job}, tmp_path, 1, Console(quiet=True), keep_weights=True)
    folder = tmp_path / "images/tuned/ASP/7"
    weights = folder / layout.WEIGHTS
    expected = by_hand(weights)
    assert images.correct(folder).tolist() == expected
    assert expected != by_hand(weights, statistics=100.0), "the statistics matter"
    assert headline.measure(problem, folder)["accuracy"] == pytest.approx(sum(expected) / FEW)

    model = workload(7).model
    nn.init.zeros_(model[-1].weight)
    with torch.no_grad():
        model[-1].bias[3] = 1e3
    save_file(model.state_dict(), weights)  # another run in the same folder
    classes = next(residual_network.test_images(FEW))[1]
    assert images.correct(folder).tolist() == (classes == 3).tolist()


def test_an_interrupted_test_is_made_again(tmp_path, few, monkeypatch):
    job = headline.job(replace(images.PROBLEM, evaluations=2), "ASP", 1.0, 7, SHORT)
    simulate_all({"run": job}, tmp_path, 1, Console(quiet=True), keep_weights=True)

    def cut(file, array):
        file.write(array.tobytes()[:3])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "save", cut)
        images.correct(tmp_path / "run")
    assert not (tmp_path / "run" / final_model.CORRECT).exists()
    assert len(images.correct(tmp_path / "run")) == images.TESTED


def test_runs_with_rates_not_chosen_are_not_tested(tmp_path, few):
    problem = replace(images.PROBLEM, evaluations=2)
    simulate_all(
        {"images/tuning-1/ASP/1": headline.job(problem, "ASP", 1.0, 1, SHORT)}, tmp_path, 1, Console(quiet=True)
    )
    found = headline.measure(problem, tmp_path / "images/tuning-1/ASP/1")
    assert not (tmp_path / "images/tuning-1/ASP/1" / final_model.CORRECT).exists()
    assert 0.0 <= found["accuracy"] <= 1.0 and found["loss"] > 0.0


def test_test_images_are_drawn_in_parts_and_differ_from_all_others(built, monkeypatch):
    monkeypatch.setattr(residual_network, "PART", 100)
    parts = list(residual_network.test_images(250))
    assert [len(x) for x, _ in parts] == [100, 100, 50]
    drawn = torch.cat([x for x, _ in parts]).flatten(1)
    assert len(drawn.unique(dim=0)) == 250
    others = {bytes(row) for row in built.train.tensors[0].flatten(1).numpy()}
    assert len(others) == len(built.train) and not others & {bytes(row) for row in drawn.numpy()}


def test_the_error_of_the_choice_of_test_images_is_that_of_a_paired_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "TESTED", 8)
    right = {
        ("BSP", 7): [1, 1, 1, 1, 1, 1, 0, 0],
        ("BSP", 8): [1, 1, 1, 1, 1, 1, 0, 0],
        ("BSP + batches", 7): [1, 1, 1, 1, 1, 1, 0, 0],
        ("BSP + batches", 8): [1, 1, 1, 1, 0, 0, 1, 1],
    }
    for (method, seed), bits in right.items():
        folder = tmp_path / method.replace(" ", "_") / str(seed)
        folder.mkdir(parents=True)
        (folder / layout.WEIGHTS).touch()
        np.save(folder / final_model.CORRECT, np.packbits(bits))
    results = pd.DataFrame([{"paradigm": method, "seed": seed} for method, seed in right])
    points = final_model.sampling_error(results, tmp_path, images.correct, np.ones(8)).set_index("paradigm")["points"]
    assert points["BSP"] == 0.0
    differences = np.array([0, 0, 0, 0, 0.5, 0.5, -0.5, -0.5])
    assert points["BSP + batches"] == pytest.approx(196 * differences.std(ddof=1) / 8**0.5)


def test_the_whole_is_carried_out_and_drawn(tmp_path, few, monkeypatch):
    two = {method: images.PROBLEM.methods[method] for method in ("BSP", "ASP")}
    few_images = images.PROBLEM.workload | {"options": {"samples": 512, "width": 2}}
    small = replace(
        images.PROBLEM,
        workload=few_images,
        methods=two,
        pairs=(),
        factors=(1.0,),
        further=0,
        evaluations=2,
        losses=(9.0, 1e-3),
    )
    monkeypatch.setattr(images, "PROBLEM", small)
    found = images.reproduce(tmp_path, 1, 1, Console(quiet=True), SHORT).set_index("claim")["verdict"]
    assert found["ASP sooner than BSP: BSP's time / its own"] == "cannot be told", "0.001 is never reached"
    drawn = pd.read_csv(tmp_path / "images.csv")
    assert drawn["method"].tolist() == ["BSP"] * 2 + ["ASP"] * 2
    assert drawn["now_s"][3] < 0.8 * drawn["now_s"][1], "ASP does not wait for the slowest"
    assert (tmp_path / "images.png").stat().st_size > 10_000


# ---- what is declared ----


def test_declared_settings_agree_with_each_other():
    problem = images.PROBLEM
    job = headline.job(problem, "BSP", 1.0, 7)
    assert job.cluster.workers * job.workload.batch_size == 128, "the paper's batch"
    assert [2 * problem.decays[0], 4 * problem.decays[1] // 3] == [problem.samples] * 2, "a half, and three quarters"
    assert problem.samples % problem.evaluations == 0
    assert problem.samples % problem.workload["options"]["samples"] == 0, "whole passes"
    assert not set(problem.tuning_seeds) & set(range(problem.first_seed, problem.first_seed + 100))
    assert {method for pair in problem.pairs for method in pair} <= set(problem.methods)
    assert list(problem.losses) == sorted(problem.losses, reverse=True)
    assert residual_network.TESTED % residual_network.PART == 0
    for method in problem.methods:
        scale = headline.job(problem, method, 1.0, 7).optimizer.async_lr_scale
        assert (scale == "1/workers") == (method not in ("gossip", "EASGD", "ADSP", "ASHL")), method


def test_a_job_has_the_settings_of_its_problem():
    shorter = headline.job(images.PROBLEM, "BSP", 2.0, 7, 0.5)
    assert (shorter.optimizer.lr, shorter.optimizer.weight_decay) == (0.2, 1e-4)
    assert shorter.optimizer.schedule.milestones == tuple(d // 2 for d in images.PROBLEM.decays)
    assert (shorter.evaluation.buffers, shorter.stop.samples) == ("recompute", images.SAMPLES // 2)
