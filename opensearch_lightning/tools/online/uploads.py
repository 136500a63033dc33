"""Where pictures that exist only here get an address that a service of the internet can fetch.

Files are named by the SHA-256 of their bytes: equal pictures are one file, and no name is ever used for another one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Protocol
from urllib.parse import quote
from uuid import uuid4

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools.backends import BackendPolicy
from opensearch_lightning.tools.base_url import base_url as checked_url
from opensearch_lightning.tools.download import retry_after_s
from opensearch_lightning.tools.online.service import Service
from opensearch_lightning.tools.secrets import Secret, keep_out_of_logs
from opensearch_lightning.tools.single_flight import SingleFlight
from opensearch_lightning.tools.threads import in_thread
from opensearch_lightning.types import ErrorKind

_ENDINGS = {"image/png": ".png", "image/jpeg": ".jpg"}
_MAX_EXPIRY_S = 7 * 24 * 3600
_MOST_KEPT = 10_000
_UPLOAD_FAILED = "The image could not be given a public address"


class Uploader(Protocol):
    """Gives files addresses."""

    async def upload(self, data: bytes, content_type: str) -> str:
        """The address that ``data`` can be fetched from, for some time at least.

        Args:
            data: a picture file.
            content_type: ``image/png`` or ``image/jpeg``.

        Raises:
            ToolError: an error of the infrastructure. Its message holds no address: one may be as good as a key.
        """
        ...

    async def aclose(self) -> None:
        """Close connections; a later upload opens new ones, also on another event loop."""
        ...


class S3Uploader:
    """Puts files into a bucket of S3, or of a server that speaks its protocol.

    Credentials come from where boto3 looks for them by itself (environment, profile, role of the machine). An address
    is used again for the first half of its life, so that whoever gets it has time to fetch the file; then the file is
    put anew. Addresses signed with a temporary role end with it.

    Args:
        bucket: its name.
        endpoint_url: of a server other than AWS; buckets are then addressed by path.
        prefix: of the keys.
        public_base_url: where the bucket can be read without a key; ``None`` makes signed addresses.
        expires_s: seconds for which a signed address is good.
        region: of the bucket; ``None`` for what boto3 finds.
        timeout_s: seconds for a connection, and for silence on one.

    Raises:
        ConfigurationError: a value that cannot be, or boto3 is not installed.
    """

    def __init__(
        self,
        bucket: str,
        *,
        endpoint_url: str | None = None,
        prefix: str = "",
        public_base_url: str | None = None,
        expires_s: int = 3600,
        region: str | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        if not bucket or "/" in bucket:
            raise ConfigurationError(f"The bucket is {bucket!r}: set its name alone, keys begin with prefix.")
        if not 1 <= expires_s <= _MAX_EXPIRY_S:
            raise ConfigurationError(f"expires_s is {expires_s}: set 1 to {_MAX_EXPIRY_S} seconds.")
        if not timeout_s > 0:
            raise ConfigurationError(f"timeout_s is {timeout_s}: set seconds above 0.")
        if importlib.util.find_spec("boto3") is None:
            raise ConfigurationError("S3Uploader needs boto3: pip install 'opensearch-lightning[online]'.")
        self._bucket = bucket
        self._endpoint_url = None if endpoint_url is None else checked_url("endpoint_url", endpoint_url)
        self._public = None if public_base_url is None else checked_url("public_base_url", public_base_url)
        self._prefix = "".join(f"{part}/" for part in prefix.split("/") if part)
        self._expires_s = expires_s
        self._region = region
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._client: Any = None
        self._addresses = _Addresses(None if self._public is not None else expires_s / 2)

    async def upload(self, data: bytes, content_type: str) -> str:
        """See :meth:`Uploader.upload`."""
        key = self._prefix + _file_name(data, content_type)
        return await self._addresses.of(key, lambda: in_thread(partial(self._put, key, data, content_type)))

    async def aclose(self) -> None:
        """See :meth:`Uploader.aclose`."""
        self._addresses.reset()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _put(self, key: str, data: bytes, content_type: str) -> str:
        from botocore.exceptions import BotoCoreError, ClientError

        # from None, and nothing of their text: it may hold an address, a bucket policy, or a key's id
        try:
            client = self._connected()
            client.put_object(Bucket=self._bucket, Key=key, Body=data, ContentType=content_type)
            if self._public is not None:
                return f"{self._public}/{quote(key)}"
            place = {"Bucket": self._bucket, "Key": key}
            return str(client.generate_presigned_url("get_object", Params=place, ExpiresIn=self._expires_s))
        except ClientError as error:
            raise _refusal(error.response) from None
        except _Redirected:
            message = f"{_UPLOAD_FAILED} (the bucket redirects; its region and endpoint_url must be its own)."
            raise ToolError(ErrorKind.BACKEND_ERROR, message) from None
        except (BotoCoreError, ValueError) as error:
            raise _failure(error) from None

    def _connected(self) -> Any:
        import boto3
        from botocore.config import Config

        with self._lock:
            if self._client is None:
                # These write out signed requests, as good as a key to whoever reads the log.
                keep_out_of_logs("botocore.auth", "botocore.endpoint")
                config = Config(
                    signature_version="s3v4",
                    connect_timeout=self._timeout_s,
                    read_timeout=self._timeout_s,
                    # Tried again by the executor, within the time of the call.
                    retries={"total_max_attempts": 1},
                    max_pool_connections=64,
                    # Many servers other than AWS know no checksum trailers.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                )
                # A session of its own: boto3's default one is not to be shared by threads.
                session = boto3.session.Session(region_name=self._region)
                self._client = session.client("s3", endpoint_url=self._endpoint_url, config=config)
                # boto3 looks for the region of a bucket that redirects without naming one, for ever where that too is
                # redirected.
                self._client.meta.events.register("before-call.s3.HeadBucket", _refuse_redirect)
            return self._client


class DirectoryUploader:
    """Writes files into a directory that a web server publishes.

    Args:
        directory: made when first needed. Files appear in it complete, and are never removed.
        public_base_url: where the server shows the directory.

    Raises:
        ConfigurationError: ``directory`` is a file, or the address cannot be one.
    """

    def __init__(self, directory: str | Path, public_base_url: str) -> None:
        self._directory = Path(directory)
        if self._directory.exists() and not self._directory.is_dir():
            raise ConfigurationError(f"{directory} is no directory: set the one that the web server publishes.")
        self._public = checked_url("public_base_url", public_base_url)

    async def upload(self, data: bytes, content_type: str) -> str:
        """See :meth:`Uploader.upload`."""
        name = _file_name(data, content_type)
        await in_thread(partial(self._write, name, data))
        return f"{self._public}/{name}"

    async def aclose(self) -> None:
        """Nothing is held open."""

    def _write(self, name: str, data: bytes) -> None:
        target = self._directory / name
        unfinished = self._directory / f".{name}.{uuid4().hex}"
        try:
            if target.exists():
                return
            self._directory.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_bytes(data)
                os.replace(unfinished, target)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            message = f"{_UPLOAD_FAILED} (the directory cannot be written: {error.strerror})."
            raise ToolError(ErrorKind.BACKEND_ERROR, message) from None


class HttpUploader:
    """Sends files by HTTP ``PUT`` to a static or WebDAV server.

    Args:
        base_url: files are put at ``{base_url}/{name}``.
        public_base_url: where they can be read; ``None`` for the same.
        token_env: environment variable with a token, sent as ``Authorization: Bearer``; ``None`` sends none.
        policy: limits, retries and breaker of the server.
        timeout_s: seconds of an upload where the policy sets none.

    Raises:
        ConfigurationError: an address or a limit that cannot be, or the token is missing.
    """

    def __init__(
        self,
        base_url: str,
        *,
        public_base_url: str | None = None,
        token_env: str | None = None,
        policy: BackendPolicy | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        base_url = checked_url("base_url", base_url)
        self._public = base_url if public_base_url is None else checked_url("public_base_url", public_base_url)
        self._token = None if token_env is None else Secret.from_environment(token_env)
        self._service = Service(
            "The upload server", base_url, key=self._token, policy=policy, timeout_s=timeout_s, max_bytes=1_000_000
        )
        self._addresses = _Addresses(None)

    async def upload(self, data: bytes, content_type: str) -> str:
        """See :meth:`Uploader.upload`."""
        name = _file_name(data, content_type)
        return await self._addresses.of(name, lambda: self._put(name, data, content_type))

    async def aclose(self) -> None:
        """See :meth:`Uploader.aclose`."""
        self._addresses.reset()
        await self._service.aclose()

    async def _put(self, name: str, data: bytes, content_type: str) -> str:
        headers = {"Content-Type": content_type}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.reveal()}"
        await self._service.fetch("PUT", f"/{name}", headers=headers, data=data)
        return f"{self._public}/{name}"


class _Addresses:
    """Addresses given out, each made once; ``good_for_s`` is how long one is given out again, ``None`` for ever."""

    def __init__(self, good_for_s: float | None) -> None:
        self._good_for_s = good_for_s
        self._kept: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._flights: SingleFlight[str] = SingleFlight()

    async def of(self, key: str, make: Callable[[], Awaitable[str]]) -> str:
        kept = self._kept.get(key)
        if kept is not None and (self._good_for_s is None or monotonic() - kept[1] < self._good_for_s):
            self._kept.move_to_end(key)
            return kept[0]

        async def made() -> str:
            # Before the work: a signature's time runs from when it is made, not from when it arrives.
            started = monotonic()
            address = await make()
            self._kept[key] = (address, started)
            self._kept.move_to_end(key)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return address

        return (await self._flights.join(key, made))[0]

    def reset(self) -> None:
        """Forget what runs: it belongs to an event loop that may be gone."""
        self._flights = SingleFlight()


def _file_name(data: bytes, content_type: str) -> str:
    if content_type not in _ENDINGS:
        raise ValueError(f"The type of a picture to upload is {content_type!r}: give one of {sorted(_ENDINGS)}.")
    return hashlib.sha256(data).hexdigest() + _ENDINGS[content_type]


class _Redirected(Exception):
    """A server that sends requests for a bucket elsewhere."""


def _refuse_redirect(**_: Any) -> None:
    raise _Redirected


def _refusal(response: Any) -> ToolError:
    """What an answer of the server that is an error comes to."""
    about = response.get("ResponseMetadata", {})
    status = about.get("HTTPStatusCode")
    code = str(response.get("Error", {}).get("Code", ""))
    headers = about.get("HTTPHeaders", {})
    if status == 429 or code in ("SlowDown", "TooManyRequests") or (status == 503 and "retry-after" in headers):
        wait = retry_after_s(headers.get("retry-after"))
        return ToolError(ErrorKind.RATE_LIMITED, f"{_UPLOAD_FAILED} (too many requests).", retry_after_s=wait)
    if status in (401, 403):
        return ToolError(ErrorKind.BACKEND_ERROR, f"{_UPLOAD_FAILED} (the bucket refused the credentials).")
    if code == "NoSuchBucket":
        return ToolError(ErrorKind.BACKEND_ERROR, f"{_UPLOAD_FAILED} (there is no such bucket).")
    return ToolError(ErrorKind.BACKEND_ERROR, f"{_UPLOAD_FAILED} (status {status}).")


def _failure(error: Exception) -> ToolError:
    """What an error of the connection, or before it, comes to."""
    from botocore import exceptions

    if isinstance(error, exceptions.ConnectTimeoutError | exceptions.ReadTimeoutError):
        return ToolError(ErrorKind.TIMEOUT, f"{_UPLOAD_FAILED} (no answer in time).")
    if isinstance(error, exceptions.EndpointConnectionError | exceptions.ProxyConnectionError):
        return ToolError(ErrorKind.UNREACHABLE, f"{_UPLOAD_FAILED} (the server cannot be reached).")
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return ToolError(ErrorKind.BACKEND_ERROR, f"{_UPLOAD_FAILED} (boto3 finds no credentials).")
    return ToolError(ErrorKind.BACKEND_ERROR, f"{_UPLOAD_FAILED} ({type(error).__name__}).")
