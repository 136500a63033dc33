"""A rollout engine on vLLM servers: tokens in, tokens and log-probabilities out, weights by files.

The rollouts of one task stay on one server, where their common prompt and everything said so far lie in the prefix
cache. Prompts go there with one ``<|image_pad|>`` for each image, which the server expands again.

A server is started with ``--enable-scale-out`` and ``VLLM_SERVER_DEV_MODE=1`` among others: see
``scripts/serve_vllm.sh``. Whoever reaches such a server can change its weights: let it listen inside the cluster only.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from opensearch_lightning.chat import ChatRenderer
from opensearch_lightning.errors import ConfigurationError, RolloutLost
from opensearch_lightning.models import forbidden_token_ids
from opensearch_lightning.pictures import open_picture, png_bytes, read_picture
from opensearch_lightning.rollout.noise import turn_seed
from opensearch_lightning.rollout.protocol import FinishReason, Generation, SamplingParams, SessionKey
from opensearch_lightning.rollout.vllm_server import Sampled, ServerError, ServerFacts, VLLMServer
from opensearch_lightning.rollout.weight_files import Writers, weight_files
from opensearch_lightning.tools.threads import LoopThread

if TYPE_CHECKING:
    from torch import Tensor

    from opensearch_lightning.types import ImageInput

log = logging.getLogger(__name__)

_AVOID_SECONDS = 30.0
_PICTURES_KEPT = 512
_NEVER_SAID = -100.0
"""vLLM's lowest logit bias."""

_UNTRAINED = "default"
"""What vLLM calls the weights that it started with."""


