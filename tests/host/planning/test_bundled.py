"""Cubins that come with nbflash: written, found, and damaged."""

import json

import pytest

from nbflash.cuda import bundled, kernel_key, sources

PACKS = {"sm_80-float16-64": {"a": b"first" * 50, "b": b"second"}, "other": {"c": b"third"}}
SOURCES = {"name": ["digest", {"module": "its"}]}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(bundled, "FOLDER", tmp_path / "cubins")
    caches = bundled.index, bundled._unpacked
    for each in caches:
        each.cache_clear()
    yield tmp_path / "cubins"
    for each in caches:
        each.cache_clear()


def test_without_a_folder_there_is_nothing(folder):
    assert bundled.index() == {"kernels": {}, "sources": {}}
    assert bundled.find("a") is None


def test_cubins_are_found_by_their_keys(folder):
    assert bundled.find("a") is None
    bundled.write(PACKS, SOURCES)
    for cubins in PACKS.values():
        for key, cubin in cubins.items():
            assert bundled.find(key) == cubin
    assert bundled.find("d") is None
    assert bundled.index()["sources"] == SOURCES
    names = {x.name for x in folder.iterdir()}
    assert names == {"sm_80-float16-64.xz", "other.xz", "index.json"}
    places = bundled.index()["kernels"]
    assert [places[key][:3] for key in "abc"] == [
        ["sm_80-float16-64.xz", 0, 250],
        ["sm_80-float16-64.xz", 250, 6],
        ["other.xz", 0, 5],
    ]


def test_what_is_written_takes_the_place_of_what_was(folder):
    bundled.write(PACKS, SOURCES)
    bundled.write({"other": {"e": b"fifth"}}, {})
    assert {x.name for x in folder.iterdir()} == {"other.xz", "index.json"}
    assert bundled.find("a") is None
    assert bundled.index()["sources"] == {}
    bundled.remove()
    assert [*folder.iterdir()] == []
    assert bundled.index()["kernels"] == {}


def test_a_damaged_pack_is_named(folder):
    bundled.write(PACKS, SOURCES)
    places = json.loads((folder / "index.json").read_text())
    places["kernels"]["b"][1] -= 1
    (folder / "index.json").write_text(json.dumps(places))
    bundled.index.cache_clear()
    assert bundled.find("a") == PACKS["sm_80-float16-64"]["a"]
    with pytest.raises(RuntimeError, match=r"sm_80-float16-64\.xz is damaged: install nbflash"):
        bundled.find("b")


def test_the_digest_of_sources_that_a_wheel_has_is_taken(folder, monkeypatch):
    """Nothing is parsed; that of other definitions is not."""
    roots = (("nbflash.cuda.tile.ring", "divmod_int32"),)
    monkeypatch.setattr(kernel_key, "cubin_dir", lambda: folder)
    monkeypatch.setattr(sources, "digest_of", lambda *roots: sources.Digest("of sources", {}))
    assert kernel_key._digest_of_sources.__wrapped__(roots) == "of sources"
    name = kernel_key.name_of_sources(roots)
    (folder / f"sources-{name}.json").unlink()
    bundled.write({}, {"another": ["no", {}], name: ["of the wheel", {}]})
    assert kernel_key._digest_of_sources.__wrapped__(roots) == "of the wheel"
