"""`hpcsync bench` starts its own ranks and shows what they found."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.once


def test_a_measurement_on_ranks():
    argv = [sys.executable, "-m", "hpcsync", "bench", "transfers"]
    result = subprocess.run(argv, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "put of 100 MB" in result.stdout
    assert "GB/s" in result.stdout


def test_an_unknown_target_is_the_users_mistake():
    argv = [sys.executable, "-m", "hpcsync", "bench", "transfer"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "did you mean transfers?" in result.stderr


def test_without_a_gpu_there_is_nothing_to_measure_on_one():
    argv = [sys.executable, "-m", "hpcsync", "bench", "--device", "cuda"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    why = "torch sees no GPU" if torch.version.cuda else "torch is built without CUDA"
    assert result.stderr == f"hpcsync: --device cuda: {why}\n"
