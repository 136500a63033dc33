"""Shards on S3 (moto on loopback) and on a web server, against the same shards on this machine."""

import multiprocessing
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import server as moto_server

from opensearch_lightning.data import SearchVLSFTDataModule, ShardKind, ShardReader
from opensearch_lightning.data.lengths import measure
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.errors import ConfigurationError, DataError
from tests.data.rows import sft_shards
from tests.data.trainers import key
from tests.models.tiny import tiny_processor

KEYS = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}


class Handler(SimpleHTTPRequestHandler):
    """Serves files and writes down which; may break connections, or ask for a header."""

    asked: list[str]
    broken: dict[str, int]
    token: str | None

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.token is not None and self.headers.get("Authorization") != self.token:
            self.send_error(403)
        elif self.broken.get(self.path, 0) > 0:
            self.broken[self.path] -= 1
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"cut")
            self.close_connection = True
        else:
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = sft_shards(tmp_path_factory.mktemp("remote") / "town", 12, chunk_bytes=2000)
    measure(SampleSource(ShardReader(folder, kind=ShardKind.SFT), tiny_processor()), folder=folder)
    return folder


@pytest.fixture(scope="module")
def s3(shards: Path) -> Iterator[dict[str, Any]]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", **KEYS}
    client = boto3.client("s3", **options)
    client.create_bucket(Bucket="corpus")
    for path in shards.iterdir():
        client.upload_file(str(path), "corpus", f"sft/{shards.name}/{path.name}")
    yield options
    server.stop()


@pytest.fixture
def web(shards: Path) -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Served", (Handler,), {"asked": [], "broken": {}, "token": None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(shards.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/{shards.name}", handler
    server.shutdown()
    server.server_close()


def module(shards: Any, **options: Any) -> SearchVLSFTDataModule:
    settings = {"batch_size": 2, "packing": "tokens", "max_length": 400, "chunk_window": 2, **options}
    return SearchVLSFTDataModule(shards, tiny_processor(), **settings)


def first_keys(data: SearchVLSFTDataModule, number: int = 5) -> list[Any]:
    batches = iter(data.train_dataloader())
    return [key(next(batches)) for _ in range(number)]


def reader(address: Any, cache: Path, **options: Any) -> ShardReader:
    return ShardReader(address, kind=ShardKind.SFT, cache_dir=cache, storage_options=options)


def assert_same_rows(one: ShardReader, two: ShardReader) -> None:
    assert one.digest == two.digest
    assert one.sources == two.sources == (("town", 12),)
    assert one.chunks == two.chunks
    assert [one[i] for i in range(12)] == [two[i] for i in range(12)]


def test_s3_gives_what_the_folder_gives(shards: Path, s3: dict[str, Any], tmp_path: Path) -> None:
    address = "s3://corpus/sft/town/"
    assert_same_rows(reader(address, tmp_path, **s3), ShardReader(shards, kind=ShardKind.SFT))


def test_web_server_gives_what_the_folder_gives(shards: Path, web: tuple[str, type[Handler]], tmp_path: Path) -> None:
    address, handler = web
    assert_same_rows(reader(address, tmp_path), ShardReader(shards, kind=ShardKind.SFT))
    # each file once; another start asks for shards.json alone
    assert len(handler.asked) == len(set(handler.asked)) == 2 + len(list(shards.glob("*.bin")))
    handler.asked.clear()
    assert_same_rows(reader(address, tmp_path), ShardReader(shards, kind=ShardKind.SFT))
    assert handler.asked == ["/town/shards.json"]


