"""Long Range Arena: training that goes on, the classifier, and the command end to end."""

import gc

import numpy as np
import pytest
import torch
from paper_runs import read_csv, run, shrink

from experiments.commands.paper.lra import report, speedup
from experiments.harness import sweeps
from experiments.papers.classifier import (
    Classification,
    Classifier,
    _grown,
    sinusoids,
    turned,
)
from experiments.papers.dataset import Dataset
from experiments.papers.training import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"layers": 1, "heads": 2, "width": 16}
HOW = {"steps": 8, "rate": 1e-2, "warmup": 2, "evaluate": 4}


def _data(examples=64, n=16, seed=0):
    """The class is whether token 5 is there."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 5, (examples, 1, n)).astype(np.uint16)
    labels = np.arange(examples) % 2
    tokens[labels == 1, 0, rng.integers(n, size=examples // 2)] = 5
    return Dataset(tokens, labels, 6, 2)


def _trainer(path, method="pytorch", **how):
    model = Classifier(6, 2, 1, 16, method, **SIZES, seed=3)
    work = Classification(model, _data(), _data(seed=1), batch=8, dtype="float32", seed=7)
    return Trainer(model, work, HOW | how, path), work


def test_a_run_goes_on_as_if_it_had_not_ended(tmp_path):
    whole, _ = _trainer(tmp_path / "whole.pt")
    whole.run()
    part, _ = _trainer(tmp_path / "part.pt")
    part.run(is_late=lambda: True)
    assert part.progress.step == 4
    assert not part.is_done
    rest, _ = _trainer(tmp_path / "part.pt")
    assert rest.progress.step == 4
    rest.run()
    assert rest.is_done
    assert rest.progress.curve == whole.progress.curve
    for one, other in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(one, other)
    again, _ = _trainer(tmp_path / "part.pt")
    again.run()
    assert again.progress.step == 8


def test_a_small_task_is_learned(tmp_path):
    trainer, work = _trainer(tmp_path / "x.pt", method="nbflash", steps=80, evaluate=80)
    trainer.run()
    assert work.accuracy(_data(seed=2)) == 1.0
    assert trainer.progress.timed == 80 - Trainer.UNTIMED


def test_nothing_is_collected_during_steps(tmp_path, monkeypatch):
    trainer, work = _trainer(tmp_path / "x.pt")
    loss_of, seen = work.loss_of, []
    monkeypatch.setattr(work, "loss_of", lambda *x: seen.append(gc.isenabled()) or loss_of(*x))
    trainer.run()
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_nbflash_and_plain_attention_train_alike(tmp_path):
    """The same weights and batches: losses differ by what float32 rounds."""
    losses = {}
    for method in ("pytorch", "nbflash"):
        trainer, _ = _trainer(tmp_path / f"{method}.pt", method=method)
        trainer.run()
        losses[method] = [loss for _, loss, _ in trainer.progress.curve]
    error = np.subtract(*losses.values())
    # Eight steps of three passes, each of whose sums has at most 16 * 16 terms.
    budget = 8 * 3 * 256 * np.finfo(np.float32).eps
    assert (abs(error) <= budget * np.abs(losses["pytorch"])).all()


def test_padding_is_not_in_the_mean_and_pairs_are_told():
    model = Classifier(6, 3, 2, 16, "linformer", **SIZES)
    tokens = torch.randint(1, 6, (4, 2, 16))
    logits = model(tokens)
    assert logits.shape == (4, 3)
    assert not torch.equal(model(tokens.flip(1)), logits)
    names = {name for name, _ in model.named_parameters()}
    assert "layers.0.attention.attention.project_k" in names  # learned with the rest


def test_places_of_an_image_are_alike_where_pixels_are_near():
    size, width = 8, 32
    places = sinusoids(size, width).reshape(size, size, width)
    assert (abs((places**2).mean(dim=-1) - 1) < 1e-6).all()
    alike = torch.einsum("c,yxc->yx", places[3, 4], places)
    torch.testing.assert_close(alike[2, 4], alike[4, 4])
    torch.testing.assert_close(alike[3, 3], alike[3, 5])
    assert alike[3, 4] > alike[3, 5] > alike[3, 6]
    assert alike[3, 5] > alike[4, 5] > alike[5, 6]


def test_an_image_begins_with_its_brightness():
    model = Classifier(257, 2, 1, 64, "pytorch", **SIZES, pixels=True)
    torch.testing.assert_close(model.places.weight.data, sinusoids(8, SIZES["width"]))
    tokens = model.tokens.weight.detach()
    light = tokens @ tokens[-1]
    assert torch.corrcoef(torch.stack([light, torch.arange(257.0)]))[0, 1] > 0.9


def test_images_are_turned_in_all_eight_ways():
    image = np.arange(9)
    given = np.tile(image, (200, 1, 1))
    found = turned(given, np.random.default_rng(0))
    want = [np.rot90(x, k) for x in (image.reshape(3, 3), image.reshape(3, 3).T) for k in range(4)]
    assert found.shape == given.shape
    assert {tuple(x.ravel()) for x in found} == {tuple(x.ravel()) for x in want}


@pytest.fixture
def tiny(monkeypatch):
    sizes = {"listops": {"n": 32, "depth": 2, "arguments": 3}, "retrieval": {"n": 32}, "image": {}}
    counts = {"train": 16, "validation": 4, "test": 8, "steps": 6, "batch": 2, "evaluate": 3}
    methods = ["pytorch", "nbflash", "nbflash-butterfly", "linear"]
    shrink(monkeypatch, "paper-lra", "quick", tasks=sizes, methods=methods, seeds=[0, 1], **counts)
    monkeypatch.setattr("experiments.papers.pictures.why_not", lambda: "no images here")


def test_lra(tmp_path, capsys, tiny):
    command = ("lra", "--quick", "--device", "cpu", "--out", tmp_path)
    assert run(*command, "--minutes", 1e-9) == 0
    command += ("--seed", 1)
    assert run(*command, "--task", "listops", "--method", "linear") == 0
    first = read_csv(tmp_path / "paper-lra.csv")
    assert run(*command, "--resume") == 0
    rows = read_csv(tmp_path / "paper-lra.csv")
    assert rows[0] == first[0]
    assert len({(row["task"], row["method"]) for row in rows}) == len(rows) == 2 * 4
    assert {row["steps"] for row in rows} == {"6"}
    assert {row["seed"] for row in rows} == {"1"}
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    text = capsys.readouterr().out
    assert "image is left out (task): no images here" in text
    assert "(37.6)" in text
    assert run(*command, "--task", "sorting") == 2
    assert "--task sorting: expected one of listops" in capsys.readouterr().err
    assert run(*command, "--seed", 2) == 2
    assert "--seed 2: expected one of 0, 1" in capsys.readouterr().err


def test_speed_is_apart_from_what_is_learned(tmp_path, capsys, monkeypatch):
    tasks = {"text": {"n": 32}}
    methods = ["pytorch", "nbflash"]
    shrink(monkeypatch, "paper-lra", "speed", tasks=tasks, methods=methods, steps=6, train=8)
    command = ("lra", "--device", "cpu", "--out", tmp_path)
    assert run(*command, "--speed", "--quick") == 2
    assert "exclude each other" in capsys.readouterr().err
    assert run(*command, "--speed") == 0
    rows = read_csv(tmp_path / "paper-lra-speed.csv")
    assert [row["method"] for row in rows] == methods
    assert all(float(row["ms_a_step"]) > 0 for row in rows)
    assert not (tmp_path / "paper-lra.csv").exists()
    assert "Milliseconds of a step" in capsys.readouterr().out


def test_the_table(capsys):
    row = {"task": "text", "method": "pytorch", "accuracy": "0.5", "ms_a_step": "6", "classes": "8"}
    rows = [
        row,
        row | {"accuracy": "0.7"},
        row | {"method": "nbflash", "ms_a_step": "2"},
        row | {"method": "linear", "ms_a_step": ""},
    ]
    assert speedup(rows, "text", "nbflash") == 3.0
    assert speedup(rows, "text", "linear") is None
    report(rows, sweeps.load("paper-lra")["paper"])
    text = capsys.readouterr().out
    assert "60.0 ± 10.0 (63.6)" in text
    assert "3.00 (2.4)" in text
    assert "text 12.5 %" in text


def test_long(tmp_path, capsys, monkeypatch):
    """One task by length of context."""
    sizes = {"text32": {"task": "text", "n": 32}, "text64": {"task": "text", "n": 64, "steps": 2}}
    shrink(monkeypatch, "paper-long", "quick", tasks=sizes, train=8, validation=4, test=4)
    assert run("long", "--quick", "--device", "cpu", "--out", tmp_path) == 0
    rows = read_csv(tmp_path / "paper-long.csv")
    found = [(row["task"], row["method"], row["n"], row["steps"]) for row in rows]
    assert found == [
        ("text32", "nbflash", "32", "4"),
        ("text32", "nbflash-butterfly", "32", "4"),
        ("text64", "nbflash", "64", "2"),
        ("text64", "nbflash-butterfly", "64", "2"),
    ]


def test_pathx_grows(tmp_path, capsys, monkeypatch):
    """The larger images begin with the weights of the smaller ones."""
    small = {"task": "pathfinder", "size": 24}
    sizes = {"path24": small, "path32": small | {"size": 32, "start": "path24", "rate": 0.0}}
    shrink(monkeypatch, "paper-pathx", "quick", tasks=sizes)
    command = ("pathx", "--quick", "--device", "cpu", "--out", tmp_path)
    assert run(*command, "--task", "path32") == 2
    assert "path32 starts from the weights of path24" in capsys.readouterr().err
    assert run(*command) == 0
    assert [row["task"] for row in read_csv(tmp_path / "paper-pathx.csv")] == ["path24", "path32"]
    load = lambda task: torch.load(tmp_path / "pathx" / f"{task}-nbflash-butterfly-0.pt")["model"]
    one, other = load("path24"), load("path32")  # trained at a rate of 0
    assert all(torch.equal(one[name], other[name]) for name in one if name != "places.weight")
    assert other["places.weight"].shape == (32 * 32, 128)


def test_places_are_interpolated_on_the_image():
    places = torch.arange(4.0).reshape(2, 2)[..., None] * torch.ones(3)
    grown = _grown(places.flatten(0, 1), 16).unflatten(0, (4, 4))
    assert torch.equal(grown[::3, ::3], places)  # corners
    assert torch.equal(grown[0, :, 0], torch.tensor([0.0, 0.25, 0.75, 1.0]))
    assert torch.equal(grown[:, 0, 0], torch.tensor([0.0, 0.5, 1.5, 2.0]))
