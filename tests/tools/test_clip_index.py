"""Search by embeddings of a model of two layers with random weights, kept in a file; nothing is downloaded."""

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.tools import LocalTool, ToolExecutor
from opensearch_lightning.tools.clip_index import ClipEncoder, ClipIndex
from opensearch_lightning.tools.local import search_image
from opensearch_lightning.tools.schemas import image_search_schema
from tests.tools.fakes import KEY, book, call
from tests.tools.pictures import emblem

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 1},
}
COUNT = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model names, and two weights files for the first."""
    folder = tmp_path_factory.mktemp("clip")
    with_text_from_the_hub = {**CONFIG, "text_cfg": {"hf_model_name": "roberta-base", "hf_tokenizer_name": "x"}}
    for name, config in [("tiny-a", CONFIG), ("tiny-b", {**CONFIG, "embed_dim": 8}), ("hub", with_text_from_the_hub)]:
        (folder / f"{name}.json").write_text(json.dumps(config))
        open_clip.add_model_config(folder / f"{name}.json")
    for seed in (0, 1):
        torch.manual_seed(seed)
        torch.save(open_clip.create_model("tiny-a").state_dict(), folder / f"{seed}.pt")
    return folder


@pytest.fixture(scope="module")
def setting(models):
    return {"model": "tiny-a", "weights": models / "0.pt"}


@pytest.fixture(scope="module")
def emblems():
    return [emblem(seed) for seed in range(COUNT)]


@pytest.fixture(scope="module")
def path(setting, emblems, tmp_path_factory):
    path = tmp_path_factory.mktemp("index") / "pictures"
    entries = ((f"id{i}", f"Town {i}", f"wiki/{i}", image) for i, image in enumerate(emblems))
    # Batches that do not come out even.
    assert len(ClipIndex.build(path, entries, **setting, batch_size=5)) == COUNT
    return path


@pytest.fixture(scope="module")
def index(path, setting):
    return ClipIndex.open(path, **setting)


def test_pictures_find_themselves_first(index, emblems):
    for i, image in enumerate(emblems):
        hits = index.search(image, 3)
        assert (hits[0].id, hits[0].title, hits[0].url) == (f"id{i}", f"Town {i}", f"wiki/{i}")
        assert hits[0].score == pytest.approx(1, abs=1e-3)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_scores_are_the_cosines_of_what_the_model_gives(index, setting, emblems):
    net, _, prepare = open_clip.create_model_and_transforms("tiny-a", pretrained=str(setting["weights"]))
    net.eval()
    with torch.no_grad():
        query, *rows = (net.encode_image(prepare(image)[None])[0] for image in [emblem(99), *emblems])
    cosines = [float(torch.nn.functional.cosine_similarity(query, row, dim=0)) for row in rows]
    best = max(range(COUNT), key=cosines.__getitem__)
    loose = index.search(emblem(99), COUNT)
    assert (loose[0].id, loose[0].score) == (f"id{best}", pytest.approx(cosines[best], abs=1e-3))
    assert len(loose) == sum(cosine >= 0.75 for cosine in cosines)


def test_what_is_not_like_enough_is_no_hit(path, setting, emblems):
    strict = ClipIndex.open(path, **setting, min_score=0.9999)
    assert [hit.id for hit in strict.search(emblems[4], COUNT)] == ["id4"]
    assert strict.search(emblem(99)) == []


def test_batches_change_nothing(setting, emblems):
    one, five = (ClipEncoder(**setting, batch_size=size).embed(emblems) for size in (1, 5))
    np.testing.assert_allclose(one, five, atol=1e-5)
    assert one.shape == (COUNT, 16) and one.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1, atol=1e-5)


def test_threads_get_what_one_gets(index, emblems):
    alone = [index.search(image) for image in emblems]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(index.search, emblems)) == alone


def test_pictures_of_every_kind_and_shape(index):
    for size in [(1, 1), (40_000, 1), (1, 40_000), (300, 2)]:
        index.search(Image.new("RGB", size, "red"))
    for mode in ["L", "P", "RGBA", "CMYK", "1"]:
        index.search(Image.new(mode, (20, 20)))


def test_a_strip_is_cut_before_it_is_enlarged(setting, monkeypatch):
    encoder = ClipEncoder(**setting)
    prepared = []
    prepare = encoder._prepare
    monkeypatch.setattr(encoder, "_prepare", lambda image: prepared.append(image.size) or prepare(image))
    encoder.embed([Image.new("RGB", (40_000, 2)), Image.new("RGB", (3, 40_000)), Image.new("RGB", (40, 20))])
    assert prepared == [(32, 2), (3, 48), (40, 20)]


async def test_it_serves_as_the_image_search_tool(index, emblems):
    tool = LocalTool(
        name="image_search",
        backend="image_search",
        schema=image_search_schema(2),
        function=partial(search_image, index),
        backend_limit=2,
    )
    executor = ToolExecutor([tool])
    result = await executor.execute(call("image_search", url="img_1"), book(emblems[7]), KEY)
    await executor.aclose()
    assert result.error is None and result.hits == 2
    assert result.text.startswith("1. Town 7 (wiki/7)\n2. ")


def test_empty_index(tmp_path, setting):
    empty = ClipIndex.build(tmp_path / "empty", [], **setting)
    assert (len(empty), empty.search(emblem(1))) == (0, [])
    assert len(ClipIndex.open(tmp_path / "empty", **setting)) == 0


def test_an_index_appears_whole_or_not_at_all(tmp_path, setting):
    def entries():
        yield "a", "A", "a", emblem(1)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        ClipIndex.build(tmp_path / "index", entries(), **setting, batch_size=1)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_leaves_nothing(tmp_path, setting, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="no space"):
        ClipIndex.build(tmp_path / "index", [("a", "A", "a", emblem(1))], **setting)
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_is_there_is_left_alone(path, setting):
    with pytest.raises(DataError, match="already exists"):
        ClipIndex.build(path, [], **setting)
    assert len(ClipIndex.open(path, **setting)) == COUNT


def test_other_models_and_other_weights_are_refused(path, models):
    with pytest.raises(DataError, match="built with tiny-a, not tiny-b"):
        ClipIndex.open(path, model="tiny-b", weights=models / "0.pt")
    with pytest.raises(DataError, match="other weights"):
        ClipIndex.open(path, model="tiny-a", weights=models / "1.pt")


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        ("tiny-a", "gone.pt", "no file .*gone.pt.*never downloaded.*set weights"),
        ("tiny-z", "0.pt", "knows no model 'tiny-z'"),
        ("hf-hub:some/model", "0.pt", "knows no model"),
        ("tiny-b", "0.pt", "0.pt cannot be loaded into tiny-b"),
        ("tiny-a", "tiny-a.json", "cannot be loaded"),
        ("tiny-a", "noise.safetensors", "cannot be loaded"),
        ("hub", "0.pt", "from the network"),
    ],
)
def test_models_that_cannot_be_used(models, monkeypatch, model, weights, message):
    def no_network(*_):
        pytest.fail("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    (models / "noise.safetensors").write_bytes(b"\x10" * 100)
    with pytest.raises(ConfigurationError, match=message):
        ClipEncoder(model, models / weights)


def test_a_name_of_published_weights_is_only_a_file(models, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="no file openai"):
        ClipEncoder("ViT-B-32", "openai")


def test_without_open_clip_there_is_a_remedy(setting, monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'opensearch-lightning\[clip\]'"):
        ClipEncoder(**setting)


def test_weights_that_give_no_numbers(models, tmp_path):
    tensors = torch.load(models / "0.pt", weights_only=True)
    torch.save({name: torch.full_like(value, torch.nan) for name, value in tensors.items()}, tmp_path / "nan.pt")
    with pytest.raises(ConfigurationError, match="no finite"):
        ClipEncoder("tiny-a", tmp_path / "nan.pt")


@pytest.mark.parametrize("options", [{"min_score": 1.5}, {"min_score": float("nan")}])
def test_values_that_cannot_be(path, setting, options, tmp_path):
    with pytest.raises(ConfigurationError, match="min_score"):
        ClipIndex.build(tmp_path / "new", iter(lambda: pytest.fail("a picture was taken"), None), **setting, **options)
    with pytest.raises(ConfigurationError, match="min_score"):
        ClipIndex.open(path, **setting, **options)
    with pytest.raises(ConfigurationError, match="batch_size"):
        ClipEncoder(**setting, batch_size=0)


def copy(path, target):
    target.mkdir()
    for file in path.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("file", ["index.json", "vectors.npy"])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"[1, 2]"])
def test_damaged_files(path, setting, tmp_path, file, damage):
    damaged = copy(path, tmp_path / "index")
    (damaged / file).write_bytes(damage((path / file).read_bytes()))
    with pytest.raises(DataError, match="No CLIP index at"):
        ClipIndex.open(damaged, **setting)


def test_vectors_that_do_not_fit(path, setting, tmp_path):
    damaged = copy(path, tmp_path / "index")
    vectors = np.load(path / "vectors.npy")
    for wrong in (vectors[:-1], vectors[:, :4], vectors.astype(np.float64), vectors * np.float32(np.nan)):
        np.save(damaged / "vectors.npy", wrong)
        with pytest.raises(DataError, match="damaged"):
            ClipIndex.open(damaged, **setting)
    about = json.loads((path / "index.json").read_text())
    (damaged / "index.json").write_text(json.dumps({**about, "format": 2}))
    with pytest.raises(DataError, match="format 2, not 1"):
        ClipIndex.open(damaged, **setting)


def test_nothing_is_there(tmp_path, setting):
    with pytest.raises(DataError, match=r"build one with ClipIndex\.build"):
        ClipIndex.open(tmp_path / "nowhere", **setting)
