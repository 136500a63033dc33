"""Uploads to a bucket (moto's S3 on loopback, by real boto3 requests), a directory, and a server that takes ``PUT``."""

import asyncio
import hashlib
import logging
import os
import threading
import urllib.error
import urllib.request

import boto3
import pytest
from aiohttp import web
from moto import server as moto_server

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools.online import uploads
from opensearch_lightning.tools.online.uploads import DirectoryUploader, HttpUploader, S3Uploader
from opensearch_lightning.tools.secrets import MissingKeyError
from opensearch_lightning.types import ErrorKind
from tests.tools.online.lens_servers import TOKEN, FileServer, Server, in_background

PICTURE = b"not really a picture, but bytes all the same"
NAME = hashlib.sha256(PICTURE).hexdigest() + ".png"
PUBLIC = "https://files.example.org/pictures"
SECRET_KEY = "s3-secret-0123456789abcdef"
KEY_ID = "AKIA0123456789EXAMPL"
UPLOAD_MODES = [
    ("silent", ErrorKind.TIMEOUT),
    ("busy", ErrorKind.RATE_LIMITED),
    ("broken", ErrorKind.BACKEND_ERROR),
    ("half", ErrorKind.BACKEND_ERROR),
    ("moved", ErrorKind.BACKEND_ERROR),
]


@pytest.fixture(scope="module")
def s3():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("FILES_TOKEN", TOKEN)


@pytest.fixture
def bucket(s3, request):
    name = f"b{hashlib.sha256(request.node.name.encode()).hexdigest()[:20]}"
    client = boto3.session.Session(region_name="us-east-1").client("s3", endpoint_url=s3)
    client.create_bucket(Bucket=name)
    return Bucket(client, name)


class Bucket:
    """What the server keeps under one name."""

    def __init__(self, client, name):
        self.client = client
        self.name = name

    def names(self):
        return [entry["Key"] for entry in self.client.list_objects_v2(Bucket=self.name).get("Contents", [])]

    def empty(self):
        for key in self.names():
            self.client.delete_object(Bucket=self.name, Key=key)


