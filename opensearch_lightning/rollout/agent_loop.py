"""Runs the policy in its environment: sample a turn, execute its action, append the observation, until it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from opensearch_lightning.algorithms import find_fatal_step
from opensearch_lightning.chat import Rendered, parse_action
from opensearch_lightning.errors import ConfigurationError, DataError, JudgeError, RenderError, RolloutLost
from opensearch_lightning.rollout.prompt import Prompt
from opensearch_lightning.rollout.protocol import FinishReason, Generation, SamplingParams, SessionKey
from opensearch_lightning.rollout.repetition import repeated_call_onset, repeats_ngram
from opensearch_lightning.tools import CallKey, ImageBook
from opensearch_lightning.types import (
    NON_FATAL,
    ErrorKind,
    ImageInput,
    Step,
    StopReason,
    Task,
    Trajectory,
    TrajectoryGroup,
)

if TYPE_CHECKING:
    from opensearch_lightning.rollout.protocol import Reward, RolloutEngine
    from opensearch_lightning.tools import ToolExecutor


log = logging.getLogger(__name__)

IncompleteGroups = Literal["retry", "drop_rollout", "drop_group"]


@dataclass
class _Run:
    """A trajectory in the making."""

    token_ids: list[int] = field(default_factory=list)
    step_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    images: list[ImageInput] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_tokens: int = 0

    def append_given(self, rendered: Rendered) -> None:
        """Prompt or observation: tokens that the policy did not sample."""
        count = len(rendered.token_ids)
        self.token_ids += rendered.token_ids
        self.step_ids += [-1] * count
        self.logprobs += [0.0] * count
        self.images += rendered.images

    def append_sampled(self, generation: Generation) -> None:
        """One turn of the policy, exactly as sampled."""
        count = len(generation.token_ids)
        self.token_ids += generation.token_ids
        self.step_ids += [len(self.steps)] * count
        self.logprobs += generation.logprobs
        self.versions += generation.weight_versions

    @property
    def response_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens


@dataclass
class _Outcome:
    """What came of one rollout of a group."""

    trajectory: Trajectory | None = None
    retried: int = 0
    abandoned: bool = False


class AgentLoop:
    """Makes trajectories.

    Args:
        engine: samples turns; its renderer turns prompt and observations into tokens.
        executor: carries out actions and types their failures.
        system_prompt: text of the system turn.
        render_tools: put the executor's tool schemas into the system turn, as the chat template does; off for a
            policy that learned its tools from another prompt.
        tell_image_sizes: begin the question with name and size in pixels of each of its images, as results do for
            those that tools make; off for a policy that learned from prompts without.
        max_turns: policy turns before the run is cut.
        max_response_tokens: tokens after the prompt, observations included, before the run is cut.
        fatal_k: consecutive errors that are fatal, and equal calls that count as repetition (App. B.1).
        fatal_onset: where the fatal step lies: at the first of those errors, or where the count is reached.
        counted_errors: kinds that count towards ``fatal_k``; others reset the counter like a success.
        reward: scores each trajectory; one whose judge fails keeps ``reward=None`` and has no vote in its group.
        incomplete_groups: what becomes of a group whose rollout was lost to infrastructure: ``"retry"`` tries the
            rollout again, ``retries`` times, and then goes on without it; ``"drop_rollout"`` goes on without it at
            once; ``"drop_group"`` drops all its rollouts. What is dropped is counted.
        retries: of ``"retry"``.
        rollout_timeout_s: a rollout that takes longer is abandoned, counted, and lost to its group without another
            try; ``None``: every rollout is waited for.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        executor: ToolExecutor,
        *,
        system_prompt: str,
        render_tools: bool = True,
        tell_image_sizes: bool = False,
        max_turns: int = 50,
        max_response_tokens: int = 70_000,
        fatal_k: int = 3,
        fatal_onset: Literal["first", "threshold"] = "first",
        counted_errors: Collection[ErrorKind | str] = tuple(ErrorKind),
        reward: Reward | None = None,
        incomplete_groups: IncompleteGroups = "retry",
        retries: int = 1,
        rollout_timeout_s: float | None = None,
    ) -> None:
        if incomplete_groups not in get_args(IncompleteGroups):
            raise ConfigurationError(
                f"incomplete_groups is {incomplete_groups!r}; set one of {', '.join(get_args(IncompleteGroups))}"
            )
        if rollout_timeout_s is not None and not rollout_timeout_s > 0:
            raise ConfigurationError(
                f"rollout_timeout_s is {rollout_timeout_s}; set seconds above 0, or null to wait for every rollout"
            )
        if min(max_turns, max_response_tokens, fatal_k) < 1:
            raise ConfigurationError(
                f"max_turns is {max_turns}, max_response_tokens {max_response_tokens}, fatal_k {fatal_k}; "
                "each must be at least 1"
            )
        if fatal_onset not in ("first", "threshold"):
            raise ConfigurationError(f'fatal_onset is {fatal_onset!r}; set "first" or "threshold"')
        if isinstance(counted_errors, str):
            raise ConfigurationError(f"counted_errors is {counted_errors!r}; give a list, such as [{counted_errors}]")
        self.engine = engine
        self.executor = executor
        self.prompt = Prompt(
            engine.renderer,
            executor,
            system_prompt=system_prompt,
            render_tools=render_tools,
            tell_image_sizes=tell_image_sizes,
        )
        self.renderer = self.prompt.renderer
        self.max_turns = max_turns
        self.max_response_tokens = max_response_tokens
        self.fatal_k = fatal_k
        self.fatal_onset: Literal["first", "threshold"] = fatal_onset
        unknown = [str(kind) for kind in counted_errors if kind not in set(ErrorKind)]
        if unknown:
            raise ConfigurationError(f"counted_errors names {unknown}; the kinds are {', '.join(ErrorKind)}")
        self.counted_errors = frozenset(ErrorKind(kind) for kind in counted_errors)
        self.reward = reward
        self.incomplete_groups: IncompleteGroups = incomplete_groups
        self.retries = retries if incomplete_groups == "retry" else 0
        self.rollout_timeout_s = rollout_timeout_s

    async def run_group(
        self,
        task: Task,
        size: int,
        sampling: SamplingParams,
        *,
        first_rollout: int = 0,
        place: AbstractAsyncContextManager[None] | None = None,
    ) -> TrajectoryGroup:
        """``size`` trajectories of one task, each scored as it ends; those lost to infrastructure are counted.

        ``first_rollout`` numbers them: noise and injected faults are keyed by it, so a task that comes again in a
        later step gets new ones. Each rollout enters ``place`` before it starts, and leaves it at its end: whoever
        limits the rollouts that run at once gives one.
        """
        numbers = range(first_rollout, first_rollout + size)
        place = place or nullcontext()
        drop_all = self.incomplete_groups == "drop_group"
        outcomes = await _gather(
            [self._run_and_score(task, rollout, sampling, place) for rollout in numbers], until_lost=drop_all
        )
        kept = tuple(outcome.trajectory for outcome in outcomes if outcome.trajectory is not None)
        if drop_all and len(kept) < size:
            log.warning("task %s is dropped with all its rollouts, as one was lost", task.id)
            kept = ()
        return TrajectoryGroup(
            task=task,
            trajectories=kept,
            n_lost=size - len(kept),
            n_abandoned=sum(outcome.abandoned for outcome in outcomes),
            n_retried=sum(outcome.retried for outcome in outcomes),
        )

    async def _run_and_score(
        self, task: Task, rollout: int, sampling: SamplingParams, place: AbstractAsyncContextManager[None]
    ) -> _Outcome:
        outcome = _Outcome()
        async with place:
            clock = asyncio.timeout(self.rollout_timeout_s)
            try:
                async with clock:
                    outcome.trajectory = await self._try(task, rollout, sampling, outcome)
            except TimeoutError:
                if not clock.expired():
                    raise
                log.warning("rollout %d of task %s took over %s s", rollout, task.id, self.rollout_timeout_s)
                outcome.abandoned = True
        return outcome

    async def _try(self, task: Task, rollout: int, sampling: SamplingParams, outcome: _Outcome) -> Trajectory | None:
        for attempt in range(self.retries + 1):
            outcome.retried = attempt
            try:
                trajectory = await self.run(task, rollout, sampling)
            except RolloutLost as lost:
                log.warning("rollout %d of task %s was lost: %s", rollout, task.id, lost)
                continue
            return await self._score(task, trajectory)
        return None

    async def _score(self, task: Task, trajectory: Trajectory) -> Trajectory:
        if self.reward is None:
            return trajectory
        try:
            return replace(trajectory, reward=await self.reward.score(task, trajectory))
        except JudgeError as error:
            log.warning("rollout %d of task %s has no reward: %s", trajectory.rollout, task.id, error)
            return trajectory

    async def run(self, task: Task, rollout: int, sampling: SamplingParams) -> Trajectory:
        """One trajectory.

        Raises:
            RolloutLost: the engine failed; nothing is known of how the policy would have done.
            DataError: the task cannot be shown to the policy, or its ``metadata["image_urls"]`` (optional: the public
                addresses of its images, null where there is none) does not fit its images.
        """
        urls = _image_urls(task)
        key = SessionKey(task_id=task.id, rollout=rollout)
        async with self.engine.session(key) as session:
            run, book = _Run(), ImageBook()
            pictures = [book.get(book.add(*pair)) for pair in zip(task.images, urls, strict=True)]
            fresh = await asyncio.to_thread(self.prompt.render, task, pictures)
            run.append_given(fresh)
            run.prompt_tokens = len(fresh.token_ids)
            stop: StopReason | None = None
            while stop is None:
                left = self.max_response_tokens - run.response_tokens
                limited = replace(sampling, max_turn_tokens=min(sampling.max_turn_tokens, left))
                generation = await session.generate(fresh.token_ids, fresh.images, limited, len(run.steps))
                run.append_sampled(generation)
                stop, fresh = await self._take_step(run, book, key, generation)
            return self._finish(run, key, stop, sampling)

    async def _take_step(
        self, run: _Run, book: ImageBook, key: SessionKey, generation: Generation
    ) -> tuple[StopReason | None, Rendered]:
        """Carry out one sampled turn; returns why the run ends, if it does, and what to append if not."""
        nothing = Rendered(token_ids=[], images=())
        ended = generation.finish is FinishReason.STOP
        sampled = generation.token_ids
        if not sampled:
            return StopReason.CONTEXT_LENGTH, nothing
        text = self.renderer.decode(sampled[:-1] if ended else sampled)
        step = Step(index=len(run.steps), text=text, action=parse_action(text))
        if not ended or step.action.kind == "response":
            run.steps.append(step)
            return _stop_without_call(generation), nothing
        step, observation = await self._observe(run, book, key, step)
        run.steps.append(step)
        stop = self._stop_after_result(run)
        if stop is not None:
            return stop, nothing
        if run.response_tokens + len(observation.token_ids) >= self.max_response_tokens:
            return StopReason.MAX_TOKENS, nothing
        run.append_given(observation)
        return None, observation

    async def _observe(self, run: _Run, book: ImageBook, key: SessionKey, step: Step) -> tuple[Step, Rendered]:
        """The step with what its call came to, and the tokens that tell the policy."""
        call_key = CallKey(task_id=key.task_id, rollout=key.rollout, step=step.index)
        result = await self.executor.execute(step.action, book, call_key)
        image = result.image
        if image is None:
            return replace(step, result=result), self.renderer.observation(result.text)
        try:
            observation = await asyncio.to_thread(
                self.renderer.observation, result.text, [image], first_image=len(run.images) + 1
            )
        except RenderError as error:
            text = f"Error: {ErrorKind.BACKEND_ERROR}. The image cannot be shown."
            log.warning("step %d of task %s made an image that cannot be shown: %s", step.index, key.task_id, error)
            result = replace(result, text=text, image=None, error=ErrorKind.BACKEND_ERROR)
            return replace(step, result=result), self.renderer.observation(text)
        return replace(step, result=result, image_name=book.add(image)), observation

    def _stop_after_result(self, run: _Run) -> StopReason | None:
        if all(self._counts(step) for step in run.steps[-self.fatal_k :]) and len(run.steps) >= self.fatal_k:
            return StopReason.FATAL_ERRORS
        if repeated_call_onset(run.steps, self.fatal_k) is not None:
            return StopReason.REPETITION
        if len(run.steps) >= self.max_turns:
            return StopReason.MAX_TURNS
        return None

    def _counts(self, step: Step) -> bool:
        return step.error in self.counted_errors

    def _finish(self, run: _Run, key: SessionKey, stop: StopReason, sampling: SamplingParams) -> Trajectory:
        fatal_step = self._fatal_step(run, stop)
        versions = run.versions or [self.engine.weight_version]
        return Trajectory(
            task_id=key.task_id,
            rollout=key.rollout,
            steps=tuple(run.steps),
            images=tuple(run.images),
            token_ids=torch.tensor(run.token_ids, dtype=torch.long),
            step_ids=torch.tensor(run.step_ids, dtype=torch.long),
            sampling_logprobs=torch.tensor(run.logprobs, dtype=torch.float32),
            stop_reason=stop,
            fatal_step=fatal_step,
            # out of turns or tokens: every token keeps its gradient, yet clamp and hard mask treat the run as fatal
            is_fatal=fatal_step < NON_FATAL or stop is not StopReason.RESPONSE,
            temperature=sampling.temperature,
            weight_version=versions[0],
            last_weight_version=versions[-1],
        )

    def _fatal_step(self, run: _Run, stop: StopReason) -> int:
        if stop is StopReason.REPETITION:
            onset = repeated_call_onset(run.steps, self.fatal_k)
            return run.steps[-1].index if onset is None else onset
        errors = [self._counts(step) for step in run.steps]
        fatal_step = find_fatal_step(errors, k=self.fatal_k, onset=self.fatal_onset)
        return NON_FATAL if fatal_step is None else fatal_step


