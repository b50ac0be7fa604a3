"""Workloads: their tables and mistakes."""

import pytest

from hpcsync.config.job import Job
from hpcsync.config.workloads import Cifar, Images, Timing
from tests.unit.jobs import make_job, refusal


def test_defaults():
    job = make_job(workload={"name": "images"})
    assert job.workload == Images(name="images", batch_size=32, samples=2000, size=16, width=8, hidden=256, dropout=0.0)
    assert Job.from_toml(job.to_toml()) == job
    for name in ("cifar10", "cifar100"):
        job = make_job(workload={"name": name})
        assert job.workload == Cifar(name=name, batch_size=64, folder="data", width=16, hidden=512, dropout=0.0)
        assert Job.from_toml(job.to_toml()) == job


def test_the_sizes_of_the_halves_are_those_of_the_vector():
    shape = Timing(name="timing", parameters=9, classifier=8, activations=5).shape
    assert (shape.conv_parameters, shape.fc_parameters, shape.activations) == (1, 8, 5)


IMAGES = "name, batch_size, samples, size, width, hidden, dropout"
CIFAR = "name, batch_size, folder, width, hidden, dropout"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "images", "size": 12}, "workload.size = 12: must be a multiple of 8"),
        ({"name": "images", "size": 0}, "workload.size = 0: must be at least 8"),
        ({"name": "images", "dropout": 1.0}, "workload.dropout = 1.0: must be less than 1"),
        ({"name": "images", "folder": "."}, f'workload.folder = ".": unknown key; must be one of {IMAGES}'),
        ({"name": "cifar10", "size": 8}, f"workload.size = 8: unknown key; must be one of {CIFAR}"),
        ({"name": "cifar100", "hidden": 0}, "workload.hidden = 0: must be at least 1"),
        ({"name": "cifar100", "folder": 3}, "workload.folder = 3: must be a string"),
        (
            {"name": "timing", "parameters": 9, "classifier": 9},
            "workload.classifier = 9: must be less than workload.parameters = 9",
        ),
        ({"name": "cifar"}, 'workload.name = "cifar": must be one of digits, images, cifar10, cifar100, '),
    ],
)
def test_mistakes_are_reported_in_one_line(settings, message):
    assert refusal(make_job, workload=settings).startswith(message)
