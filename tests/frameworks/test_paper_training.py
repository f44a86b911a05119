"""BERT and GPT-2 in training: equal losses, rates, and runs that go on."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from paper_runs import read_csv, run, shrink

from experiments.commands.paper.training import compared
from experiments.papers import texts
from experiments.papers.language import (
    ATTENTION,
    STRETCH,
    UNMASKED,
    Language,
    make_model,
    sparse_mask,
)

pytestmark = pytest.mark.usefixtures("one_thread")
GPT = {"kind": "gpt2", "layers": 1, "heads": 2, "width": 16, "vocabulary": 257}
TEXT = bytes(range(32, 127)) * 40


@pytest.fixture
def tiny(monkeypatch):
    runs = [["tiny", 64, 2, 6], ["tiny-bert", 64, 2, 6]]
    attention = ["eager", "sdpa-cudnn", "nbflash", "nbflash-sparse", "none"]
    shrink(monkeypatch, "paper-training", "quick", runs=runs, attention=attention)


def test_training(tmp_path, capsys, tiny):
    command = ("training", "--quick", "--device", "cpu", "--out", tmp_path)
    assert run(*command, "--minutes", 1e-9) == 0
    assert run(*command, "--resume") == 0
    rows = read_csv(tmp_path / "paper-training.csv")
    assert len(rows) == 2 * 5
    for row, speedup, share, off in compared(rows):
        if row["attention"] == "sdpa-cudnn":  # a CPU has none
            assert row["status"]
            assert row["ms_a_step"] == ""
            continue
        assert len(row["losses"].split()) == 2
        assert speedup > 0
        assert share < 1
        if row["attention"] in ("eager", "nbflash"):
            # Six steps of three passes with sums of at most 64 × 64 terms.
            loss = float(row["losses"].split()[0])
            assert off <= 6 * 3 * 64 * 64 * np.finfo(np.float32).eps * loss
        else:
            assert off > 0
    text = capsys.readouterr().out
    assert "Time is over" in text
    assert "gpt2-small 3.5" in text


def test_context(tmp_path, capsys, monkeypatch):
    """One model by length of context, which ends with the validation of its last step."""
    runs = [["tiny-bytes", 32, 4, 5], ["tiny-bytes", 64, 2, 5]]
    sizes = {"runs": runs, "text": "packages", "evaluate": 2, "warmup": 1}
    shrink(monkeypatch, "paper-training", "context", **sizes)
    assert run("training", "--context", "--device", "cpu", "--out", tmp_path) == 0
    rows = read_csv(tmp_path / "paper-context.csv")
    assert [(row["tokens"], row["attention"]) for row in rows] == [
        (n, attention) for n in ("32", "64") for attention in ("nbflash", "nbflash-sparse")
    ]
    for row in rows:
        curve = row["validations"].split()
        assert len(curve) == len(row["losses"].split()) == 3
        assert row["validation"] == curve[-1]
        assert abs(float(curve[0]) - np.log(257)) < 0.5  # nothing is known yet
    assert (tmp_path / "paper-context.png").exists()
    assert "perplexity of GPT-2 small by context: 1024 18.2" in capsys.readouterr().out


def test_older_results_are_refused_before_training(tmp_path, capsys, tiny):
    path = tmp_path / "paper-training.csv"
    path.write_text("model,tokens,batch,attention,seed,ms_a_step\ntiny,64,2,eager,0,1.0\n")
    command = ("training", "--quick", "--device", "cpu", "--resume", "--out", tmp_path)
    assert run(*command) == 2
    assert "has no column evaluate: take another --out" in capsys.readouterr().err


def test_without_checkpoints_nothing_is_kept(tmp_path, monkeypatch):
    runs, forms = [["tiny", 32, 2, 2], ["tiny", 32, 4, 2]], ["eager"]
    given = {"runs": runs, "attention": forms, "checkpoints": False}
    shrink(monkeypatch, "paper-training", "quick", **given)
    assert run("training", "--quick", "--device", "cpu", "--out", tmp_path) == 0
    rows = read_csv(tmp_path / "paper-training.csv")
    assert [row["batch"] for row in rows] == ["2", "4"]
    assert not list(tmp_path.rglob("*.pt"))


def test_sizes_exclude_each_other(tmp_path, capsys):
    assert run("training", "--quick", "--context", "--out", tmp_path) == 2
    assert "--quick and --context exclude each other" in capsys.readouterr().err


def test_a_cpu_has_no_graphs(tmp_path, capsys):
    assert run("training", "--graphs", "--device", "cpu", "--out", tmp_path) == 2
    assert "no sizes 'graphs' for the device 'cpu'" in capsys.readouterr().err


def test_batches_are_a_function_of_the_step():
    model = make_model(GPT, 32, "eager", seed=0)
    make = lambda seed: Language(
        model, TEXT, TEXT[5:], 32, 2, attention="eager", dtype="float32", seed=seed
    )
    pieces, labels = make(0).batch_at(3)
    np.testing.assert_array_equal(pieces, labels)
    np.testing.assert_array_equal(make(0).batch_at(3)[0], pieces)
    assert (make(0).batch_at(4)[0] != pieces).any()
    assert (make(1).batch_at(3)[0] != pieces).any()


def test_held_out_bytes_are_the_same_however_they_are_cut():
    """Without attention and positions a byte's loss is its own, wherever a piece begins."""

    class Bigram(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(256, 256, dtype=torch.float64))

        def forward(self, input_ids, labels):
            scores = self.table[input_ids].transpose(1, 2)
            return SimpleNamespace(loss=torch.nn.functional.cross_entropy(scores, labels))

    model, given = Bigram(), {"attention": "nbflash", "dtype": "float32"}
    text = np.random.default_rng(0).integers(256, size=5 * STRETCH + 7, dtype=np.uint8)
    losses = [
        Language(model, TEXT * 5, text.tobytes(), tokens, batch, seed=seed, **given).evaluate()
        for tokens, batch, seed in ((8, 1024, 0), (1024, 8, 1), (STRETCH, 1, 2))
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=STRETCH * np.finfo(float).eps)
    of_stretch = [
        torch.nn.functional.cross_entropy(model.table[x], x).item()
        for x in torch.from_numpy(text[: 5 * STRETCH].astype(np.int64)).reshape(5, STRETCH)
    ]
    of_four = (sum(of_stretch) - np.array(of_stretch)) / 4  # one is left out, none is cut
    assert min(abs(of_four / losses[0] - 1)) < STRETCH * np.finfo(float).eps
    assert len(set(of_stretch)) == 5