@pytest.mark.parametrize("kind", ["s3", "web"])
def test_workers_train_from_afar_as_from_here(
    kind: str, shards: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = first_keys(module(shards))
    remote: dict[str, Any] = {"cache_dir": tmp_path, "num_workers": 3}
    if kind == "s3":
        address, remote["storage_options"] = "s3://corpus/sft/town", request.getfixturevalue("s3")
    else:
        address, _ = request.getfixturevalue("web")
    monkeypatch.setattr(SampleSource, "length", None)  # the lengths beside the shards serve
    data = module(address, **remote)
    data.setup()
    assert not list(tmp_path.glob("*/*.bin"))  # chunks are fetched when rows are read
    assert first_keys(data) == expected
    assert not list(tmp_path.glob("*/*.partial"))


def test_processes_fetch_a_chunk_once(shards: Path, web: tuple[str, type[Handler]], tmp_path: Path) -> None:
    address, handler = web
    joined = reader([address, str(shards)], tmp_path)
    context = multiprocessing.get_context("fork")
    readers = [context.Process(target=joined.__getitem__, args=(place,)) for place in (0, 0, 0, 13)]
    for process in readers:
        process.start()
    for process in readers:
        process.join()
    assert [process.exitcode for process in readers] == [0] * 4
    assert sum(path.endswith(".bin") for path in handler.asked) == 1


def test_changed_shards_are_not_mixed_with_kept_ones(tmp_path: Path) -> None:
    handler = type("Served", (Handler,), {"asked": [], "broken": {}, "token": None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/s"
    for rows in (4, 6):
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        sft_shards(tmp_path / "s", rows)
        far, near = reader(address, tmp_path / "cache"), ShardReader(tmp_path / "s", kind=ShardKind.SFT)
        assert [far[i] for i in range(rows)] == [near[i] for i in range(rows)]
    server.shutdown()
    server.server_close()


def test_broken_connections_are_tried_again(web: tuple[str, type[Handler]], shards: Path, tmp_path: Path) -> None:
    address, handler = web
    handler.broken = {"/town/shards.json": 2, "/town/index.json": 1}
    assert len(reader(address, tmp_path)) == 12
    handler.broken = {"/town/shards.json": 3}
    with pytest.raises(DataError, match=r"/town/shards.json cannot be read after 3 tries: .*Check the address"):
        reader(address, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".partial"]


def test_headers_reach_the_web_server(web: tuple[str, type[Handler]], tmp_path: Path) -> None:
    address, handler = web
    handler.token = "Bearer t"
    assert len(reader(address, tmp_path, headers={"Authorization": "Bearer t"})) == 12
    with pytest.raises(DataError, match=r"shards.json cannot be read: HTTP status 403 .*Give credentials"):
        reader(address, tmp_path)


@pytest.mark.parametrize("address", ["s3://nowhere/sft/town", "s3://corpus/sft/village"])
def test_wrong_buckets_and_prefixes_are_named(address: str, s3: dict[str, Any], tmp_path: Path) -> None:
    message = rf"{address}/shards.json cannot be read: .*(NoSuchBucket|NoSuchKey).*Check the bucket"
    with pytest.raises(DataError, match=message):
        reader(address, tmp_path, **s3)


def test_wrong_paths_are_named(web: tuple[str, type[Handler]], tmp_path: Path) -> None:
    address, handler = web
    with pytest.raises(DataError, match=r"/village/shards.json cannot be read: HTTP status 404 .*Check the bucket"):
        reader(address.replace("town", "village"), tmp_path)
    assert len(handler.asked) == 1


@pytest.mark.parametrize("address", ["s3://corpus/sft", "http://127.0.0.1:9/sft"])
def test_servers_that_are_gone_are_named(address: str, tmp_path: Path) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", **KEYS} if address.startswith("s3") else {}
    with pytest.raises(
        DataError, match=rf"^{address}/shards.json cannot be read after 3 tries: .*that its server runs"
    ):
        reader(address, tmp_path, **options)


def test_missing_keys_are_named(s3: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(DataError, match="Unable to locate credentials. Give credentials"):
        reader("s3://corpus/sft/town", tmp_path, endpoint_url=s3["endpoint_url"])
    with pytest.raises(DataError, match=r"shards.json cannot be read: .*unexpected keyword argument 'endpiont'"):
        reader("s3://corpus/sft/town", tmp_path, endpiont="x")


def test_folders_far_away_need_a_place_here(web: tuple[str, type[Handler]]) -> None:
    with pytest.raises(ConfigurationError, match=r"http://.*/town lies on another machine: set cache_dir"):
        ShardReader(web[0], kind=ShardKind.SFT)