class VLLMServerEngine:
    """Samples from vLLM servers that other processes run.

    Args:
        policy: the model that is trained; read for the tokens that it cannot say.
        processor: the checkpoint's processor, or a :class:`~opensearch_lightning.chat.ChatRenderer` made of it.
        servers: their addresses, such as ``http://127.0.0.1:8000``; all serve the policy's checkpoint.
        weight_folder: where new weights are laid for the servers; a folder in memory where they are on this host.
        writer: ``"host"``: the first rank of each host passes the weights on to ``servers``, which are that host's
            own; ``"run"``: rank 0 alone does, to servers on any host, which all see ``weight_folder``.
        max_file_bytes: about the size of one file of weights.
        request_timeout_s: longest time of one request, one turn among them.
        start_timeout_s: how long to wait for servers that are still starting.

    Raises:
        ConfigurationError: a setting cannot work. What is wrong with a server is raised by the first use of it.
    """

    live_updates = True
    """Weights may be updated while sessions are open, from any thread."""

    def __init__(
        self,
        policy: Any,
        processor: Any,
        *,
        servers: Sequence[str],
        weight_folder: str | Path = "/dev/shm",
        writer: str = "host",
        max_file_bytes: int = 4 * 2**30,
        request_timeout_s: float = 3600.0,
        start_timeout_s: float = 900.0,
    ) -> None:
        if isinstance(servers, str) or not servers or len(set(servers)) < len(servers):
            raise ConfigurationError(f"servers is {servers!r}; give a list of addresses, each once")
        wrong = [address for address in servers if not address.startswith(("http://", "https://"))]
        if wrong:
            raise ConfigurationError(f"servers names {wrong[0]!r}; set an address such as http://127.0.0.1:8000")
        if writer not in ("host", "run"):
            raise ConfigurationError(f'writer is {writer!r}; set "host" or "run"')
        if max_file_bytes < 1 or not request_timeout_s > 0 or not start_timeout_s > 0:
            raise ConfigurationError(
                f"max_file_bytes is {max_file_bytes}, request_timeout_s {request_timeout_s}, start_timeout_s "
                f"{start_timeout_s}; set each above 0"
            )
        self.renderer = processor if isinstance(processor, ChatRenderer) else ChatRenderer(processor)
        self.weight_version = 0
        self._forbidden_ids = frozenset(forbidden_token_ids(policy.config))
        self._servers = [_Place(VLLMServer(address, timeout_s=request_timeout_s)) for address in servers]
        self._folder = Path(weight_folder)
        self._max_file_bytes = max_file_bytes
        self._start_timeout_s = start_timeout_s
        self._writers = Writers(per_host=writer == "host")
        self._updated = False
        self._facts: ServerFacts | None = None
        self._thread: LoopThread | None = None
        self._lock = threading.Lock()

    # --- for the agent loop -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def session(self, key: SessionKey) -> AsyncIterator[_Session]:
        """Open a sequence on the server of its task, or on the one with the fewest sequences.

        Raises:
            ConfigurationError: a server was not started as it must be, or does not answer.
            RolloutLost: no server has the policy's weights.
        """
        facts = await self._loop_thread().run(self._connect())
        place = self._choose(key.task_id)
        try:
            yield _Session(self, place, key, facts.max_length)
        finally:
            with self._lock:
                place.tasks[key.task_id] -= 1
                place.tasks += Counter()

    def update_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Bring all servers to ``named_weights``. Turns that are being sampled go on with the new ones.

        Every rank calls this, at the same time: all read ``named_weights`` to its end, the writers pass it on. A server
        that fails is left out until a later update reaches it.

        Raises:
            ConfigurationError: a name or shape does not belong to the servers' model, or one of its own is missing;
                then the servers keep the weights that they have.
            RolloutLost: no server took the weights.
        """
        error: Exception | None = None
        writes = self._writers.this_rank()
        try:
            if writes:
                self._pass_on(named_weights, version)
            else:
                for _ in named_weights:
                    pass
        except (ConfigurationError, RolloutLost) as problem:
            error = problem
        self._writers.agree(error)
        if not writes:
            # which servers took the weights the writer alone knows; elsewhere their answers tell
            for place in self._servers:
                place.is_usable = True
        self.weight_version = version
        self._updated = True

    async def aclose(self) -> None:
        """Close the connections. The servers run on."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.stop, [place.server.aclose for place in self._servers])

    # --- weights ------------------------------------------------------------------------------------------------

    def _pass_on(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        try:
            facts = self._loop_thread().call(self._connect())
        except ConfigurationError:
            for _ in named_weights:
                pass
            raise
        dtype = getattr(torch, facts.dtype)
        with weight_files(
            named_weights, facts.shapes, folder=self._folder, dtype=dtype, max_file_bytes=self._max_file_bytes
        ) as files:
            self._loop_thread().call(self._update_all(files, version))

    async def _update_all(self, files: Sequence[Path], version: int) -> None:
        failures = await asyncio.gather(*(self._update(place, files, version) for place in self._servers))
        if all(failures):
            raise RolloutLost(f"no server took the weights of version {version}: {failures[0]}") from failures[0]

    async def _update(self, place: _Place, files: Sequence[Path], version: int) -> ServerError | None:
        try:
            await place.server.pause()
            try:
                await place.server.load(files, version)
            except ServerError:
                # what runs there would go on with weights of no use, or wait for ever
                await place.server.abort_all()
                raise
            finally:
                await place.server.resume()
        except ServerError as error:
            log.warning("%s is left out until the next update: %s", place.server.address, error)
            place.is_usable = False
            return error
        place.is_usable = True
        return None

    # --- servers ------------------------------------------------------------------------------------------------

    def _loop_thread(self) -> LoopThread:
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread()
            return self._thread

    async def _connect(self) -> ServerFacts:
        """Wait for the servers, and see that they serve one model, as the rollouts need it."""
        if self._facts is not None:
            return self._facts
        await asyncio.gather(*(place.server.wait_until_up(self._start_timeout_s) for place in self._servers))
        try:
            facts = await asyncio.gather(*(place.server.describe() for place in self._servers))
        except ServerError as error:
            raise ConfigurationError(f"a vLLM server cannot be asked what it serves: {error}") from error
        for place, other in zip(self._servers, facts, strict=True):
            if other != facts[0]:
                raise ConfigurationError(
                    f"the vLLM servers at {self._servers[0].server.address} and {place.server.address} differ in "
                    "model, dtype or max_model_len; start all alike"
                )
        self._facts = facts[0]
        return facts[0]

    def _choose(self, task_id: str) -> _Place:
        """The server where the task's prompt is cached, unless it failed just now; else the least busy one."""
        with self._lock:
            usable = [place for place in self._servers if place.is_usable]
            if not usable:
                raise RolloutLost("no vLLM server has the policy's weights; see the warnings above")
            since = time.monotonic() - _AVOID_SECONDS
            healthy = [place for place in usable if place.failed_at < since] or usable
            place = min(healthy, key=lambda place: (place.tasks[task_id] == 0, place.tasks.total()))
            place.tasks[task_id] += 1
            return place

    async def _request(
        self, place: _Place, token_ids: Sequence[int], urls: Sequence[str], sampling: dict[str, Any]
    ) -> Sampled:
        """One answer of a server, on the loop of :class:`LoopThread`."""
        bias = {str(token_id): _NEVER_SAID for token_id in self._forbidden_ids}
        given = self.weight_version
        try:
            sampled = await place.server.generate(token_ids, urls, {**sampling, "logit_bias": bias})
        except ServerError as error:
            place.failed_at = time.monotonic()
            raise RolloutLost(str(error)) from error
        if sampled.finish not in ("stop", "length"):
            raise RolloutLost(f"{place.server.address} ended a turn with {sampled.finish!r}")
        if self._updated and any(label == _UNTRAINED or int(label) < given for label in sampled.versions):
            place.is_usable = False
            raise RolloutLost(
                f"{place.server.address} has started anew or could not take the last weights, and is left out until "
                "the next update"
            )
        if not self._forbidden_ids.isdisjoint(sampled.token_ids):
            raise RolloutLost(f"{place.server.address} sampled a vision token, which would claim an image")
        return sampled


class _Place:
    """One server, and what is open on it."""

    def __init__(self, server: VLLMServer) -> None:
        self.server = server
        self.tasks: Counter[str] = Counter()
        self.is_usable = True
        self.failed_at = float("-inf")


class _Session:
    """One growing sequence, in expanded tokens for its length and in the server's for its requests."""

    def __init__(self, engine: VLLMServerEngine, place: _Place, key: SessionKey, max_length: int) -> None:
        self._engine, self._place, self._key, self._max_length = engine, place, key, max_length
        self._length = 0
        self._sent_ids: list[int] = []
        self._urls: list[str] = []

    async def generate(
        self, token_ids: Sequence[int], images: Sequence[ImageInput], sampling: SamplingParams, step: int
    ) -> Generation:
        """See :class:`~opensearch_lightning.rollout.protocol.EngineSession`.

        Raises:
            RolloutLost: the server failed, or gave an answer that cannot be used.
            ConfigurationError: the server makes other image tokens of the prompt than the renderer.
        """
        renderer = self._engine.renderer
        folded = fold_image_pads(token_ids, renderer.image_token_id)
        if folded.count(renderer.image_token_id) != len(images):
            raise ConfigurationError(
                f"{len(images)} images were given with tokens of {folded.count(renderer.image_token_id)}; render both "
                "with the engine's renderer"
            )
        self._sent_ids += folded
        self._length += len(token_ids)
        self._urls += [await asyncio.to_thread(data_url, image.encoded) for image in images]
        room = self._max_length - self._length
        if room < 1:
            return Generation(token_ids=[], logprobs=[], finish=FinishReason.CONTEXT)
        settings = _vllm_sampling(sampling, turn_seed(sampling.seed, self._key, step), renderer.end_of_turn_id, room)
        thread = self._engine._loop_thread()
        sampled = await thread.run(self._engine._request(self._place, self._sent_ids, self._urls, settings))
        if sampled.prompt_tokens != self._length:
            raise ConfigurationError(
                f"{self._place.server.address} makes {sampled.prompt_tokens} tokens of a prompt that has "
                f"{self._length} here; give it the policy's checkpoint, image processor included"
            )
        self._sent_ids += sampled.token_ids
        self._length += len(sampled.token_ids)
        return Generation(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish=_finish(sampled, sampling.max_turn_tokens),
            # before the first update, the checkpoint's weights are version 0
            weight_versions=[0 if label == _UNTRAINED else int(label) for label in sampled.versions],
        )


def fold_image_pads(token_ids: Iterable[int], pad: int) -> list[int]:
    """Tokens with one pad for each image instead of one for each of its patches.

    >>> fold_image_pads([1, 9, 9, 9, 2, 1, 9, 2], pad=9)
    [1, 9, 2, 1, 9, 2]
    """
    folded: list[int] = []
    for token_id in token_ids:
        if token_id != pad or not folded or folded[-1] != pad:
            folded.append(token_id)
    return folded


@lru_cache(maxsize=_PICTURES_KEPT)
def data_url(encoded: bytes) -> str:
    """A picture for a request. Where a server might decode other pixels than the policy is trained on, they are sent.

    Raises:
        DataError: it is no picture.
    """
    image = open_picture(encoded)
    is_plain = image.format in ("PNG", "JPEG") and image.mode == "RGB"
    if is_plain and not image.has_transparency_data and not image.getexif():
        kind, content = str(image.format).lower(), encoded
    else:
        kind, content = "png", png_bytes(read_picture(encoded))
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _vllm_sampling(sampling: SamplingParams, seed: int, end_of_turn_id: int, room: int) -> dict[str, Any]:
    """One turn in the words of vLLM; only the end-of-turn token ends it."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": min(sampling.max_turn_tokens, room),
        "seed": seed,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": [end_of_turn_id],
        "detokenize": False,
    }


def _finish(sampled: Sampled, max_turn_tokens: int) -> FinishReason:
    if sampled.finish == "stop":
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sampled.token_ids) >= max_turn_tokens else FinishReason.CONTEXT
