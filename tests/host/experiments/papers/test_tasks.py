"""The generators of Long Range Arena's tasks: labels that the tokens tell, seeds, parts."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import ndimage

from experiments.harness.errors import BadInput
from experiments.papers import listops, pathfinder, pictures, tasks, texts
from experiments.papers.dataset import PAD

SIZES = {
    "listops": {"n": 64},
    "text": {"n": 512},
    "retrieval": {"n": 512},
    "pathfinder": {"size": 32},
}


def _of(row):
    return row[row != PAD]


class TestListOps:
    """Brackets are kept: without them an expression has no value."""

    made = listops.make(200, 300, seed=0, shortest=20)

    def test_the_label_is_the_value_of_the_tokens(self):
        for (row,), label in zip(self.made.tokens, self.made.labels, strict=True):
            assert listops.evaluate(_of(row)) == label

    def test_lengths_tokens_and_classes(self):
        lengths = (self.made.tokens != PAD).sum(axis=-1)
        assert lengths.min() >= 20
        assert lengths.max() <= 300
        assert set(np.unique(self.made.tokens)) == set(range(len(listops.TOKENS)))
        assert set(self.made.labels) == set(range(10))

    def test_every_bracket_is_closed(self):
        names = np.array(listops.TOKENS)[self.made.tokens]
        opened = np.char.startswith(names, "[").sum(axis=-1)
        assert (opened == (names == listops.CLOSE).sum(axis=-1)).all()
        for (row,) in self.made.tokens[:5]:
            with pytest.raises(ValueError, match="brackets are open at the end"):
                listops.evaluate(_of(row)[_of(row) != len(listops.TOKENS) - 1])

    def test_without_closing_brackets_the_value_is_not_told(self):
        """The same tokens but for the closing brackets, and two values."""
        number = {name: i for i, name in enumerate(listops.TOKENS)}
        one, other = "[MAX [MIN 2 9 ] 5 ]", "[MAX [MIN 2 9 5 ] ]"
        values, stripped = [], []
        for text in (one, other):
            values.append(listops.evaluate([number[x] for x in text.split()]))
            stripped.append(text.replace("]", "").split())
        assert stripped[0] == stripped[1]
        assert values == [5, 2]

    def test_operators(self):
        number = {name: i for i, name in enumerate(listops.TOKENS)}
        text = "[SM 9 8 [MED 1 7 3 2 ] [MAX 4 [MIN 6 5 ] ] ]"  # 9 + 8 + 2 + 5
        assert listops.evaluate([number[x] for x in text.split()]) == 4
        with pytest.raises(ValueError, match="never opened"):
            listops.evaluate([number["]"]])


def test_pathfinder_is_solved_by_following_the_ink():
    """A dilation bridges gaps; then discs lie on one piece of ink where the label says so."""
    size = 32
    made = pathfinder.make(30, size, seed=0)
    for tokens, label in zip(made.tokens, made.labels, strict=True):
        image = tokens.reshape(size, size) - 1
        ink, _ = ndimage.label(ndimage.binary_dilation(image > 60))
        discs, count = ndimage.label(image > 200)
        assert count == 2
        centres = ndimage.center_of_mass(discs > 0, discs, [1, 2])
        one, other = (ink[tuple(np.round(x).astype(int))] for x in centres)
        assert (one == other) == label
    assert made.labels.mean() == 0.5


@pytest.mark.parametrize("size", [24, 64, 256])
def test_light_is_that_of_the_nearest_point(size):
    """Near a pixel; further ones are dark whatever their distance."""
    points = np.random.default_rng(0).uniform(0, size - 1, (40, 2))
    y, x = np.mgrid[:size, :size]
    pixels = np.stack([x, y], axis=-1)[..., None, :]
    whole = np.linalg.norm(pixels - points, axis=-1).min(axis=-1)
    found = pathfinder._distance(points, size)
    is_near = whole < 2
    assert is_near.any()
    np.testing.assert_array_equal(found[is_near], whole[is_near])
    assert (found >= whole).all()


def test_large_images_have_room():
    """Curves of Path-X: walks that fail are few, so that images are drawn in time."""
    made = pathfinder.make(2, 256, seed=0)
    assert made.tokens.shape == (2, 1, 256 * 256)
    assert (made.tokens > 200).any(axis=(1, 2)).all()


def test_small_images_have_no_room():
    with pytest.raises(ValueError, match="at least 24"):
        pathfinder.make(1, 16, seed=0)


def test_the_classes_of_pathfinder_have_the_same_ink():
    """No count of pixels tells them apart: five standard errors."""
    made = pathfinder.make(40, 32, seed=1)
    light = (made.tokens - 1.0).sum(axis=(1, 2))
    one, other = light[made.labels == 0], light[made.labels == 1]
    error = np.hypot(one.std(), other.std()) / len(one) ** 0.5
    assert abs(one.mean() - other.mean()) < 5 * error


class TestTexts:
    def test_parts_share_no_file(self):
        files = [texts.files_of(part) for part in texts.PARTS]
        for package in texts.PACKAGES:
            train, validation, test = (set(x[package]) for x in files)
            assert train
            assert validation
            assert test
            assert len(train) >= len(test)
        counts = [sum(len(x) for x in part.values()) for part in files]
        assert counts[0] > 2 * (counts[1] + counts[2])

    def test_a_package_without_sources(self, monkeypatch):
        """Some distributions leave out a part of the library."""
        monkeypatch.setattr(texts, "PACKAGES", ("email", "no_such_package"))
        with pytest.raises(BadInput, match="no_such_package: 0 sources"):
            texts.packages("train")

    def test_the_library_in_parts(self, tmp_path, monkeypatch):
        """Sources of two places, each file in one part; what distributions leave out in none."""
        root, torch = tmp_path / "lib", tmp_path / "torch"
        files = {root / f"{i}.py": b"%4d" % i * 100 for i in range(30)}
        files |= {torch / f"{i}.py": b"t%4d" % i * 100 for i in range(20)}
        files |= {root / "test" / "x.py": b"no" * 300, root / "short.py": b"s"}
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        monkeypatch.setattr(texts, "_root", lambda: root)
        spec = SimpleNamespace(origin=str(torch / "__init__.py"))
        monkeypatch.setattr(texts.importlib.util, "find_spec", {"torch": spec}.get)
        parts = [texts.library(part) for part in texts.PARTS]
        assert sum(map(len, parts)) == 30 * 400 + 20 * 500
        assert b"no" not in b"".join(parts)
        kept = [{x for x in files.values() if x in part} for part in parts]
        assert sum(map(len, kept)) == len(set.union(*kept)) == 50
        assert [len(x) for x in kept] == [35, 5, 10]
        monkeypatch.setattr(texts.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(BadInput, match="torch is not installed"):
            texts.library("train")

    def test_classes_are_packages(self):
        made = texts.classification(64, 256, 0, "test")
        assert np.bincount(made.labels).tolist() == [8] * len(texts.PACKAGES)
        files = texts.files_of("test")
        for (row,), label in zip(made.tokens, made.labels, strict=True):
            stretch = bytes((_of(row) - 1).astype(np.uint8))
            assert any(stretch in text for text in files[texts.PACKAGES[label]])

    def test_pairs_of_one_file(self):
        n = 200
        made = texts.retrieval(40, n, 0, "test")
        assert made.tokens.shape == (40, 2, n)
        files = [x for of in texts.files_of("test").values() for x in of]
        for pair, label in zip(made.tokens, made.labels, strict=True):
            one, other = (bytes((_of(row) - 1).astype(np.uint8)) for row in pair)
            shared = [text for text in files if one in text and other in text]
            if label:
                assert shared
                assert any(t.find(one) + n <= t.rfind(other) for t in shared if len(t) >= 2 * n)
            else:
                assert not shared or len(set(one)) < 20  # but for lines that all files have
        assert made.labels.mean() == 0.5


class TestPictures:
    @pytest.fixture(autouse=True)
    def shipped(self, monkeypatch):
        """Images as scikit-learn's: image i has its number in its first two pixels."""
        images = np.zeros((1797, 8, 8), np.uint16)
        images[:, 0, 0], images[:, 0, 1] = 1 + np.arange(1797) // 120, 1 + np.arange(1797) % 120
        monkeypatch.setattr(pictures, "digits", lambda: (images, np.arange(1797) % 10))

    def test_parts_share_no_image(self):
        seen = {}
        for part in ("train", "validation", "test"):
            made = pictures.make(300, 12, 0, part)
            rows = made.tokens.reshape(300, 12, 12).astype(int) - 1
            assert (rows.astype(bool).sum(axis=(1, 2)) == 2).all()
            seen[part] = {tuple(x[x > 0]) for x in rows}
        assert not seen["train"] & seen["test"]
        assert not seen["train"] & seen["validation"]
        assert not seen["validation"] & seen["test"]

    def test_labels_and_zoom(self):
        made = pictures.make(20, 32, 0, "test")
        assert made.vocabulary == 18
        for tokens, label in zip(made.tokens, made.labels, strict=True):
            (y, x), image = np.nonzero(tokens.reshape(32, 32) > 1), tokens.reshape(32, 32) - 1
            assert (len(np.unique(y)), len(x)) == (2, 8)  # two pixels, each a square of 2 × 2
            number = (int(image[y[0], x[0]]) - 1) * 120 + int(image[y[-1], x[-1]]) - 1
            assert number % 10 == label


