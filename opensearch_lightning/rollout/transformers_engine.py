"""A rollout engine on a transformers model: continuous batching over a cache that lives across turns.

Sequences enter and leave the batch between single tokens, so rollouts that wait for a tool hold up nobody. A turn's
observation is prefilled onto what the sequence has cached already; rollouts of one task prefill their common prompt,
images included, once. With weights of its own the engine takes new ones between two tokens, while rollouts run.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from opensearch_lightning.chat import ChatRenderer, mrope_positions
from opensearch_lightning.errors import ConfigurationError, RolloutLost
from opensearch_lightning.models import forbidden_token_ids
from opensearch_lightning.rollout.noise import turn_uniforms
from opensearch_lightning.rollout.protocol import EngineStats, FinishReason, Generation, SamplingParams, SessionKey
from opensearch_lightning.rollout.sampling import sample_tokens
from opensearch_lightning.rollout.slot_cache import SlotCache
from opensearch_lightning.rollout.turnstile import Turnstile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from opensearch_lightning.types import ImageInput

_LEAST_ROWS = 16
"""A CPU's matrix library multiplies fewer rows than this by another kernel, which rounds differently from the one that
the trainer's large batches go through: small batches are padded."""


@dataclass(eq=False)
class _Sequence:
    """One session's place in the engine.

    ``fresh`` and ``images`` are what is not cached yet; ``asking`` says that a turn is due.
    """

    key: SessionKey
    slot: int = -1
    asking: bool = False
    idle_since: float = 0.0
    next_position: int = 0
    cached: list[int] = field(default_factory=list)
    cached_images: tuple[ImageInput, ...] = ()
    fresh: list[int] = field(default_factory=list)
    images: tuple[ImageInput, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    noise: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    future: asyncio.Future[Generation] | None = None
    lost: Exception | None = None

    @property
    def length(self) -> int:
        return len(self.cached)

    def finish(self, reason: FinishReason) -> Generation:
        self.asking = False
        self.idle_since = time.monotonic()
        return Generation(token_ids=self.sampled, logprobs=self.logprobs, finish=reason, weight_versions=self.versions)

    def to_cache(self) -> None:
        """What was fresh has gone through the model."""
        self.cached += self.fresh
        self.cached_images += self.images
        self.fresh, self.images = [], ()

    def from_cache(self) -> None:
        """Everything has to go through the model again."""
        self.fresh, self.images = self.cached + self.fresh, self.cached_images + self.images
        self.cached, self.cached_images, self.next_position = [], (), 0


_Turn = tuple[_Sequence, Generation]
"""A turn that has ended, and whose it is."""


class TransformersEngine:
    """Samples from a Qwen3-VL policy of transformers, on the policy's own weights or on a copy.

    A rollout whose tool runs keeps its place in the cache, so that its next turn is cheap. Where others wait, it gives
    the place up after ``evict_idle_s`` and is prefilled anew when its result is there: a slow tool blocks nobody.

    Args:
        policy: the model; shared with the trainer, so that its weights are always the trained ones.
        processor: the checkpoint's processor, or a :class:`~opensearch_lightning.chat.ChatRenderer` made of it.
        max_sequences: trajectories in the cache at once; more wait for a place.
        max_length: tokens a sequence may reach; a longer one ends with ``FinishReason.CONTEXT``.
        max_prefill_tokens: padded tokens of one prefill pass.
        reproducible: run in lockstep: a batch goes on only when every open session has asked for its next turn, so
            that batches, and with them the last bits of the log-probabilities, do not depend on timing.
        own_weights: sample from a copy of the policy, so that it can be trained while rollouts run.
        on_update: what becomes of the caches of running rollouts when the copy gets new weights: ``"recompute"`` fills
            them again, so that each further token comes from the new policy; ``"keep"`` goes on with keys and values
            of the old weights, which costs nothing. Log-probabilities are those of the distribution that each token
            was drawn from either way.
        evict_idle_s: seconds that a rollout keeps its place while its tool runs and others wait for a place.
    """

    def __init__(
        self,
        policy: Any,
        processor: Any,
        *,
        max_sequences: int = 64,
        max_length: int = 4096,
        max_prefill_tokens: int = 8192,
        reproducible: bool = False,
        own_weights: bool = False,
        on_update: Literal["recompute", "keep"] = "recompute",
        evict_idle_s: float = 0.5,
    ) -> None:
        if on_update not in ("recompute", "keep"):
            raise ConfigurationError(f'on_update is {on_update!r}; set "recompute" or "keep"')
        if not evict_idle_s >= 0:
            raise ConfigurationError(f"evict_idle_s is {evict_idle_s}; set seconds, 0 or more")
        if max_sequences < 1 or max_length < 2:
            raise ConfigurationError(
                f"max_sequences is {max_sequences} and max_length {max_length}; set them to at least 1 and 2"
            )
        attention = str(getattr(policy.config, "_attn_implementation", "sdpa"))
        if attention not in ("sdpa", "eager"):
            raise ConfigurationError(
                f"the policy's attention is {attention!r}, which takes no mask of cached rows; load it with "
                'attn_implementation="sdpa"'
            )
        self.policy = _frozen_copy(policy) if own_weights else policy
        self.renderer = processor if isinstance(processor, ChatRenderer) else ChatRenderer(processor)
        self.max_length = max_length
        self.weight_version = 0
        self._forbidden_ids = torch.tensor(forbidden_token_ids(policy.config), dtype=torch.long)
        self._max_prefill_tokens = max_prefill_tokens
        self._trained = policy
        self._reproducible = reproducible
        self._own_weights = own_weights
        self._on_update = on_update
        self._evict_idle_s = evict_idle_s
        self._cache = SlotCache(max_sequences, max_length)
        self._slots: list[_Sequence | None] = [None] * max_sequences
        self._active = 0
        self._open: set[_Sequence] = set()
        self._pending: deque[_Sequence] = deque()
        self._closed: deque[_Sequence] = deque()
        self._lock = threading.Lock()
        self._model_turn = Turnstile()
        self._halted = False
        self._stats = EngineStats()
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Task[None] | None = None
        self._reopened: asyncio.Future[None] | None = None

    @property
    def live_updates(self) -> bool:
        """Whether new weights may come while rollouts run."""
        return self._own_weights and not self._reproducible

    def stats(self) -> EngineStats:
        """Counts since the engine was made; call it from any thread."""
        return self._stats

    # --- for the agent loop -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def session(self, key: SessionKey) -> AsyncIterator[_Session]:
        """Open a sequence; it keeps its cache until the context is left.

        Where the last one is left, nothing runs on the model any more, and it is in the mode that it was in before.
        """
        sequence = _Sequence(key=key)
        with self._lock:
            self._open.add(sequence)
        if self._server is None or self._server.done():
            self._wake = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            self._server = self._loop.create_task(self._serve())
        if self._reopened is not None and not self._reopened.done():
            self._reopened.set_result(None)
        try:
            yield _Session(self, sequence)
        finally:
            with self._lock:
                self._open.discard(sequence)
                if sequence in self._pending:
                    self._pending.remove(sequence)
                self._closed.append(sequence)
            self._notify()
            if not self._open:
                await self._at_rest()

    async def _at_rest(self) -> None:
        """Wait for a batch that an abandoned rollout left behind: the caller may train these weights at once."""
        self._reopened = asyncio.get_running_loop().create_future()
        assert self._server is not None
        await asyncio.wait({self._server, self._reopened}, return_when=asyncio.FIRST_COMPLETED)

    def update_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Bring the policy to ``named_weights``; weights that are the policy's own tensors are left as they are.

        With ``own_weights`` it may come at any time and from any thread: running rollouts are interrupted between two
        tokens and go on with the new weights when it returns.

        Raises:
            ConfigurationError: a session is open and the weights are not the engine's own, a name is unknown or
                missing, or a shape differs.
        """
        if self._open and not self.live_updates:
            raise ConfigurationError(
                f"{len(self._open)} rollouts are running; update weights between them, or give the engine weights of "
                "its own (own_weights=True, and not reproducible)"
            )
        with self._model_turn.hold():
            self._copy_weights(named_weights)
            with self._lock:
                self._refresh_caches()
            self.weight_version = version
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._notify)

    def _copy_weights(self, named_weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the weights over one by one: each may be gone, or gathered no more, once the next is asked for."""
        own = dict(self.policy.named_parameters())
        given, moved = set(), False
        for name, weight in named_weights:
            if name not in own or own[name].shape != weight.shape:
                raise _not_the_weights(name, weight, own.get(name))
            given.add(name)
            if self._own_weights and (own[name].device, own[name].dtype) != (weight.device, weight.dtype):
                own[name].data = weight.detach().clone()
                moved = True
            elif own[name].data_ptr() != weight.data_ptr():
                own[name].data.copy_(weight)
        missing = next((name for name in own if name not in given), None)
        if missing is not None:
            raise _not_the_weights(missing, None, own[missing])
        if moved:
            # a trainer places its policy, and may convert it, after the engine was made; buffers are never in parts
            own_buffers = dict(self.policy.named_buffers())
            for name, buffer in self._trained.named_buffers():
                own_buffers[name].data = buffer.detach().clone()

    def _refresh_caches(self) -> None:
        """Let running rollouts go on under the weights that were just copied."""
        if self._open and self._on_update == "keep":
            return
        self._cache.clear()
        for sequence in self._open:
            in_turn = 0 <= sequence.slot < self._active
            sequence.from_cache()
            if in_turn:
                self._deactivate(sequence)
                self._pending.append(sequence)
            elif not sequence.asking:
                self._free_slot(sequence)

    async def _request(
        self,
        sequence: _Sequence,
        token_ids: Sequence[int],
        images: Sequence[ImageInput],
        sampling: SamplingParams,
        step: int,
    ) -> Generation:
        if sequence.lost is not None:
            raise RolloutLost(f"the cache of {sequence.key} went with a failed batch") from sequence.lost
        sequence.sampling = sampling
        sequence.sampled, sequence.logprobs, sequence.versions = [], [], []
        sequence.noise = turn_uniforms(sampling.seed, sequence.key, step, sampling.max_turn_tokens)
        sequence.future = asyncio.get_running_loop().create_future()
        with self._lock:
            sequence.fresh = sequence.fresh + list(token_ids)
            sequence.images += tuple(images)
            if sequence.length + len(sequence.fresh) >= self.max_length:
                return sequence.finish(FinishReason.CONTEXT)
            sequence.asking = True
            self._pending.append(sequence)
        self._notify()
        return await sequence.future

    # --- the event loop's side ----------------------------------------------------------------------------------

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _ready(self) -> bool:
        if self._reproducible:
            return bool(self._pending) and len(self._pending) == len(self._open)
        return self._active > 0 or self._admissible()

    def _admissible(self) -> bool:
        """Whether a waiting rollout has a place in the cache, or could get one."""
        with self._lock:
            if not self._pending:
                return False
            return bool(
                self._closed
                or None in self._slots
                or any(sequence.slot >= 0 for sequence in self._pending)
                or self._evictable() is not None
            )

    def _evictable(self) -> _Sequence | None:
        """The rollout that has been idle for longest, if it has been for long enough."""
        if self._reproducible:
            return None
        idle = [sequence for sequence in self._slots if sequence is not None and not sequence.asking]
        longest = min(idle, key=lambda sequence: sequence.idle_since, default=None)
        if longest is None or time.monotonic() - longest.idle_since < self._evict_idle_s:
            return None
        return longest

    async def _serve(self) -> None:
        was_training = self.policy.training
        self.policy.eval()
        self._halted = False
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-engine") as worker:
            try:
                while self._open:
                    while self._ready():
                        await self._serve_batch(worker)
                    await self._woken()
            except Exception as error:
                # nobody serves the open rollouts any more
                self._fail(error)
            finally:
                self._halted = True
                if not self._own_weights:
                    self.policy.train(was_training)

    async def _woken(self) -> None:
        """Until something may have changed: a rollout asked or left, or one that is idle may be evicted."""
        assert self._wake is not None
        timeout_s = max(self._evict_idle_s, 0.01) if self._pending and not self._reproducible else None
        try:
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        except TimeoutError:
            return
        self._wake.clear()

    async def _serve_batch(self, worker: ThreadPoolExecutor) -> None:
        try:
            finished = await asyncio.get_running_loop().run_in_executor(worker, self._advance)
        except Exception as error:  # whatever broke in the model, the rollouts are told and the engine goes on
            self._fail(error)
            return
        for sequence, generation in finished:
            if sequence.future is not None and not sequence.future.done():
                sequence.future.set_result(generation)
        await asyncio.sleep(0)

    def _fail(self, error: Exception) -> None:
        """Tell every waiting rollout that the engine died, and start again from an empty cache."""
        with self._model_turn.hold(), self._lock:
            self._pending.clear()
            self._slots = [None] * len(self._slots)
            self._active = 0
            self._cache.clear()
            running = list(self._open)
        for sequence in running:
            sequence.slot = -1
            sequence.lost = error
            if sequence.future is not None and not sequence.future.done():
                lost = RolloutLost(f"the engine failed in a batch with {sequence.key}: {error!r}")
                lost.__cause__ = error
                sequence.future.set_exception(lost)

    # --- the worker thread's side -------------------------------------------------------------------------------

    @torch.inference_mode()
    def _advance(self) -> list[_Turn]:
        """Take in what waits, then decode until a rollout has its turn (in lockstep: until all have)."""
        with self._model_turn.hold():
            self._release()
            finished = self._timed(self._prefill, self._admit())
        while self._active and not self._halted:
            with self._model_turn.hold():
                if self._active:
                    finished += self._timed(self._decode)
            if not self._reproducible and (finished or self._closed or self._admissible()):
                break
        return finished

    def _timed(self, work: Callable[..., list[_Turn]], *args: Any) -> list[_Turn]:
        started, started_thread = time.perf_counter(), time.thread_time()
        try:
            return work(*args)
        finally:
            busy_s = self._stats.busy_s + time.perf_counter() - started
            processor_s = self._stats.processor_s + time.thread_time() - started_thread
            self._stats = replace(self._stats, busy_s=busy_s, processor_s=processor_s)

    def _release(self) -> None:
        with self._lock:
            closed = list(self._closed)
            self._closed.clear()
        for sequence in closed:
            self._free_slot(sequence)

    def _free_slot(self, sequence: _Sequence) -> None:
        if sequence.slot < 0:
            return
        self._deactivate(sequence)
        self._slots[sequence.slot] = None
        sequence.slot = -1

    def _admit(self) -> list[_Sequence]:
        with self._lock:
            waiting = sorted(self._pending, key=lambda s: s.key) if self._reproducible else list(self._pending)
            self._pending.clear()
            free = [slot for slot, sequence in enumerate(self._slots) if sequence is None]
            admitted = []
            for sequence in waiting:
                if sequence.slot < 0:
                    if not free and (idle := self._evictable()) is not None:
                        free.append(idle.slot)
                        self._free_slot(idle)
                        idle.from_cache()
                    if not free:
                        self._pending.append(sequence)
                        continue
                    sequence.slot = free.pop()
                    self._slots[sequence.slot] = sequence
                admitted.append(sequence)
        return admitted

    def _prefill(self, sequences: list[_Sequence]) -> list[_Turn]:
        finished = []
        leaders, followers = _shared_prompts(sequences)
        for batch in _by_tokens(leaders, self._max_prefill_tokens):
            lengths = [len(sequence.fresh) for sequence in batch]
            logits_NV = self._forward(batch, lengths)
            rows = list(range(len(batch)))
            group = list(batch)
            for row, leader in enumerate(batch):
                copies = followers.get(leader, [])
                if copies:
                    self._cache.copy(leader.slot, [copy.slot for copy in copies], lengths[row])
                rows += [row] * len(copies)
                group += copies
                for copy in copies:
                    copy.next_position = leader.next_position
            for sequence in group:
                sequence.to_cache()
            prefilled = self._stats.prefilled_tokens + sum(lengths)
            self._stats = replace(self._stats, prefilled_tokens=prefilled)
            finished += self._sample(group, logits_NV[rows])
        return finished

    def _decode(self) -> list[_Turn]:
        batch = [sequence for sequence in self._slots[: self._active] if sequence is not None]
        logits_NV = self._forward(batch, [1] * len(batch))
        for sequence in batch:
            sequence.to_cache()
        return self._sample(batch, logits_NV)

    def _forward(self, batch: list[_Sequence], lengths: list[int]) -> Tensor:
        """Run the fresh tokens of each sequence; returns logits ``[N, V]`` (float32 at least) after its last token."""
        device = self.policy.device
        least = _LEAST_ROWS if device.type == "cpu" else 1
        width = max(math.ceil(least / len(batch)), *lengths)
        input_ids = torch.full((len(batch), width), self.renderer.pad_id, dtype=torch.long)
        positions = torch.zeros(3, len(batch), width, dtype=torch.long)
        for row, (sequence, length) in enumerate(zip(batch, lengths, strict=True)):
            input_ids[row, :length] = torch.tensor(sequence.fresh)
            if length == 1 and not sequence.images:
                positions[:, row, 0] = sequence.next_position
                sequence.next_position += 1
            else:
                positions[:, row, :length], sequence.next_position = mrope_positions(
                    sequence.fresh,
                    [image.grid_thw for image in sequence.images],
                    image_token_id=self.renderer.image_token_id,
                    merge_size=self.renderer.merge_size,
                    start=sequence.next_position,
                )
        images = [image for sequence in batch for image in sequence.images]
        mask = self._cache.window([s.slot for s in batch], [s.length for s in batch], lengths, device, width)
        hidden = self.policy.model(
            input_ids=input_ids.to(device),
            position_ids=positions.to(device),
            attention_mask=mask,
            cache=self._cache,
            pixel_values=torch.cat([i.pixel_values for i in images]).to(device) if images else None,
            image_grid_thw=torch.tensor([i.grid_thw for i in images], device=device) if images else None,
        ).last_hidden_state
        last = hidden[torch.arange(len(batch)), torch.tensor(lengths) - 1]
        padding = hidden.new_zeros(max(0, least - len(batch)), hidden.shape[-1])
        logits_NV = self.policy.lm_head(torch.cat([last, padding]))[: len(batch)]
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        logits_NV[:, self._forbidden_ids.to(device)] = float("-inf")
        return logits_NV

    def _sample(self, batch: list[_Sequence], logits_NV: Tensor) -> list[_Turn]:
        device = logits_NV.device
        noise = torch.tensor([s.noise[len(s.sampled)] for s in batch], dtype=torch.float64, device=device)
        temperature = torch.tensor([s.sampling.temperature for s in batch], dtype=logits_NV.dtype, device=device)
        top_p = torch.tensor([s.sampling.top_p for s in batch], device=device)
        top_k = torch.tensor([s.sampling.top_k for s in batch], device=device)
        token_ids, logprobs = sample_tokens(logits_NV, noise, temperature, top_p, top_k)
        self._stats = replace(self._stats, sampled_tokens=self._stats.sampled_tokens + len(batch))
        finished = []
        for sequence, token_id, logprob in zip(batch, token_ids.tolist(), logprobs.tolist(), strict=True):
            sequence.sampled.append(token_id)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.weight_version)
            sequence.fresh = [token_id]
            reason = self._finish_reason(sequence, token_id)
            if reason is not None:
                self._deactivate(sequence)
                finished.append((sequence, sequence.finish(reason)))
            else:
                self._activate(sequence)
        return finished

    def _finish_reason(self, sequence: _Sequence, token_id: int) -> FinishReason | None:
        if token_id == self.renderer.end_of_turn_id:
            return FinishReason.STOP
        if len(sequence.sampled) >= sequence.sampling.max_turn_tokens:
            return FinishReason.LENGTH
        if sequence.length + 1 >= self.max_length:
            return FinishReason.CONTEXT
        return None

    def _activate(self, sequence: _Sequence) -> None:
        if sequence.slot >= self._active:
            self._swap(sequence.slot, self._active)
            self._active += 1

    def _deactivate(self, sequence: _Sequence) -> None:
        if 0 <= sequence.slot < self._active:
            self._active -= 1
            self._swap(sequence.slot, self._active)

    def _swap(self, first: int, second: int) -> None:
        if first == second:
            return
        one, two = self._slots[first], self._slots[second]
        self._cache.swap(first, second, max(one.length if one else 0, two.length if two else 0))
        self._slots[first], self._slots[second] = two, one
        if one is not None:
            one.slot = second
        if two is not None:
            two.slot = first


