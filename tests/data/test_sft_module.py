import json
import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from opensearch_lightning.chat import ChatRenderer, ModelBatch, PackedBatch, SFTBatch
from opensearch_lightning.data import SearchVLSFTDataModule, ShardKind, ShardReader, write_sft_shards
from opensearch_lightning.data.lengths import measure
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.errors import ConfigurationError, DataError
from tests.data.ranks import on_rank
from tests.data.rows import SYSTEM, answer, call, conversation, picture, row, sft_shards
from tests.data.trainers import Recorder, trainer
from tests.models.tiny import tiny_processor, tiny_renderer

CROP = {"type": "function", "function": {"name": "crop", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft_shards(tmp_path_factory.mktemp("sft") / "s", 12)


def module(shards: Any, **options: Any) -> SearchVLSFTDataModule:
    return SearchVLSFTDataModule(shards, tiny_processor(), **{"batch_size": 4, **options})


def only(batch: SFTBatch) -> ModelBatch:
    """The one padded pass of a batch."""
    (one,) = batch.passes
    assert isinstance(one, ModelBatch)
    return one


def padded_rows(loader: Any) -> Iterator[ModelBatch]:
    return map(only, loader)


def rows_of(one: ModelBatch | PackedBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and steps of each row of a pass."""
    if isinstance(one, ModelBatch):
        return [
            (ids[valid], steps[valid]) for ids, steps, valid in zip(one.input_ids, one.step_ids, one.valid, strict=True)
        ]
    return [
        (one.input_ids[0, places[valid]], steps[valid])
        for places, steps, valid in zip(one.index_BT, one.step_ids, one.valid, strict=True)
    ]


def taught(batch: SFTBatch) -> list[list[str]]:
    """Of each row what the policy is taught, turn by turn."""
    renderer = tiny_renderer()
    return [
        [renderer.decode(ids[steps == step].tolist()) for step in range(int(steps.max()) + 1)]
        for one in batch.passes
        for ids, steps in rows_of(one)
    ]


def first_turns(batches: Any, number: int) -> list[str]:
    return [turns[0] for batch in islice(batches, number) for turns in taught(batch)]


def test_batches_hold_the_rows(shards: Path) -> None:
    data = module(shards)
    whole = next(iter(data.train_dataloader()))
    batch = only(whole)
    assert batch.input_ids.shape[0] == 4
    assert batch.image_grid_thw is not None
    assert len(batch.image_grid_thw) == 4
    for turns in taught(whole):
        number = turns[0].split('"town ')[1].split('"')[0]
        assert turns == [call(f"town {number}"), answer(f"town {number}")]
    renderer = tiny_renderer()
    ends = batch.input_ids == renderer.end_of_turn_id
    assert bool((batch.step_ids[ends].view(4, -1) == torch.tensor([-1, -1, 0, -1, 1])).all())
    assert int((batch.input_ids == renderer.image_token_id).sum()) == int(batch.image_grid_thw.prod(-1).sum()) // 4
    assert bool((batch.step_ids[~batch.valid] == -1).all())


def test_every_row_comes_once_an_epoch(shards: Path) -> None:
    data = module(shards)
    assert data.n_rows == 12
    epochs = [first_turns(iter(data.train_dataloader()), 3)]
    assert data.steps_per_epoch == 3.0
    assert sorted(epochs[0]) == sorted(call(f"town {i}") for i in range(12))


def test_kept_tokens_change_nothing(shards: Path) -> None:
    kept, rendered = module(shards), module(shards, cached_tokens=0)
    for _ in range(2):  # the second pass reads what the first kept
        pairs = zip(padded_rows(kept.train_dataloader()), padded_rows(rendered.train_dataloader()), strict=False)
        for one, other in islice(pairs, 6):
            for name, value in vars(one).items():
                assert torch.equal(value, getattr(other, name)), name


def test_ranks_share_each_global_batch(shards: Path) -> None:
    whole = first_turns(iter(module(shards, batch_size=4).train_dataloader()), 5)
    parts = [on_rank(module(shards, batch_size=2), rank, 2) for rank in range(2)]
    shared = [first_turns(iter(part.train_dataloader()), 5) for part in parts]
    for i in range(5):
        assert sorted(shared[0][2 * i : 2 * i + 2] + shared[1][2 * i : 2 * i + 2]) == sorted(whole[4 * i : 4 * i + 4])
    assert parts[0].state_dict() == parts[1].state_dict() == module(shards, batch_size=4).state_dict()


def test_more_rows_a_batch_than_there_are_is_refused(shards: Path) -> None:
    with pytest.raises(ConfigurationError, match="takes 14 distinct rows"):
        on_rank(module(shards, batch_size=7), 0, 2).train_dataloader()


def test_rows_too_long_are_dropped_whole_and_named(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = sorted(
        int(batch.valid.sum()) for batch in islice(padded_rows(module(shards, batch_size=1).train_dataloader()), 12)
    )
    with caplog.at_level(logging.WARNING):
        data = module(shards, max_length=lengths[-2], max_dropped=0.1)
        assert data.n_rows == 11
    # row 5 has the longest observation: 5·7 mod 12 = 11
    assert f"1 of 12 rows dropped: too_long 1 (row-5: {lengths[-1]} tokens)" in caplog.text
    kept = {int(batch.valid.sum(1).max()) for batch in islice(padded_rows(data.train_dataloader()), 6)}
    assert max(kept) == lengths[-2]
    with pytest.raises(DataError, match=r"2 of 12 rows dropped: too_long 2 \(row-.*at most 10\.0%.*raise max_length="):
        module(shards, max_length=lengths[-3], max_dropped=0.1).setup()


def test_length_counts_image_tokens(tmp_path: Path) -> None:
    rows = [row(i, images=[picture(i, side)]) for i, side in enumerate((32, 128))]
    write_sft_shards(rows, tmp_path / "s")
    small = 1  # a picture of 32 × 32 is one token, one of 128 × 128 sixteen
    batch = next(padded_rows(module(tmp_path / "s", batch_size=2).train_dataloader()))
    images = (batch.input_ids == tiny_renderer().image_token_id).sum(1).tolist()
    assert images == [small, 16 * small]
    limit = int(batch.valid.sum(1).max()) - 1
    assert module(tmp_path / "s", max_length=limit, max_dropped=0.5).n_rows == 1


@pytest.mark.parametrize("render_tools", [True, False])
def test_tools_of_a_row_reach_its_system_turn(tmp_path: Path, render_tools: bool) -> None:
    write_sft_shards([row(0, tools=json.dumps([CROP])), row(1)], tmp_path / "s")
    data = module(tmp_path / "s", batch_size=2, render_tools=render_tools)
    batch = next(padded_rows(data.train_dataloader()))
    texts = [
        tiny_renderer().decode(ids[valid].tolist()) for ids, valid in zip(batch.input_ids, batch.valid, strict=True)
    ]
    assert [json.dumps(CROP) in text for text in sorted(texts, key=len)] == [False, render_tools]
    if render_tools:
        expected = ChatRenderer(tiny_processor(), tools_in_system=[CROP]).prompt(SYSTEM, [picture(0)])
        longest = max(range(2), key=lambda i: int(batch.valid[i].sum()))
        head = expected.token_ids[: expected.token_ids.index(tiny_renderer().image_token_id)]
        assert batch.input_ids[longest, : len(head)].tolist() == head


def test_unreadable_image_shape_is_dropped(tmp_path: Path) -> None:
    # decodes, but no processor takes an aspect ratio above 200
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (2000, 2)).save(buffer, format="PNG")
    write_sft_shards([row(0, images=[buffer.getvalue()]), row(1)], tmp_path / "s")
    with pytest.raises(DataError, match=r"1 of 2 rows dropped: broken_image 1 \(row-0\)"):
        module(tmp_path / "s", batch_size=1).setup()


def test_validation_reads_every_row_once(shards: Path) -> None:
    for world_size, size in ((1, 5), (2, 5), (2, 3), (5, 1)):
        taken: Counter[str] = Counter()
        numbers = set()
        for rank in range(world_size):
            data = on_rank(module(shards, batch_size=1, val_shards=shards, val_batch_size=size), rank, world_size)
            batches = list(data.val_dataloader())
            numbers.add(len(batches))
            assert len(batches) == len(data.val_dataloader())
            taken.update(turns[0] for batch in batches for turns in taught(batch) if turns)
        assert len(numbers) == 1  # collective operations of one rank would wait for the others
        assert taken == {call(f"town {i}"): 1 for i in range(12)}


def test_no_validation_without_shards(shards: Path) -> None:
    assert list(module(shards).val_dataloader()) == []
    recorder = Recorder()
    trainer(2, val_check_interval=1).fit(recorder, datamodule=module(shards))
    assert recorder.validated == []


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_batches_pass_through_every_precision(shards: Path, precision: Any) -> None:
    recorder = Recorder()
    data = module(shards, val_shards=shards)
    trainer(2, val_check_interval=1, precision=precision).fit(recorder, datamodule=data)
    assert len(recorder.trained) == 2
    assert len(recorder.validated) == 6
    # and outside of a running Trainer the loaders yield plain batches
    assert isinstance(next(iter(data.train_dataloader())), SFTBatch)


def test_turns_without_images(tmp_path: Path) -> None:
    turns = conversation(("human", "Q"), ("gpt", answer("a")))
    write_sft_shards([{"conversations": turns}, {"conversations": turns}], tmp_path / "s")
    batch = next(iter(module(tmp_path / "s", batch_size=2).train_dataloader()))
    assert only(batch).pixel_values is None
    assert taught(batch) == [[answer("a")], [answer("a")]]


def test_lengths_are_kept_from_one_start_to_the_next(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"lengths_dir": tmp_path / "lengths", "cached_tokens": 0}
    module(shards, **options).prepare_data()
    (kept,) = (tmp_path / "lengths").iterdir()
    expected = first_turns(iter(module(shards).train_dataloader()), 3)
    render = SampleSource.sample
    monkeypatch.setattr(SampleSource, "sample", None)  # nothing is rendered
    data = module(shards, **options)
    data.setup()
    monkeypatch.setattr(SampleSource, "sample", render)
    assert first_turns(iter(data.train_dataloader()), 3) == expected
    # other tokens have a file of their own
    module(shards, **options, render_tools=False).setup()
    assert len(list((tmp_path / "lengths").iterdir())) == 2
    assert kept.exists()


def test_workers_measure_the_same(shards: Path) -> None:
    orders = [module(shards, num_workers=workers).state_dict() for workers in (0, 2)]
    assert orders[0] == orders[1]
    source = SampleSource(ShardReader(shards, kind=ShardKind.SFT), tiny_processor())
    assert measure(source).tolist() == measure(source, num_workers=2).tolist()


def test_reading_leaves_the_global_randomness_alone(shards: Path) -> None:
    state = torch.get_rng_state()
    next(iter(module(shards).train_dataloader()))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("held", ["<|im_end|>", "<think>", "<|image_pad|>"])
def test_tools_with_control_strings_have_their_own_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, held: str
) -> None:
    spiked = {"type": "function", "function": {"name": "crop", "description": f"ends at {held}"}}
    write_sft_shards([row(0, tools=[CROP]), row(1, tools=[spiked])], tmp_path / "s")
    with caplog.at_level(logging.WARNING):
        assert module(tmp_path / "s", batch_size=1, max_dropped=0.5).n_rows == 1
    assert "1 of 2 rows dropped: control_strings_in_tools 1 (row-1)" in caplog.text
    assert f"row row-1 cannot be used: the tool schemas hold the control strings ['{held}']" in caplog.text
    # schemas that are not rendered harm nobody
    assert module(tmp_path / "s", batch_size=1, render_tools=False, max_dropped=0.0).n_rows == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", "2"),
        ("batch_size", -1),
        ("batch_size", 2.5),
        ("batch_size", None),
        ("val_batch_size", 0),
        ("val_batch_size", -1),
        ("pack_tokens", 0),
        ("pack_tokens", "x"),
        ("micro_batch", 0),
        ("max_tokens_per_pass", -5),
        ("chunk_window", "2"),
        ("max_length", 0),
        ("max_length", None),
        ("window", 0),
        ("seed", -1),
        ("seed", None),
        ("num_workers", -1),
        ("max_dropped", None),
    ],
)
def test_settings_that_are_no_counts_are_refused(shards: Path, name: str, value: Any) -> None:
    settings = {"batch_size": 2, "packing": "tokens", name: value}
    with pytest.raises(ConfigurationError, match=rf"{name}.*{value!r}"):
        SearchVLSFTDataModule(shards, tiny_processor(), **settings)


@pytest.mark.parametrize("weight", ["x", None, float("nan"), -1])
def test_weights_that_are_no_numbers_are_refused(shards: Path, weight: Any) -> None:
    module = SearchVLSFTDataModule(shards, tiny_processor(), batch_size=1, weights={shards.name: weight})
    with pytest.raises(ConfigurationError, match="weights must be 0 or more"):
        module.train_dataloader()


def test_a_place_for_lengths_that_cannot_be_written_is_named(shards: Path) -> None:
    module = SearchVLSFTDataModule(shards, tiny_processor(), batch_size=1, lengths_dir=shards / "shards.json")
    with pytest.raises(DataError, match=r"lengths cannot be kept at .*shards.json/lengths-"):
        module.setup()


def test_no_folder_at_all_is_said() -> None:
    with pytest.raises(DataError, match="no shard folder given"):
        SearchVLSFTDataModule(None, tiny_processor(), batch_size=1).setup()  # type: ignore[arg-type]


@pytest.mark.parametrize("batches", [None, "3", -1])
def test_a_checkpoint_that_tells_no_number_of_batches_is_refused(shards: Path, batches: Any) -> None:
    module = SearchVLSFTDataModule(shards, tiny_processor(), batch_size=1)
    with pytest.raises(ConfigurationError, match=f"how many batches were trained .batches is {batches!r}"):
        module.load_state_dict({**module.state_dict(), "batches": batches})


def test_another_packing_is_named_as_such(shards: Path) -> None:
    saved = SearchVLSFTDataModule(shards, tiny_processor(), batch_size=1).state_dict()
    with pytest.raises(ConfigurationError, match="packing = 'off', now it is 'batch'"):
        SearchVLSFTDataModule(shards, tiny_processor(), batch_size=1, packing="batch").load_state_dict(saved)