def test_scikit_learn_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    assert "scikit-learn" in tasks.why_not("image")
    assert tasks.why_not("text") == ""
    with pytest.raises(BadInput, match="scikit-learn"):
        pictures.digits()


@pytest.mark.parametrize("task", SIZES)
def test_seeds_and_parts(task):
    draw = lambda seed, part: tasks.TASKS[task](4, seed=seed, part=part, **SIZES[task]).tokens
    first = draw(0, "train")
    assert np.array_equal(first, draw(0, "train"))
    assert not np.array_equal(first, draw(1, "train"))
    assert not np.array_equal(first, draw(0, "test"))


def test_chunks_are_drawn_by_processes(monkeypatch):
    monkeypatch.setattr(tasks, "CHUNK", 4)
    draw = lambda examples: tasks.TASKS["listops"](examples, seed=0, part="train", n=32).tokens
    first, both = draw(4), draw(6)
    assert len(both) == 6
    assert np.array_equal(both[:4], first)
    assert not np.array_equal(both[4:], first[:2])


def test_a_task_is_drawn_once(tmp_path, monkeypatch):
    given = (tmp_path, "listops", "train", 5, SIZES["listops"])
    made = tasks.load(*given)
    monkeypatch.setitem(tasks.TASKS, "listops", None)
    again = tasks.load(*given)
    assert np.array_equal(made.tokens, again.tokens)
    assert np.array_equal(made.labels, again.labels)
    assert (made.vocabulary, made.classes) == (again.vocabulary, again.classes)