@pytest.fixture
async def uploader():
    made = []

    def make(kind, *arguments, **options):
        made.append(kind(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


async def fetched(url):
    def fetch():
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.read(), response.headers["Content-Type"]

    return await asyncio.to_thread(fetch)


async def failure(one, data=PICTURE):
    with pytest.raises(ToolError) as caught:
        await one.upload(data, "image/png")
    return caught.value


class Anything(Server):
    """Answers whatever it is asked with one status, or misbehaves; notes method, path and headers."""

    def __init__(self, mode=None, status=200):
        super().__init__()
        self.mode = mode
        self.status = status
        self.asked = []

    async def answer(self, request):
        self.asked.append((request.method, request.path, dict(request.headers)))
        await request.read()
        return web.Response(status=self.status)


class TestS3:
    async def test_a_signed_address_shows_the_picture(self, s3, bucket, uploader):
        address = await uploader(S3Uploader, bucket.name, endpoint_url=s3, prefix="/pictures/a/").upload(
            PICTURE, "image/png"
        )
        assert await fetched(address) == (PICTURE, "image/png")
        assert bucket.names() == [f"pictures/a/{NAME}"]
        path, _, query = address.partition("?")
        assert path == f"{s3}/{bucket.name}/pictures/a/{NAME}"
        assert "X-Amz-Expires=3600" in query and "X-Amz-Signature=" in query

    async def test_a_server_with_a_name_is_addressed_by_path(self, s3, bucket, uploader):
        named = s3.replace("127.0.0.1", "localhost")
        address = await uploader(S3Uploader, bucket.name, endpoint_url=named).upload(PICTURE, "image/png")
        assert address.startswith(f"{named}/{bucket.name}/{NAME}?")
        assert bucket.names() == [NAME]

    async def test_a_public_bucket_needs_no_signature(self, s3, bucket, uploader):
        one = uploader(S3Uploader, bucket.name, endpoint_url=s3, prefix="a", public_base_url=f"{PUBLIC}/")
        assert await one.upload(PICTURE, "image/png") == f"{PUBLIC}/a/{NAME}"
        assert bucket.names() == [f"a/{NAME}"]

    async def test_equal_pictures_are_put_once_while_their_address_is_good(self, s3, bucket, uploader, monkeypatch):
        now = 1000.0
        monkeypatch.setattr(uploads, "monotonic", lambda: now)
        one = uploader(S3Uploader, bucket.name, endpoint_url=s3, expires_s=100)
        first = await one.upload(PICTURE, "image/png")
        bucket.empty()
        now += 49
        assert await one.upload(PICTURE, "image/png") == first
        assert bucket.names() == []
        now += 2
        await one.upload(PICTURE, "image/png")
        assert bucket.names() == [NAME]

    async def test_the_address_of_a_public_bucket_is_good_for_ever(self, s3, bucket, uploader, monkeypatch):
        now = 1000.0
        monkeypatch.setattr(uploads, "monotonic", lambda: now)
        one = uploader(S3Uploader, bucket.name, endpoint_url=s3, public_base_url=PUBLIC, expires_s=100)
        await one.upload(PICTURE, "image/png")
        bucket.empty()
        now += 1e6
        await one.upload(PICTURE, "image/png")
        assert bucket.names() == []

    async def test_many_at_once(self, s3, bucket, uploader):
        one = uploader(S3Uploader, bucket.name, endpoint_url=s3)
        pictures = [PICTURE + bytes([i]) for i in range(8)] * 2
        addresses = await asyncio.gather(*(one.upload(picture, "image/jpeg") for picture in pictures))
        assert addresses[:8] == addresses[8:]
        assert len(set(addresses)) == len(bucket.names()) == 8
        assert all(key.endswith(".jpg") for key in bucket.names())

    def test_one_event_loop_after_another(self, s3, bucket):
        one = S3Uploader(bucket.name, endpoint_url=s3)

        async def once(data):
            address = await one.upload(data, "image/png")
            await one.aclose()
            return address

        for data in (b"1", b"2"):
            assert asyncio.run(fetched(asyncio.run(once(data))))[0] == data

    async def test_a_bucket_that_is_not_there(self, s3, uploader):
        error = await failure(uploader(S3Uploader, "nowhere", endpoint_url=s3))
        assert error.kind is ErrorKind.BACKEND_ERROR and "no such bucket" in error.message

    async def test_no_credentials(self, s3, bucket, uploader, monkeypatch):
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        error = await failure(uploader(S3Uploader, bucket.name, endpoint_url=s3))
        assert error.kind is ErrorKind.BACKEND_ERROR and "no credentials" in error.message

    async def test_a_server_that_is_not_there(self, uploader):
        error = await failure(uploader(S3Uploader, "bucket", endpoint_url="http://127.0.0.1:1"))
        assert error.kind is ErrorKind.UNREACHABLE

    @pytest.mark.parametrize(("mode", "kind"), UPLOAD_MODES)
    async def test_servers_that_misbehave(self, uploader, mode, kind):
        async with Anything(mode) as server:
            one = uploader(S3Uploader, "bucket", endpoint_url=server.url, timeout_s=0.3 if mode == "silent" else 20)
            error = await failure(one)
        assert error.kind is kind
        assert error.retry_after_s == (7.0 if mode == "busy" else None)
        assert "long story" not in error.message
        assert {request[:2] for request in server.asked} == {("PUT", f"/bucket/{NAME}")}
        assert len(server.asked) == 1

    async def test_refused_credentials(self, uploader):
        async with Anything(status=403) as server:
            error = await failure(uploader(S3Uploader, "bucket", endpoint_url=server.url))
        assert error.kind is ErrorKind.BACKEND_ERROR and "refused the credentials" in error.message

    async def test_cancelling_returns_at_once(self, uploader):
        async with Anything("silent") as server:
            one = uploader(S3Uploader, "bucket", endpoint_url=server.url, timeout_s=5)
            task = asyncio.create_task(one.upload(PICTURE, "image/png"))
            await server.arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            server.mode = None
            assert await one.upload(PICTURE, "image/png")

    async def test_failures_are_tried_anew(self, uploader):
        async with Anything("broken") as server:
            one = uploader(S3Uploader, "bucket", endpoint_url=server.url)
            await failure(one)
            server.mode = None
            assert NAME in await one.upload(PICTURE, "image/png")

    async def test_keys_and_signatures_are_shown_to_nobody(self, s3, bucket, uploader, caplog):
        caplog.set_level(logging.DEBUG)
        one = uploader(S3Uploader, bucket.name, endpoint_url=s3)
        signature = (await one.upload(PICTURE, "image/png")).partition("X-Amz-Signature=")[2]
        assert len(signature) == 64
        shown = [repr(one), repr(vars(one)), caplog.text]
        for status in (403, 500):
            async with Anything(status=status) as server:
                error = await failure(uploader(S3Uploader, "bucket", endpoint_url=server.url))
                shown += [repr(error), error.message, caplog.text]
        for text in shown:
            assert SECRET_KEY not in text
            assert "Signature=" not in text and KEY_ID not in text
        # What an uploader remembers is for itself.
        assert signature not in "".join(shown)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"bucket": ""}, "bucket"),
            ({"bucket": "a/b"}, "keys begin with prefix"),
            ({"expires_s": 0}, "expires_s is 0"),
            ({"expires_s": 604_801}, "expires_s"),
            ({"timeout_s": 0}, "timeout_s"),
            ({"endpoint_url": "s3.example.org"}, "endpoint_url"),
            ({"endpoint_url": "http://[::/"}, "endpoint_url is no URL"),
            ({"public_base_url": "ftp://x"}, "public_base_url"),
            ({"public_base_url": "https://x.example/?key=word"}, "bare address"),
            ({"endpoint_url": "https://user:word@x.example"}, "holds a user name"),
        ],
    )
    def test_values_that_cannot_be(self, options, message):
        with pytest.raises(ConfigurationError, match=message) as caught:
            S3Uploader(**{"bucket": "b", **options})
        assert "word" not in str(caught.value)


