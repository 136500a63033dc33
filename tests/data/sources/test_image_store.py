import base64
import io
import multiprocessing
import pickle
import zipfile
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from opensearch_lightning.data import DropReason, ImageStore, UnusableRow
from opensearch_lightning.data.sources.image_places import ImageArchive
from opensearch_lightning.data.sources.image_urls import fetch_image
from opensearch_lightning.errors import DataError
from tests.data.rows import picture

ENCODED = picture(7)
BASE64 = base64.b64encode(ENCODED).decode()


def archive(path: Path, *names: str, **contents: bytes) -> Path:
    """A zip file; each name holds the picture whose shade is its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        for shade, name in enumerate(names, start=1):
            file.writestr(name, picture(shade))
        for name, content in contents.items():
            file.writestr(name, content)
    return path


def refusal(store: ImageStore, value: Any) -> tuple[DropReason, str]:
    with pytest.raises(UnusableRow) as raised:
        store.load(value)
    return raised.value.reason, str(raised.value)


@pytest.mark.parametrize(
    "value",
    [
        ENCODED,
        bytearray(ENCODED),
        memoryview(ENCODED),
        {"bytes": ENCODED, "path": None},
        {"bytes": ENCODED, "path": "not/there.png"},
        {"bytes": BASE64},
        {"bytes": list(ENCODED)},
        BASE64,
        BASE64[:40] + "\n" + BASE64[40:],
        BASE64.rstrip("="),
        base64.urlsafe_b64encode(ENCODED).decode(),
        f"data:image/png;base64,{BASE64}",
        f"DATA:image/png;charset=utf-8;base64,{BASE64}",
        {"url": f"data:image/png;base64,{BASE64}"},
        list(ENCODED),
        np.frombuffer(ENCODED, dtype=np.uint8),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_form_that_holds_the_file_gives_its_bytes(value: Any) -> None:
    assert ImageStore().load(value) == ENCODED


@pytest.mark.parametrize("as_pixels", [np.asarray, lambda image: image])
def test_pixels_are_stored_as_png(as_pixels: Any) -> None:
    with Image.open(io.BytesIO(ENCODED)) as image:
        stored = ImageStore().load(as_pixels(image))
    with Image.open(io.BytesIO(stored)) as again:
        assert (again.format, again.size, again.getpixel((0, 0))) == ("PNG", (32, 32), (7, 0, 0))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, DropReason.MISSING_IMAGE),
        ({}, DropReason.MISSING_IMAGE),
        ({"bytes": None, "path": None}, DropReason.MISSING_IMAGE),
        ({"bytes": {"bytes": ENCODED}}, DropReason.MISSING_IMAGE),
        (3, DropReason.MISSING_IMAGE),
        ([], DropReason.MISSING_IMAGE),
        (["a.png"], DropReason.MISSING_IMAGE),
        ([True] * 3, DropReason.MISSING_IMAGE),
        ("a.png", DropReason.MISSING_IMAGE),
        ([300, -1], DropReason.BROKEN_IMAGE),
        (b"", DropReason.BROKEN_IMAGE),
        (ENCODED[:60], DropReason.BROKEN_IMAGE),
        (BASE64[:80], DropReason.BROKEN_IMAGE),
        ("data:image/png;base64,@", DropReason.BROKEN_IMAGE),
        ("data:image/png,x", DropReason.BROKEN_IMAGE),
        (np.zeros((2, 2), dtype=np.float64), DropReason.BROKEN_IMAGE),
        (np.zeros((2, 2, 7), dtype=np.uint8), DropReason.BROKEN_IMAGE),
        ("https://example.org/a.png", DropReason.REMOTE_IMAGE),
        ({"url": "http://example.org/a.png"}, DropReason.REMOTE_IMAGE),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(value: Any, reason: DropReason) -> None:
    assert refusal(ImageStore(), value)[0] is reason


@pytest.mark.parametrize(
    ("names", "path", "shade"),
    [
        (["images/1.png"], "images/1.png", 1),
        (["images/1.png"], "./images//1.png", 1),
        (["images/1.png"], r"images\1.png", 1),
        (["images/images/1.png"], "images/1.png", 1),
        (["images/images/1.png"], "fvqa/images/1.png", 1),
        (["images/1.png"], "fvqa/images/1.png", 1),
        (["1.png"], "images/1.png", 1),
        (["fvqa/images/1.png"], "images/1.png", 1),
        (["fvqa/images/1.png"], "/mnt/someone/data/fvqa/images/1.png", 1),
        (["fvqa/images/1.png"], "file:///mnt/someone/fvqa/images/1.png", 1),
        (["images/1.png", "images/images/1.png"], "images/1.png", 1),
        (["images/images/1.png", "images/1.png"], "images/1.png", 2),
        (["1.png", "images/1.png"], "fvqa/images/1.png", 2),
        (["images/1.png", "1.png"], "fvqa/images/1.png", 1),
        (["other/1.png", "a/images/1.png"], "images/1.png", 2),
        (["__MACOSX/images/._1.png", "images/1.png"], "1.png", 2),
        (["图/一.png"], "wiki_zh/图/一.png", 1),
    ],
)
def test_paths_in_a_zip_are_found_despite_prefixes_and_nesting(
    tmp_path: Path, names: list[str], path: str, shade: int
) -> None:
    assert ImageStore([archive(tmp_path / "images.zip", *names)]).load(path) == picture(shade)
    for number, name in enumerate(names, start=1):
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(picture(number))
    if "\\" not in path and not any("MACOSX" in name for name in names):
        assert ImageStore([tmp_path / "folder"]).load(path) == picture(shade)


@pytest.mark.parametrize(
    ("names", "path"),
    [
        (["train/1.png"], "test/1.png"),
        (["images/11.png"], "1.png"),
        (["images/1.png"], "images/1.PNG.png"),
        (["images/1.png"], "../images/1.png"),
        (["images/1.png"], "images/../../1.png"),
        (["images/1.png"], ""),
        (["images/1.png"], "images/"),
    ],
)
def test_no_other_image_is_taken_for_the_one_named(tmp_path: Path, names: list[str], path: str) -> None:
    store = ImageStore([archive(tmp_path / "images.zip", *names)])
    assert refusal(store, path)[0] is DropReason.MISSING_IMAGE


def test_several_candidates_are_named_and_copies_are_one(tmp_path: Path) -> None:
    store = ImageStore([archive(tmp_path / "images.zip", "a/1.png", "b/1.png")])
    reason, message = refusal(store, "1.png")
    assert reason is DropReason.AMBIGUOUS_IMAGE
    assert "'a/1.png'" in message and "'b/1.png'" in message
    copies = archive(tmp_path / "copies.zip", **{"a/1.png": ENCODED, "b/1.png": ENCODED})
    assert ImageStore([copies]).load("1.png") == ENCODED


def test_two_places_with_one_path_and_other_bytes_are_ambiguous(tmp_path: Path) -> None:
    places = [archive(tmp_path / f"{n}.zip", **{"images/1.png": picture(n)}) for n in (1, 2)]
    assert refusal(ImageStore(places), "images/1.png")[0] is DropReason.AMBIGUOUS_IMAGE


def test_names_in_utf8_without_its_mark_are_found(tmp_path: Path) -> None:
    path = archive(tmp_path / "images.zip", **{"abcdef.png": ENCODED})
    path.write_bytes(path.read_bytes().replace(b"abcdef", "图一".encode()))
    assert ImageStore([path]).load("images/图一.png") == ENCODED


def test_entries_and_links_that_lead_out_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(ENCODED)
    root = tmp_path / "root"
    root.mkdir()
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path, target_is_directory=True)
    evil = archive(tmp_path / "evil.zip", **{"../secret.png": ENCODED, "/abs/hidden.png": ENCODED})
    store = ImageStore([root, evil])
    for path in (
        "link.png",
        "up/secret.png",
        "secret.png",
        "../secret.png",
        str(tmp_path / "secret.png"),
        "hidden.png",
    ):
        assert refusal(store, path)[0] is DropReason.MISSING_IMAGE


def test_broken_entries_drop_their_row_and_broken_archives_end_the_job(tmp_path: Path) -> None:
    path = archive(tmp_path / "images.zip", **{"a.png": ENCODED, "b.png": b"no picture"})
    whole = path.read_bytes()
    path.write_bytes(whole.replace(ENCODED[50:60], b"0123456789", 1))
    assert refusal(ImageStore([path]), "a.png")[0] is DropReason.BROKEN_IMAGE
    assert refusal(ImageStore([path]), "b.png")[0] is DropReason.BROKEN_IMAGE
    path.write_bytes(whole[:-30])
    with pytest.raises(DataError, match="images.zip is no zip file or is cut short; fetch it anew"):
        ImageStore([path])
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match="pointer of Git LFS"):
        ImageStore([path])
    with pytest.raises(DataError, match="no images at .*nowhere"):
        ImageStore([tmp_path / "nowhere"])


def test_an_entry_that_unpacks_to_too_much_is_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opensearch_lightning.data.sources.image_places.MAX_BYTES", len(ENCODED) - 1)
    store = ImageStore([archive(tmp_path / "images.zip", **{"a.png": ENCODED})])
    reason, message = refusal(store, "a.png")
    assert reason is DropReason.BROKEN_IMAGE and "more than" in message


def handle(store: ImageStore) -> int:
    (place,) = store._places
    assert isinstance(place, ImageArchive)
    return place._open()[0].fp.fileno()


def read_in_child(store: ImageStore, results: Any) -> None:
    results.put((handle(store), [store.load(f"{i}.png") == picture(i) for i in range(20)]))


def test_a_store_works_behind_forks_and_pickling(tmp_path: Path) -> None:
    store = ImageStore([archive(tmp_path / "images.zip", **{f"images/images/{i}.png": picture(i) for i in range(20)})])
    assert store.load("1.png") == picture(1)
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    child = fork.Process(target=read_in_child, args=(store, results))
    child.start()
    child_handle, are_right = results.get()
    child.join()
    assert are_right == [True] * 20
    # The parent's is open in the child as well: another number is another file with its own position.
    assert child_handle != handle(store)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.load("2.png") == picture(2)


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/a.png" else 404)
        self.end_headers()
        self.wfile.write(ENCODED)

    def log_message(self, *_: Any) -> None:
        pass


def test_urls_are_fetched_where_allowed_and_never_from_inside() -> None:
    pytest.importorskip("aiohttp", reason="the extra online is not installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        store = ImageStore(fetch=partial(fetch_image, allowed=lambda address: True))
        assert store.load(f"{url}/a.png") == ENCODED
        assert "status 404" in refusal(store, f"{url}/b.png")[1]
        reason, message = refusal(ImageStore(fetch=fetch_image), f"{url}/a.png")
        assert reason is DropReason.MISSING_IMAGE and "not public" in message
    finally:
        server.shutdown()
        server.server_close()