async def _gather(rollouts: Sequence[Coroutine[Any, Any, _Outcome]], *, until_lost: bool) -> list[_Outcome]:
    """What came of each; with ``until_lost`` only of those that ended before the first loss. None is left running."""
    tasks = [asyncio.ensure_future(rollout) for rollout in rollouts]
    try:
        if not until_lost:
            return await asyncio.gather(*tasks)
        for next_task in asyncio.as_completed(tasks):
            if (await next_task).trajectory is None:
                break
        return [task.result() for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _image_urls(task: Task) -> Sequence[str | None]:
    """Public addresses of a task's images, as far as it knows any."""
    urls = task.metadata.get("image_urls")
    if urls is None:
        return [None] * len(task.images)
    if (
        not isinstance(urls, Sequence)
        or isinstance(urls, str)
        or len(urls) != len(task.images)
        or not all(isinstance(url, str | None) for url in urls)
    ):
        raise DataError(
            f"task {task.id}: metadata image_urls is {urls!r:.80}, but the task has {len(task.images)} images: give a "
            "list with the address or null for each, or leave it out"
        )
    return urls


def _stop_without_call(generation: Generation) -> StopReason:
    """Why a run ends at a turn that is a response, or was cut."""
    if generation.finish is FinishReason.STOP:
        return StopReason.RESPONSE
    if repeats_ngram(generation.token_ids):
        return StopReason.REPETITION
    return StopReason.CONTEXT_LENGTH if generation.finish is FinishReason.CONTEXT else StopReason.MAX_TOKENS


def check_room(groups: Sequence[TrajectoryGroup]) -> None:
    """Refuse to take it for a bad policy that none of the prompts left it room for a word.

    Raises:
        ConfigurationError: there are trajectories, and each ended at the model's length before its first step.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if trajectories and all(t.stop_reason is StopReason.CONTEXT_LENGTH and not t.steps for t in trajectories):
        raise ConfigurationError(
            f"the prompts of all {len(trajectories)} rollouts fill the engine's context and leave no room for a turn; "
            "raise rollout.engine.max_length, or shorten the prompt (callbacks.rollout_generation.system_prompt, "
            "render_tools, image size)"
        )