class _Session:
    """What the agent loop holds of one sequence."""

    def __init__(self, engine: TransformersEngine, sequence: _Sequence) -> None:
        self._engine = engine
        self._sequence = sequence

    async def generate(
        self, token_ids: Sequence[int], images: Sequence[ImageInput], sampling: SamplingParams, step: int
    ) -> Generation:
        """See :class:`~opensearch_lightning.rollout.protocol.EngineSession`."""
        return await self._engine._request(self._sequence, token_ids, images, sampling, step)


def _not_the_weights(name: str, given: Tensor | None, own: Tensor | None) -> ConfigurationError:
    given_shape, own_shape = (tuple(w.shape) if w is not None else "no such weight" for w in (given, own))
    return ConfigurationError(
        f"the weights given are not those of the engine's model (first {name}: given {given_shape}, the engine has "
        f"{own_shape}); give the engine the model that is trained"
    )


def _frozen_copy(policy: Any) -> Any:
    """The same model on weights of its own, which nobody trains."""
    return deepcopy(policy).requires_grad_(False).eval()


def _shared_prompts(sequences: list[_Sequence]) -> tuple[list[_Sequence], dict[_Sequence, list[_Sequence]]]:
    """Split new sequences into one leader for each distinct prompt and the followers that copy its cache."""
    leaders: list[_Sequence] = []
    followers: dict[_Sequence, list[_Sequence]] = {}
    by_prompt: dict[tuple[Any, ...], _Sequence] = {}
    for sequence in sequences:
        prompt = (tuple(sequence.fresh), tuple(image.encoded for image in sequence.images))
        leader = by_prompt.setdefault(prompt, sequence) if sequence.length == 0 else sequence
        if leader is sequence:
            leaders.append(sequence)
        else:
            followers.setdefault(leader, []).append(sequence)
    return leaders, followers


def _by_tokens(sequences: list[_Sequence], max_tokens: int) -> list[list[_Sequence]]:
    """Batches of similar lengths whose padded size stays within ``max_tokens`` (one sequence may exceed it)."""
    batches: list[list[_Sequence]] = []
    for sequence in sorted(sequences, key=lambda s: len(s.fresh)):
        # sorted: the newest is the longest
        if batches and (len(batches[-1]) + 1) * len(sequence.fresh) <= max_tokens:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return batches
