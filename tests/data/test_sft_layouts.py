"""What the DataModule of fine-tuning hands out: packs, passes, sources, cut rows, lengths beside the shards."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from opensearch_lightning.chat import ModelBatch, PackedBatch, SFTBatch
from opensearch_lightning.data import SearchVLSFTDataModule, ShardKind, ShardReader, write_sft_shards
from opensearch_lightning.data.lengths import measure
from opensearch_lightning.data.loader import EndlessLoader
from opensearch_lightning.data.order.plans import FullPackPlan
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.errors import ConfigurationError, DataError
from tests.data.ranks import on_rank
from tests.data.rows import answer, call, conversation, picture, row, sft_shards
from tests.data.test_sft_module import taught
from tests.models.tiny import tiny_processor, tiny_renderer

LIMIT = 400


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft_shards(tmp_path_factory.mktemp("sft") / "first", 12)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft") / "second"
    write_sft_shards([row(100 + i) for i in range(6)], folder)
    return folder


def module(shards: Any, **options: Any) -> SearchVLSFTDataModule:
    return SearchVLSFTDataModule(shards, tiny_processor(), **{"batch_size": 4, "max_length": LIMIT, **options})


def towns(batch: SFTBatch) -> list[int]:
    """Number of each row, read from its first turn."""
    return [int(turns[0].split('"town ')[1].split('"')[0]) for turns in taught(batch)]


def epoch(data: SearchVLSFTDataModule, number: int = 0) -> list[SFTBatch]:
    updates = [n for n in range(100) if data.epoch_of(n) == number]
    return list(islice(data.train_dataloader(), updates[0], updates[-1] + 1))


@pytest.mark.parametrize("packing", ["batch", "tokens"])
def test_packs_hold_the_rows_of_the_padded_layout(shards: Path, packing: Any) -> None:
    by_town = {}
    for batch in islice(module(shards, batch_size=1).train_dataloader(), 12):
        (one,) = batch.passes
        assert isinstance(one, ModelBatch)
        by_town[towns(batch)[0]] = one
    data = module(shards, batch_size=4 if packing == "batch" else 2, packing=packing)
    taken: Counter[int] = Counter()
    for batch in epoch(data):
        numbers = iter(towns(batch))
        for one, ids in zip(batch.passes, batch.source_ids, strict=True):
            assert isinstance(one, PackedBatch)
            assert one.input_ids.shape[1] <= LIMIT
            assert ids.tolist() == [0] * len(one.step_ids)
            assert one.image_grid_thw is not None
            assert len(one.image_grid_thw) == len(one.step_ids)
            for places, valid, steps in zip(one.index_BT, one.valid, one.step_ids, strict=True):
                alone = by_town[number := next(numbers)]
                assert one.input_ids[0, places[valid]].tolist() == alone.input_ids[0].tolist()
                assert one.position_ids[:, 0, places[valid]].tolist() == alone.position_ids[:, 0].tolist()
                assert steps[valid].tolist() == alone.step_ids[0].tolist()
                taken[number] += 1
    assert taken == dict.fromkeys(range(12), 1)
    assert 0.5 < data.packing_efficiency <= 1


def test_update_of_packs_keeps_the_number_of_trajectories(shards: Path) -> None:
    data = module(shards, packing="batch")
    assert data.steps_per_epoch == 3
    assert [len(towns(batch)) for batch in islice(data.train_dataloader(), 6)] == [4] * 6
    assert all(len(batch.passes) > 1 for batch in islice(data.train_dataloader(), 3))


def test_ranks_share_packs(shards: Path) -> None:
    for packing in ("batch", "tokens"):
        parts = [on_rank(module(shards, batch_size=2, packing=packing), rank, 2) for rank in range(2)]
        batches = [epoch(part) for part in parts]
        assert len(batches[0]) == len(batches[1]) == parts[0].steps_per_epoch == parts[1].steps_per_epoch
        assert sorted(town for share in batches for batch in share for town in towns(batch)) == list(range(12))
        for one, two in zip(*batches, strict=True):
            assert len(one.passes) == len(two.passes)
        assert parts[0].state_dict() == parts[1].state_dict()


def test_workers_change_no_pack(shards: Path) -> None:
    for packing in ("batch", "tokens"):
        loaders = [module(shards, packing=packing, batch_size=2, num_workers=n).train_dataloader() for n in (0, 2)]
        for one, two in islice(zip(*loaders, strict=False), 7):
            assert [p.input_ids.tolist() for p in one.passes] == [p.input_ids.tolist() for p in two.passes]


def test_epoch_is_planned_before_workers_start(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = module(shards, packing="tokens", batch_size=1, num_workers=2)
    planned: list[int] = []
    whole = FullPackPlan._epoch
    monkeypatch.setattr(FullPackPlan, "_epoch", lambda self, number: planned.append(number) or whole(self, number))
    loader = data.train_dataloader()
    assert isinstance(loader, EndlessLoader)
    batches = iter(loader)
    assert planned
    assert set(planned) == {0}
    next(batches)


def test_passes_of_padded_rows(shards: Path) -> None:
    (whole,) = next(iter(module(shards).train_dataloader())).passes
    batch = next(iter(module(shards, micro_batch=3).train_dataloader()))
    assert [len(one.step_ids) for one in batch.passes] == [3, 1]
    assert [len(ids) for ids in batch.source_ids] == [3, 1]
    assert isinstance(whole, ModelBatch)
    assert [
        ids[valid].tolist() for one in batch.passes for ids, valid in zip(one.input_ids, one.valid, strict=True)
    ] == [ids[valid].tolist() for ids, valid in zip(whole.input_ids, whole.valid, strict=True)]
    tokens = 2 * int(whole.valid.sum(1).max())
    batch = next(iter(module(shards, max_tokens_per_pass=tokens).train_dataloader()))
    assert len(batch.passes) >= 2
    assert all(one.step_ids.numel() <= tokens for one in batch.passes)


@pytest.mark.parametrize("packing", ["off", "batch", "tokens"])
def test_validation_is_laid_out_as_training(shards: Path, packing: Any) -> None:
    for world_size in (1, 5):
        taken: Counter[int] = Counter()
        for rank in range(world_size):
            data = module(shards, batch_size=1, packing=packing, val_shards=shards, val_batch_size=3)
            data = on_rank(data, rank, world_size)
            batches = list(data.val_dataloader())
            assert len(batches) == len(data.val_dataloader()) == -(-12 // (3 * world_size))
            kind = ModelBatch if packing == "off" else PackedBatch
            assert all(isinstance(one, kind) for batch in batches for one in batch.passes)
            assert all(one.input_ids.shape[-1] <= LIMIT for batch in batches for one in batch.passes)
            counted = [batch for batch in batches if any(bool((one.step_ids >= 0).any()) for one in batch.passes)]
            taken.update(town for batch in counted for town in towns(batch))
        assert taken == dict.fromkeys(range(12), 1)


def test_sources_are_runs_of_a_folder_or_its_name(shards: Path, other: Path, tmp_path: Path) -> None:
    mixed = Path(shutil.copytree(other, tmp_path / "mixed"))
    meta = json.loads((mixed / "shards.json").read_text())
    (mixed / "shards.json").write_text(json.dumps({**meta, "sources": [["live", 2], ["wiki", 1], ["live", 3]]}))
    reader = ShardReader([shards, mixed], kind=ShardKind.SFT)
    assert reader.sources == (("first", 12), ("live", 2), ("wiki", 1), ("live", 3))
    batches = epoch(module([shards, mixed], batch_size=9))
    assert batches[0].sources == ("first", "live", "wiki")
    named = {
        town: batch.sources[source]
        for batch in batches
        for town, source in zip(towns(batch), torch.cat(batch.source_ids).tolist(), strict=True)
    }
    expected = {**dict.fromkeys(range(12), "first"), **dict.fromkeys(range(100, 106), "live"), 102: "wiki"}
    assert named == expected
    (mixed / "shards.json").write_text(json.dumps({**meta, "sources": [["live", 2]]}))
    with pytest.raises(DataError, match="mixed holds 6 rows, its sources"):
        ShardReader(mixed, kind=ShardKind.SFT)


@pytest.mark.parametrize("packing", ["off", "batch", "tokens"])
def test_mixture_gives_each_source_its_share(shards: Path, other: Path, packing: Any) -> None:
    data = module([shards, other], batch_size=2, packing=packing, weights={"first": 1, "second": 2})
    rows = [town for number in range(2) for batch in epoch(data, number) for town in towns(batch)]
    assert Counter(town >= 100 for town in rows) == {False: 12, True: 24}
    # twice an epoch of 18 rows: all of the first source once, each of the second 4 times
    assert Counter(rows) == {**dict.fromkeys(range(12), 1), **dict.fromkeys(range(100, 106), 4)}
    with pytest.raises(ConfigurationError, match="weights name third, but the sources are first, second"):
        module([shards, other], weights={"first": 1, "third": 1}).train_dataloader()


def two_images(number: int) -> dict[str, Any]:
    """A row whose second observation has a large picture."""
    turns = conversation(
        ("human", "<image>Which town is it?"),
        ("gpt", call(f"town {number}")),
        ("observation", "<image>" + "Seen. " * 20),
        ("gpt", answer(f"town {number}")),
    )
    return {"id": f"row-{number}", "conversations": turns, "images": [picture(1, 64), picture(number, 128)]}


def test_long_rows_are_cut_at_a_turn_with_their_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    huge = {**two_images(9), "conversations": conversation(("human", "Q " * 300), ("gpt", answer("far")))}
    write_sft_shards([row(0), two_images(1), two_images(2), {**huge, "images": []}], tmp_path / "s")
    options = {"batch_size": 3, "max_length": 150, "max_dropped": 0.9, "lengths_dir": tmp_path / "lengths"}
    dropped = module(tmp_path / "s", **{**options, "batch_size": 1})
    assert (dropped.n_rows, dropped.n_cut) == (1, 0)
    with caplog.at_level(logging.WARNING):
        data = module(tmp_path / "s", too_long="cut", **options)
        assert (data.n_rows, data.n_cut) == (3, 2)
    assert (
        "2 of 3 rows were longer than 150 tokens and are cut behind a turn of the policy: row-1, row-2" in caplog.text
    )
    assert "1 of 4 rows dropped: too_long 1 (row-9:" in caplog.text
    (one,) = next(iter(data.train_dataloader())).passes
    assert isinstance(one, ModelBatch)
    assert one.image_grid_thw is not None
    assert one.pixel_values is not None
    pads = int((one.input_ids == tiny_renderer().image_token_id).sum())
    assert pads == int(one.image_grid_thw.prod(-1).sum()) // 4 == one.pixel_values.shape[0] // 4
    assert len(one.image_grid_thw) == 3
    assert one.input_ids.shape[1] <= 150
    turns = {len(turns) for turns in taught(next(iter(data.train_dataloader())))}
    assert turns == {1, 2}
    # the lengths of cut rows are kept as well
    assert len(list((tmp_path / "lengths").glob("cut-*-150.json"))) == 1
    again = module(tmp_path / "s", too_long="cut", **options)
    assert again.state_dict() == data.state_dict() != dropped.state_dict()


def test_lengths_are_found_beside_the_shards(
    shards: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in (shards, other)]
    for folder in folders:
        measure(SampleSource(ShardReader(folder, kind=ShardKind.SFT), tiny_processor()), folder=folder)
    expected = module([shards, other]).state_dict()
    monkeypatch.setattr(SampleSource, "length", None)  # nothing is measured
    assert module(folders).state_dict() == expected
    # in another mixture they serve as well
    assert module(folders[::-1]).n_rows == 18
    (kept,) = folders[1].glob("lengths-*.json")
    kept.write_text("[1, 2]")
    with pytest.raises(DataError, match="second.*kept lengths for 2 rows, there are 6; remove it"):
        module(folders).setup()


def test_chunks_are_read_one_window_at_a_time(tmp_path: Path) -> None:
    sft_shards(tmp_path / "s", 12, chunk_bytes=2000)
    reader = ShardReader(tmp_path / "s", kind=ShardKind.SFT)
    assert sum(reader.chunks) == 12
    assert len(reader.chunks) >= 4
    chunk_of = [chunk for chunk, rows in enumerate(reader.chunks) for _ in range(rows)]
    data = module(tmp_path / "s", batch_size=1, window=1, chunk_window=1)
    chunks = [chunk_of[town] for batch in epoch(data) for town in towns(batch)]
    assert len([c for i, c in enumerate(chunks) if i == 0 or c != chunks[i - 1]]) == len(reader.chunks)
    assert chunks != sorted(chunks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": "full"}, "packing='full'; set one of off, batch, tokens"),
        ({"too_long": "split"}, "too_long='split'; set one of drop, cut"),
        ({"pack_tokens": 300}, "pack_tokens=300 has no room for a row of max_length=400"),
        ({"micro_batch": 0}, "micro_batch=0; set at least 1"),
        ({"max_tokens_per_pass": 9, "packing": "batch"}, "max_tokens_per_pass=9 is of padded passes; with packing"),
        ({"chunk_window": 0}, "chunk_window=0; set at least 1"),
    ],
)
def test_settings_outside_their_range_are_refused(shards: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        module(shards, **options).train_dataloader()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"packing": "batch"}, "packing = 'tokens', now it is 'batch'"),
        ({"pack_tokens": 500}, "pack_tokens = 400, now it is 500"),
        ({"weights": {"first": 2, "second": 1}}, "^the weights or the sources changed since"),
        ({"chunk_window": 2}, "^chunk_window, or how the rows lie in chunks changed since"),
        ({"seed": 1}, "seed = 3407, now it is 1"),
    ],
)
def test_checkpoint_of_another_plan_is_refused(
    shards: Path, other: Path, changed: dict[str, Any], message: str
) -> None:
    base: Callable[..., SearchVLSFTDataModule] = lambda **options: module(  # noqa: E731
        [shards, other], **{"packing": "tokens", "weights": {"first": 1, "second": 1}, **options}
    )
    saved = base().state_dict()
    base().load_state_dict(saved)
    with pytest.raises(ConfigurationError, match=message):
        base(**changed).load_state_dict(saved)


def test_prompts_are_shared_only_where_they_are_equal(tmp_path: Path) -> None:
    write_sft_shards([row(1), row(1, words=9), row(2)], tmp_path / "s")
    (one,) = next(
        iter(module(tmp_path / "s", batch_size=3, packing="batch", max_length=2000).train_dataloader())
    ).passes
    assert isinstance(one, PackedBatch)
    assert sorted(segment.parent >= 0 for segment in one.segments) == [False, False, True, True]
