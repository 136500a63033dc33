"""Files of a folder on S3 or a web server, copied to this machine when first asked for.

LitData's own downloaders try a server that is gone a thousand times, in a thread that readers wait for; a training job
should learn within seconds that its data cannot be read, and from which address.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any
from urllib.parse import urlsplit

from opensearch_lightning.errors import ConfigurationError, DataError

_TRIES = 3
_PAUSE_S = 0.5
_TIMEOUTS_S = (5, 60)
"""To connect, and to receive the next bytes."""
_PIECE = 1 << 20


def is_remote(address: object) -> bool:
    """Whether a folder lies on S3 (``s3://bucket/prefix``) or a web server (``http(s)://host/path``)."""
    return isinstance(address, str) and urlsplit(address).scheme in _STORES


class RemoteFolder:
    """A folder far away whose files are kept in a folder of this machine.

    Several processes may share the kept folder: each file is fetched by one of them and appears whole.

    Args:
        address: ``s3://bucket/prefix`` or ``http(s)://host/path``.
        cache_dir: where files are kept. It needs room for all that is read.
        storage_options: of S3, what boto3's client takes (``endpoint_url``, ``region_name``, keys, …); of a web
            server, ``headers``.

    Raises:
        ConfigurationError: no ``cache_dir``.
    """

    def __init__(
        self, address: str, cache_dir: Path | str | None, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        if cache_dir is None:
            raise ConfigurationError(
                f"{address} lies on another machine: set cache_dir, a folder to keep its files in."
            )
        self.address = address.rstrip("/")
        self._options = dict(storage_options or {})
        self._cache_dir = Path(cache_dir)
        self._store = _STORES[urlsplit(address).scheme]

    def read(self, name: str) -> bytes:
        """The content of a small file, as it is now.

        Raises:
            DataError: it cannot be read.
        """
        with NamedTemporaryFile() as file:
            self._download(name, file)
            file.seek(0)
            return file.read()

    def folder(self, version: str) -> Path:
        """Where the files of one version of the folder's content are kept."""
        key = hashlib.sha256(f"{self.address} {version}".encode()).hexdigest()
        return self._cache_dir / key[:32]

    def fetch(self, name: str, version: str) -> Path:
        """Where a file is kept, fetched if it is not.

        Raises:
            DataError: it cannot be read.
        """
        path = self.folder(version) / name
        if not path.exists():
            from filelock import FileLock

            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_name(f".{name}.lock")):
                if not path.exists():
                    with NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
                        partial = Path(file.name)
                        try:
                            self._download(name, file)
                        except BaseException:
                            partial.unlink()
                            raise
                    partial.replace(path)
        return path

    def find(self, name: str, version: str) -> Path | None:
        """As :meth:`fetch`; ``None`` if there is no such file."""
        try:
            return self.fetch(name, version)
        except _Absent:
            return None

    def _download(self, name: str, file: IO[bytes]) -> None:
        address = f"{self.address}/{name}"
        for left in reversed(range(_TRIES)):
            file.seek(0)
            file.truncate()
            try:
                with self._store(address, self._options) as pieces:
                    file.writelines(pieces)
                file.flush()
                return
            except _Refused as error:
                # A store that must not be listed says that an absent file is forbidden.
                kind = _Absent if error.status in (403, 404, 410) else DataError
                raise kind(f"{address} cannot be read: {error}. {_remedy(error.status)}") from error
            except _Broken as error:
                if not left:
                    raise DataError(
                        f"{address} cannot be read after {_TRIES} tries: {error}. Check the address, that its server "
                        "runs, and storage_options (endpoint_url of an S3-compatible store)."
                    ) from error
                time.sleep(_PAUSE_S)


class _Absent(DataError):
    """There is no such file, or it may not be read."""


class _Refused(Exception):
    """The store answered, and will answer the same again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Broken(Exception):
    """The store did not answer, or not to the end."""


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "Give credentials that may read it (for S3 in storage_options, the environment or ~/.aws)."
    return "Check the bucket or host and the path; a folder of shards holds shards.json."


@contextmanager
def _s3(address: str, options: Mapping[str, Any]) -> Iterator[Iterator[bytes]]:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError

    parts = urlsplit(address)
    connect, read = _TIMEOUTS_S
    config = Config(connect_timeout=connect, read_timeout=read, retries={"total_max_attempts": 1})
    try:
        client = boto3.client("s3", **{"config": config, **options})
        body = client.get_object(Bucket=parts.netloc, Key=parts.path.lstrip("/"))["Body"]
        with body:
            yield body.iter_chunks(_PIECE)
    except ClientError as error:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        raise (_Broken(str(error)) if _transient(status) else _Refused(status, str(error))) from error
    except NoCredentialsError as error:
        raise _Refused(401, str(error)) from error
    except (ParamValidationError, TypeError, ValueError) as error:
        raise _Refused(400, str(error)) from error
    except BotoCoreError as error:
        raise _Broken(str(error)) from error


@contextmanager
def _http(address: str, options: Mapping[str, Any]) -> Iterator[Iterator[bytes]]:
    import requests

    try:
        with requests.get(address, headers=options.get("headers"), stream=True, timeout=_TIMEOUTS_S) as response:
            if response.status_code != 200:
                message = f"HTTP status {response.status_code} {response.reason}"
                status = response.status_code
                raise _Broken(message) if _transient(status) else _Refused(status, message)
            yield response.iter_content(_PIECE)
    except requests.RequestException as error:
        raise _Broken(str(error)) from error


def _transient(status: int) -> bool:
    return status in (0, 408, 429) or status >= 500


_STORES: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {"s3": _s3, "http": _http, "https": _http}
