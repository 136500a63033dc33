"""One vLLM server: what its HTTP interface is asked, and what its failures are called."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from opensearch_lightning.errors import ConfigurationError, one_line

_POLL_SECONDS = 1.0
_RETRY_SECONDS = (0.2, 1.0, 3.0)

EXTENSION = "opensearch_lightning.vllm_worker.WeightFiles"
LOGPROBS_MODE = "processed_logprobs"


class ServerError(Exception):
    """A request failed; the message names the server, the request and the cause."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a server says of itself. ``shapes``: its checkpoint's weights by name; ``dtype`` as torch names it."""

    max_length: int
    dtype: str
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One answer. ``finish`` is vLLM's word; ``versions`` labels the weights that each token was sampled from.

    ``prompt_tokens`` counts the prompt as the server expanded it.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: str
    prompt_tokens: int
    versions: list[str]


class VLLMServer:
    """Requests to one server, all from one event loop.

    Args:
        address: such as ``http://127.0.0.1:8000``.
        timeout_s: longest time of one request.
    """

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self.address = address.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 10.0))
        self._session: aiohttp.ClientSession | None = None

    async def wait_until_up(self, seconds: float) -> None:
        """Return when the server answers that it is healthy.

        Raises:
            ConfigurationError: it did not within ``seconds``.
        """
        end = time.monotonic() + seconds
        while not await self._is_up():
            if time.monotonic() > end:
                raise ConfigurationError(
                    f"no vLLM server answered at {self.address} within {seconds:g} s; start it "
                    "(scripts/serve_vllm.sh), or set rollout.engine.servers to where it is"
                )
            await asyncio.sleep(min(_POLL_SECONDS, seconds))

    async def describe(self) -> ServerFacts:
        """What the server was started with.

        Raises:
            ConfigurationError: it was not started as the rollouts need it; the message says which flag is missing.
            ServerError: it cannot be asked.
        """
        try:
            info = await self._send("GET", "/server_info?config_format=json")
        except ServerError as error:
            if "404" not in str(error):
                raise
            raise ConfigurationError(
                f"the vLLM server at {self.address} takes no weights: start it with VLLM_SERVER_DEV_MODE=1"
            ) from error
        config = info["vllm_config"]
        mode = config["model_config"].get("logprobs_mode")
        if mode != LOGPROBS_MODE:
            raise ConfigurationError(
                f"the vLLM server at {self.address} gives {mode}, not log-probabilities of the distribution that was "
                f"sampled from; start it with --logprobs-mode {LOGPROBS_MODE}"
            )
        if config["parallel_config"].get("worker_extension_cls") != EXTENSION:
            raise ConfigurationError(
                f"the vLLM server at {self.address} cannot take weights from files; start it with "
                f"--worker-extension-cls {EXTENSION}, and with this package on its PYTHONPATH"
            )
        shapes = (await self.call_workers("checkpoint_weights"))[0]
        if not shapes:
            raise ConfigurationError(
                f"the vLLM server at {self.address} was started from {config['model_config']['model']}, which is no "
                "folder of safetensors files there; give it the folder of the policy's checkpoint"
            )
        return ServerFacts(
            max_length=config["model_config"]["max_model_len"],
            dtype=config["model_config"]["dtype"].removeprefix("torch."),
            shapes={name: tuple(shape) for name, shape in shapes.items()},
        )

    async def generate(
        self, token_ids: Sequence[int], image_urls: Sequence[str], sampling: Mapping[str, Any]
    ) -> Sampled:
        """Sample once.

        Args:
            token_ids: the prompt, one pad for each image.
            image_urls: of the images, in order.
            sampling: vLLM's ``SamplingParams``.

        Raises:
            ServerError: there is no answer, or none that holds what was asked for.
        """
        body: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": dict(sampling)}
        if image_urls:
            body["content_parts"] = [{"type": "image_url", "url": url} for url in image_urls]
        # asking twice for a sample changes nothing, so any broken connection is tried again
        answer = await self._send("POST", "/inference/v1/generate", body, repeatable=True)
        try:
            choice = answer["choices"][0]
            content = choice["logprobs"]["content"]
            return Sampled(
                token_ids=list(choice["token_ids"]),
                logprobs=[float(entry["logprob"]) for entry in content],
                finish=choice["finish_reason"],
                prompt_tokens=answer["usage"]["prompt_tokens"],
                versions=[
                    span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])
                ],
            )
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(
                f"{self.address}/inference/v1/generate answered something else ({error!r}): {one_line(answer):.200}"
            ) from error

    async def pause(self) -> None:
        """Stop between two tokens; requests stay where they are."""
        await self._send("POST", "/pause?mode=keep")

    async def load(self, files: Sequence[Path], version: int) -> None:
        """Take the weights in ``files``, and forget what was computed with others. The server must be paused.

        Raises:
            ServerError: it could not; its weights are then of no use.
        """
        await self.call_workers("start_weight_files")
        for file in files:
            await self.call_workers("load_weight_file", str(file))
        await self.call_workers("finish_weight_files")
        # running requests are computed anew, so that what they sample from here on is of the new weights alone
        reset = await self._send("POST", "/reset_prefix_cache?reset_running_requests=true")
        if not (isinstance(reset, dict) and reset.get("success")):
            raise ServerError(f"{self.address} could not drop its prefix cache, which is of the old weights")
        await self._send("POST", "/reset_encoder_cache")
        # last: whoever sees the new version may rely on all of it
        await self._send("POST", "/update_weight_version", {"new_version": str(version)})

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._send("POST", "/resume")

    async def abort_all(self) -> None:
        """End every request that runs; each is answered with the finish ``abort``."""
        await self._send("POST", "/abort_requests", {})

    async def call_workers(self, method: str, *arguments: str) -> list[Any]:
        """What each worker process returns from one of its methods."""
        answer = await self._send("POST", "/collective_rpc", {"method": method, "args": list(arguments)})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise ServerError(f"{self.address} answered {method} without its workers' results: {answer!r:.80}")
        return results

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _is_up(self) -> bool:
        try:
            async with self._connections().get(f"{self.address}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # the server decides how many requests run at once, not the pool
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
            )
        return self._session

    async def _send(self, method: str, path: str, body: Any = None, *, repeatable: bool = False) -> Any:
        """The JSON answered, or ``None``; tried again where the request cannot have had an effect."""
        again: type[aiohttp.ClientError] = aiohttp.ClientConnectionError if repeatable else aiohttp.ClientConnectorError
        what = f"{self.address}{path.partition('?')[0]}"
        for seconds in (*_RETRY_SECONDS, None):
            try:
                return await self._attempt(method, path, body)
            except TimeoutError:
                raise ServerError(f"{what} did not answer within {self._timeout.total:g} s") from None
            except aiohttp.ClientError as error:
                if not isinstance(error, again) or seconds is None:
                    raise ServerError(f"{what} cannot be reached: {one_line(error) or type(error).__name__}") from error
                await asyncio.sleep(seconds)
        raise AssertionError("the last try either answers or raises")

    async def _attempt(self, method: str, path: str, body: Any) -> Any:
        async with self._connections().request(method, self.address + path, json=body) as response:
            content = await response.read()
            if response.status != 200:
                raise ServerError(
                    f"{self.address}{path.partition('?')[0]} answered {response.status}: {_message(content)}"
                )
        if not content:
            return None
        try:
            return json.loads(content)
        except ValueError as error:
            raise ServerError(f"{self.address}{path} answered something that is no JSON") from error


def _message(content: bytes) -> str:
    """The cause that an answer of vLLM gives, as far as it gives one."""
    try:
        error = json.loads(content)["error"]
        return one_line(error["message"] if isinstance(error, dict) else error)[:400]
    except (ValueError, KeyError, TypeError):
        return one_line(content.decode(errors="replace"))[:400]