def test_without_boto3_there_is_a_remedy(monkeypatch):
    monkeypatch.setattr(uploads.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'opensearch-lightning\[online\]'"):
        S3Uploader("bucket")


class TestDirectory:
    async def test_files_appear_whole_and_readable(self, tmp_path):
        one = DirectoryUploader(tmp_path / "www" / "pictures", f"{PUBLIC}/")
        assert await one.upload(PICTURE, "image/png") == f"{PUBLIC}/{NAME}"
        (file,) = (tmp_path / "www" / "pictures").iterdir()
        assert (file.name, file.read_bytes()) == (NAME, PICTURE)
        umask = os.umask(0)
        os.umask(umask)
        # A web server is another user.
        assert file.stat().st_mode & 0o777 == 0o666 & ~umask
        await one.aclose()

    async def test_equal_pictures_are_written_once(self, tmp_path):
        one = DirectoryUploader(tmp_path, PUBLIC)
        await one.upload(PICTURE, "image/png")
        before = (tmp_path / NAME).stat().st_mtime_ns, (tmp_path / NAME).stat().st_ino
        await asyncio.gather(*(one.upload(PICTURE, "image/png") for _ in range(8)))
        assert ((tmp_path / NAME).stat().st_mtime_ns, (tmp_path / NAME).stat().st_ino) == before
        (tmp_path / NAME).unlink()
        await one.upload(PICTURE, "image/png")
        assert [file.name for file in tmp_path.iterdir()] == [NAME]

    async def test_a_disk_that_is_full_leaves_nothing(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device", str(tmp_path / "secret-place"))

        monkeypatch.setattr(uploads.os, "replace", full)
        error = await failure(DirectoryUploader(tmp_path, PUBLIC))
        assert error.kind is ErrorKind.BACKEND_ERROR and "No space left" in error.message
        assert str(tmp_path) not in error.message
        assert list(tmp_path.iterdir()) == []

    async def test_writing_does_not_stall_the_loop(self, tmp_path, monkeypatch):
        written, go_on = threading.Event(), threading.Event()
        replace = os.replace

        def slow(*places):
            written.set()
            assert go_on.wait(10)
            replace(*places)

        monkeypatch.setattr(uploads.os, "replace", slow)
        task = asyncio.create_task(DirectoryUploader(tmp_path, PUBLIC).upload(PICTURE, "image/png"))
        assert await asyncio.to_thread(written.wait, 10)
        go_on.set()
        assert await task == f"{PUBLIC}/{NAME}"

    def test_values_that_cannot_be(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigurationError, match="no directory"):
            DirectoryUploader(tmp_path / "file", PUBLIC)
        with pytest.raises(ConfigurationError, match="public_base_url"):
            DirectoryUploader(tmp_path, "/pictures")


class TestHttp:
    async def test_the_server_shows_the_picture(self, uploader):
        async with FileServer() as server:
            one = uploader(HttpUploader, f"{server.url}/files/", token_env="FILES_TOKEN")
            address = await one.upload(PICTURE, "image/png")
            assert address == f"{server.url}/files/{NAME}"
            assert await fetched(address) == (PICTURE, "image/png")
            assert server.refused == []

    async def test_the_address_to_read_at_may_be_another(self, uploader):
        async with FileServer(token=None) as server:
            one = uploader(HttpUploader, f"{server.url}/files", public_base_url=PUBLIC)
            assert await one.upload(PICTURE, "image/jpeg") == f"{PUBLIC}/{NAME.replace('png', 'jpg')}"
            assert server.refused == []

    async def test_equal_pictures_are_sent_once(self, uploader):
        async with FileServer() as server:
            one = uploader(HttpUploader, f"{server.url}/files", token_env="FILES_TOKEN")
            await asyncio.gather(*(one.upload(PICTURE, "image/png") for _ in range(5)))
            await one.upload(PICTURE, "image/png")
            assert server.puts == [NAME]

    def test_one_event_loop_after_another(self):
        with in_background(FileServer()) as server:
            one = HttpUploader(f"{server.url}/files", token_env="FILES_TOKEN")

            async def once(data):
                await one.upload(data, "image/png")
                await one.aclose()

            for data in (b"1", b"2"):
                asyncio.run(once(data))
            assert len(server.puts) == 2

    @pytest.mark.parametrize(("mode", "kind"), UPLOAD_MODES)
    async def test_servers_that_misbehave(self, uploader, mode, kind):
        async with FileServer() as server:
            server.mode = mode
            timeout_s = 0.3 if mode == "silent" else 20
            one = uploader(HttpUploader, f"{server.url}/files", token_env="FILES_TOKEN", timeout_s=timeout_s)
            error = await failure(one)
            assert error.kind is kind
            assert error.retry_after_s == (7.0 if mode == "busy" else None)
            assert server.url not in error.message and TOKEN not in error.message
            server.mode = None
            assert await one.upload(PICTURE, "image/png")

    async def test_cancelling_one_of_two_leaves_the_other(self, uploader):
        async with FileServer() as server:
            server.mode, server.hold_s = "silent", 0.5
            one = uploader(HttpUploader, f"{server.url}/files", token_env="FILES_TOKEN")
            first, second = (asyncio.create_task(one.upload(PICTURE, "image/png")) for _ in range(2))
            await server.arrived.wait()
            first.cancel()
            # The server answers with an error in the end, which only the second sees.
            with pytest.raises(ToolError):
                await second
            assert first.cancelled() and server.puts == [NAME]

    async def test_a_wrong_token_is_named_by_its_variable(self, uploader, monkeypatch):
        monkeypatch.setenv("OTHER_TOKEN", "another-token")
        async with FileServer() as server:
            error = await failure(uploader(HttpUploader, f"{server.url}/files", token_env="OTHER_TOKEN"))
        assert error.kind is ErrorKind.BACKEND_ERROR
        assert "OTHER_TOKEN" in error.message and "another-token" not in error.message

    async def test_the_token_is_shown_to_nobody(self, uploader, caplog):
        caplog.set_level(logging.DEBUG)
        async with FileServer() as server:
            one = uploader(HttpUploader, f"{server.url}/files", token_env="FILES_TOKEN")
            await one.upload(PICTURE, "image/png")
            server.mode = "broken"
            error = await failure(one, b"other")
        for text in (repr(one), repr(vars(one)), repr(vars(one._service)), repr(error), caplog.text):
            assert TOKEN not in text

    def test_values_that_cannot_be(self):
        with pytest.raises(MissingKeyError, match="NO_SUCH_TOKEN"):
            HttpUploader(PUBLIC, token_env="NO_SUCH_TOKEN")
        with pytest.raises(ConfigurationError, match="base_url"):
            HttpUploader("files.example.org")
        with pytest.raises(ConfigurationError, match="timeout_s"):
            HttpUploader(PUBLIC, timeout_s=0)


async def test_other_files_are_no_pictures(tmp_path):
    with pytest.raises(ValueError, match="image/gif"):
        await DirectoryUploader(tmp_path, PUBLIC).upload(PICTURE, "image/gif")


@pytest.mark.parametrize("one", [S3Uploader("bucket"), HttpUploader(PUBLIC)], ids=["s3", "http"])
def test_what_runs_on_a_loop_that_is_gone_is_forgotten(one):
    async def hang():
        await asyncio.Event().wait()

    async def quick():
        return PUBLIC

    addresses = one._addresses
    loop = asyncio.new_event_loop()
    stuck = loop.create_task(addresses.of("key", hang))
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(one.aclose())
    assert asyncio.run(addresses.of("key", quick)) == PUBLIC
    stuck.cancel()
    loop.run_until_complete(asyncio.wait({stuck}))
    loop.close()
