"""Building: the same bytes for the same settings, complete or not at all, clear refusals, and the command."""

from __future__ import annotations

import argparse
import json

import pytest

from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.world import World, WorldSettings, build, build_world, cli

SPLITS = {"sft": 12, "rl": 4, "val": 2, "test": 2}
PICTURES = {"emblem": 0.7, "scene": 0.1, "blurred": 0.1, "skewed": 0.1}


def small(path, **options) -> World:
    return build_world(path, **{"pages": 40, "splits": SPLITS, "pictures": PICTURES, **options})


def files(path):
    return {
        str(file.relative_to(path)): file.read_bytes()
        for folder in ("tasks", "images")
        for file in [path / "pages.xml", path / "world.json", *(path / folder).iterdir()]
    }


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> World:
    return small(tmp_path_factory.mktemp("first") / "world")


def test_the_same_settings_give_the_same_bytes(first, tmp_path):
    second = small(tmp_path / "other", workers=1)
    assert files(second.path) == files(first.path)
    assert len(files(first.path)) > 20


def test_another_seed_gives_another_world(first, tmp_path):
    other = small(tmp_path / "world", seed=1, pictures={"emblem": 1.0})
    assert other.fingerprint != first.fingerprint
    assert not set(other.entities) & set(first.entities)


def test_an_existing_directory_is_kept_unless_forced(first, tmp_path):
    kept = tmp_path / "mine"
    kept.mkdir()
    (kept / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match=r"mine exists already: choose another directory, or .* --force"):
        small(kept)
    with pytest.raises(DataError, match="mine is no world, so it is not replaced"):
        small(kept, force=True)
    assert (kept / "thesis.txt").read_text() == "years of work"


def test_force_replaces_a_world_when_the_new_one_is_complete(tmp_path, monkeypatch):
    out = tmp_path / "world"
    old = small(out, pictures={"emblem": 1.0}).fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(build._Builder, "_write", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            small(out, seed=2, pictures={"emblem": 1.0}, force=True)
    assert World.open(out).fingerprint == old
    assert [path.name for path in tmp_path.iterdir()] == ["world"]
    assert small(out, seed=2, pictures={"emblem": 1.0}, force=True).fingerprint != old
    assert [path.name for path in tmp_path.iterdir()] == ["world"]


def test_a_world_too_small_for_its_tasks_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="2000 tasks of 2 hops were asked, but this world of 40 pages"):
        small(tmp_path / "world", splits={"sft": 5000})
    assert not list(tmp_path.iterdir())


def test_what_is_no_world_is_refused(first, tmp_path):
    with pytest.raises(DataError, match=r"no world at .*: make one with `opensearch world"):
        World.open(tmp_path / "none")
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "world.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match="has format 99, this version reads 2: build it again"):
        World.open(strange)


def test_settings_are_checked():
    with pytest.raises(ConfigurationError, match="seed=-1: must be 0 or more"):
        WorldSettings(seed=-1)
    with pytest.raises(ConfigurationError, match=r"pictures names \['photo'\]: the kinds are emblem, labelled, sign"):
        WorldSettings(pictures={"photo": 1.0})
    with pytest.raises(ConfigurationError, match=r"sum to 0\.5: shares must sum to 1"):
        WorldSettings(pictures={"emblem": 0.5})
    with pytest.raises(ConfigurationError, match="give each split a size of 0 or more"):
        WorldSettings(splits={"sft": -1})
    with pytest.raises(ConfigurationError, match="a split's name is a file's name"):
        WorldSettings(splits={"../x": 1})


def test_the_command(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    out = tmp_path / "world"
    sizes = ["--sft", "3", "--rl", "2", "--val", "0", "--test", "1"]
    assert cli.run(parser.parse_args([str(out), "--pages", "40", "--seed", "4", *sizes])) == 0
    printed = capsys.readouterr().out
    assert World.open(out).fingerprint[:12] in printed
    assert [line.split()[:2] for line in printed.splitlines()[2:6]] == [
        ["sft", "3"],
        ["rl", "2"],
        ["val", "0"],
        ["test", "1"],
    ]


def test_manifest_of_another_kind(tmp_path):
    (tmp_path / "world.json").write_text("[1]")
    with pytest.raises(DataError, match=r"world\.json describes no world: it holds a JSON list, not an object"):
        World.open(tmp_path)
