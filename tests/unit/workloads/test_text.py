"""The text workload: its files and sequences, and a causal model."""

import math
import sysconfig
from pathlib import Path

import pytest
import torch

from hpcsync.config.workloads import Text
from hpcsync.training.sampler import fetch
from hpcsync.workloads import text
from hpcsync.workloads.registry import Workload, build
from tests.unit.jobs import make_job, refusal

STDLIB = Path(sysconfig.get_path("stdlib"))
SMALL = {"name": "text", "batch_size": 8, "context": 16, "layers": 1, "width": 32, "heads": 2}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build(make_job(workload=SMALL))


# ---- files ----


def test_the_files_are_the_standard_library_s_own():
    names = text.source_files(STDLIB)
    assert names == sorted(set(names))
    assert {"argparse.py", "json/decoder.py", "email/mime/text.py"} < set(names)
    assert not [name for name in names if name.startswith(("site-packages", "test", "_sysconfigdata"))]


def test_additions_of_an_installation_are_excluded(tmp_path):
    for name in ("ast.py", "sitecustomize.py", "json/tool.py", "test/test_ast.py", "site-packages/numpy.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert text.source_files(tmp_path) == ["ast.py", "json/tool.py"]


def test_a_tenth_of_the_files_is_held_out_whichever_others_there_are():
    names = text.source_files(STDLIB)
    held_out = [name for name in names if text.is_held_out(name)]
    assert 0.05 < len(held_out) / len(names) < 0.2
    assert text.is_held_out("random.py")
    assert not text.is_held_out("argparse.py")


def test_training_and_held_out_text_are_of_different_files(tmp_path):
    for name in ("random.py", "glob.py", "ast.py", "argparse.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    training, held_out = text.characters(tmp_path)
    assert decoded(training) == "# argparse.py\n# ast.py\n"
    assert decoded(held_out) == "# glob.py\n# random.py\n"


def test_there_are_megabytes_of_it():
    training, held_out = text.characters()
    assert len(training) > 3_000_000
    assert len(held_out) > 300_000
    assert (training == text.OTHERS).double().mean() < 1e-3
    module = text.encode((STDLIB / "argparse.py").read_text(encoding="utf-8"))
    assert module.numpy().tobytes() in training.numpy().tobytes()
    assert module.numpy().tobytes() not in held_out.numpy().tobytes()


def test_a_missing_source_is_reported_in_one_line(tmp_path):
    assert refusal(text.characters, tmp_path) == (
        f'workload.name = "text": must find the source of Python\'s standard library in {tmp_path}'
    )


# ---- characters and sequences ----


def decoded(codes: torch.Tensor) -> str:
    return "".join((*text.SYMBOLS, "\N{REPLACEMENT CHARACTER}")[code] for code in codes.tolist())


def test_every_character_is_one_symbol():
    assert text.N_SYMBOLS == 98
    assert decoded(text.encode("a\tb\n~ \r\f\x7fé€\N{GRINNING FACE}!")) == "a\tb\n~ " + 6 * "\ufffd" + "!"
    assert text.encode(text.SYMBOLS).tolist() == list(range(97))


def test_sequences_do_not_overlap_and_leave_at_most_one_unused():
    data = text.windows(torch.arange(14, dtype=torch.uint8), 4)
    x, y = data.tensors
    assert x.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(y, x + 1)


def test_sequences_hold_no_copy_of_the_text():
    characters = torch.arange(14, dtype=torch.uint8)
    for part in text.windows(characters, 4).tensors:
        assert part.untyped_storage().data_ptr() == characters.untyped_storage().data_ptr()


def test_a_batch_is_of_the_sequences_asked_for(workload):
    x, y = fetch(workload.train, torch.tensor([3, 5]).numpy())
    assert (x.shape, y.shape) == ((2, 16), (2, 16))
    assert torch.equal(x[:, 1:], y[:, :-1])
    training, _ = text.characters()
    assert torch.equal(x[1], training[5 * 16 : 6 * 16])


# ---- the model ----


def test_a_new_model_knows_nothing(workload):
    loss, accuracy = workload.evaluate(workload.model)
    assert loss == pytest.approx(math.log(98), abs=0.1)
    assert accuracy < 0.3  # always the most frequent one: 0.285
    batch = fetch(workload.train, torch.arange(8).numpy())
    assert workload.loss(workload.model, *batch).item() == pytest.approx(math.log(98), abs=0.1)


def test_the_model_is_as_the_job_says():
    job = make_job(workload={**SMALL, "layers": 3})
    model = build(job).model
    per_block = 12 * 32**2 + 13 * 32
    assert sum(p.numel() for p in model.parameters()) == 3 * per_block + 98 * 32 + 16 * 32 + 2 * 32 + 98 * 33
    assert model(torch.zeros(2, 16, dtype=torch.uint8)).shape == (2, 16, 98)
    default = build(make_job(workload={"name": "text"})).model
    assert sum(p.numel() for p in default.parameters()) == 248_930
    assert {p.dtype for p in default.parameters()} == {torch.float32}


def changed_logits(model: torch.nn.Module, at: int) -> list[bool]:
    """Return the positions whose logits change with the character at one position."""
    x = torch.arange(16)[None]
    other = x.clone()
    other[0, at] = 97
    with torch.no_grad():
        return [not torch.equal(a, b) for a, b in zip(model(x)[0], model(other)[0], strict=True)]


@pytest.mark.parametrize("at", [0, 7, 15])
def test_no_character_changes_earlier_predictions(workload, at):
    assert changed_logits(workload.model, at) == [position >= at for position in range(16)]


def test_it_would_without_the_mask(workload, monkeypatch):
    masked = text.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        text.functional, "scaled_dot_product_attention", lambda q, k, v, is_causal: masked(q, k, v, is_causal=False)
    )
    assert all(changed_logits(workload.model, 7))


# ---- learning ----


def loss_after_training(steps: int, shuffle_targets: bool = False) -> float:
    workload = build(make_job(workload=SMALL))
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        x, y = fetch(workload.train, torch.arange(8 * step, 8 * step + 8).numpy())
        if shuffle_targets:
            y = y.flatten()[torch.randperm(y.numel(), generator=generator)].view_as(y)
        optimizer.zero_grad()
        workload.loss(workload.model, x, y).backward()
        optimizer.step()
    return workload.evaluate(workload.model)[0]


def test_it_learns_more_than_how_frequent_characters_are():
    frequencies = 3.15  # the cross-entropy of knowing only those
    assert loss_after_training(150) < frequencies - 0.15  # by how much depends on torch's version
    assert loss_after_training(150, shuffle_targets=True) > frequencies - 0.05


def test_evaluating_changes_nothing(workload):
    before = [p.clone() for p in workload.model.parameters()]
    state = torch.random.get_rng_state()
    assert workload.evaluate(workload.model) == workload.evaluate(workload.model)
    assert all(torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True))
    assert all(p.grad is None for p in workload.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


class Copying(torch.nn.Module):
    """A model that predicts that every character is repeated."""

    def __init__(self):
        super().__init__()
        self.seen = None

    def forward(self, x):
        self.seen = x
        return 10.0 * torch.nn.functional.one_hot(x.long(), text.N_SYMBOLS)


def test_evaluation_counts_the_characters_predicted():
    spaces = text.encode(100 * "    abc\n")
    model = Copying()
    loss, accuracy = text.evaluation(spaces, 8)(model)
    assert model.seen.shape == (99, 8)
    assert accuracy == 3 / 8
    assert loss == pytest.approx(math.log(97 + math.exp(10)) - 10 * 3 / 8, rel=1e-5)


@pytest.mark.parametrize("context", [1, 64, 4096])
def test_an_evaluation_costs_the_same_whatever_the_context(context):
    model = Copying()
    text.evaluation(torch.zeros(100_000, dtype=torch.uint8), context)(model)
    assert model.seen.shape == (16_384 // context, context)


def test_evaluated_sequences_are_spread_over_the_text():
    blocks = (torch.arange(256) % 98).to(torch.uint8)
    characters = torch.cat([blocks.repeat_interleave(256), blocks[:1]])
    model = Copying()
    text.evaluation(characters, 64)(model)
    assert torch.equal(model.seen[:, 0], blocks)


# ---- the job ----


def test_defaults():
    assert make_job(workload={"name": "text"}).workload == Text(
        name="text", batch_size=16, context=64, layers=2, width=96, heads=4
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 5}, "workload.width = 96: must be a multiple of workload.heads = 5"),
        ({"width": 90}, "workload.width = 90: must be a multiple of workload.heads = 4"),
        ({"width": 0}, "workload.width = 0: must be at least 1"),
        ({"context": 4097}, "workload.context = 4097: must be at most 4096"),
        (
            {"contxt": 3},
            "workload.contxt = 3: unknown key; must be one of name, batch_size, context, layers, width, heads",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(settings, message):
    assert refusal(make_job, workload={"name": "text", **settings}).startswith(message)