def test_no_attention_gives_the_values_back():
    """Then no token sees another: a change of the first byte reaches the first logits alone."""
    model = make_model(GPT, 32, "none", seed=0).eval()
    tokens = torch.arange(32)[None]
    other = tokens.clone()
    other[0, 0] = 99
    with torch.no_grad():
        one, two = (model(input_ids=x).logits for x in (tokens, other))
    assert torch.equal(one[:, 1:], two[:, 1:])
    assert not torch.equal(one[:, :1], two[:, :1])


@pytest.mark.parametrize("kind", ["gpt2", "gpt-neox", "bert"])
@pytest.mark.parametrize("attention", ["sdpa-efficient", "nbflash", "nbflash-sparse"])
def test_steps_that_are_recorded_are_the_same(kind, attention):
    ids = torch.from_numpy(np.random.default_rng(0).integers(256, size=(2, 256)))
    models = [
        make_model(GPT | {"kind": kind}, 256, attention, 0, 16, recorded=recorded)
        for recorded in (False, True)
    ]
    usual, unmasked = (model(input_ids=ids).logits for model in models)
    assert torch.equal(usual, unmasked)
    assert models[1].config._attn_implementation in UNMASKED.values()


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_sparse_mask(is_causal):
    mask = sparse_mask(512, 128, is_causal)
    dense = mask.dense()
    assert dense.diagonal().all()
    assert np.array_equal(dense, np.tril(dense)) == is_causal
    assert mask.tiles(32).kinds.nnz < 0.4 * 16 * 16


def test_names_are_those_of_the_sweep():
    from experiments.harness import sweeps

    sweep = sweeps.load("paper-training")
    assert tuple(sweep["attention"]) == ATTENTION
    sections = ("quick", "full", "context", "curves")
    for device, names in {"cpu": sections, "cuda": (*sections, "graphs")}.items():
        for section in names:
            settings = sweep | sweep[device] | sweep[device][section]
            assert all(x[0] in sweep["models"] for x in settings["runs"])
            assert settings["text"] in texts.CORPORA
            on_a_gpu = device == "cuda" and section in ("graphs", "context")
            assert settings.get("graph", False) == on_a_gpu
    assert set(sweep["cuda"]["graphs"]["attention"]) <= set(ATTENTION)
