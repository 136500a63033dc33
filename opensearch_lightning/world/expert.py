"""A scripted expert that solves MiniWiki tasks by real tool calls, and recovers from failing ones.

It plays the part of the strong model of the recipe: its trajectories, filtered to right answers, are the data of
agentic SFT. It knows from the task which relations to follow and what is wrong with the picture; every name it uses
on the way it reads from an observation. It is not a perfect teacher: where two tools lead to the same end it mostly
takes one of them by habit, and after an error it makes the same call again or turns to something else at random. Which
of these gets through an outage it does not know.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from opensearch_lightning.chat import format_action, parse_action
from opensearch_lightning.pictures import png_bytes
from opensearch_lightning.tools import CallKey, ImageBook, ToolExecutor
from opensearch_lightning.types import Task, ToolCall, ToolResult
from opensearch_lightning.world.calibrate import IMAGE_SEARCH, OCR

TEXT_SEARCH = "text_search"


class AnswerCheck(Protocol):
    """Says whether a response answers the task, as the accuracy judge does."""

    async def judge(self, question: str, response: str, reference: Task) -> bool:
        """Whether ``response`` is right."""
        ...


@dataclass(frozen=True, kw_only=True)
class ExpertStatistics:
    """How the expert fared: rollouts tried and kept, and why the others were left out."""

    tried: int
    kept: int
    dropped: dict[str, int]


@dataclass
class _Episode:
    task: Task
    key: tuple[str, int]
    book: ImageBook
    rng: random.Random
    turns: list[dict[str, str]] = field(default_factory=list)
    pictures: list[bytes] = field(default_factory=list)
    errors_in_a_row: int = 0
    step: int = 0


class _GaveUp(Exception):
    """The episode cannot be completed; the argument says why."""


class ScriptedExpert:
    """Solves tasks of a MiniWiki.

    Args:
        executor: carries out the calls, faults included.
        judge: decides which trajectories are kept.
        system_prompt: the one the policy will see.
        detour: probability of taking another way after a failed call, or of doing something else before it is made
            again where there is no other way.
        habit: probability of taking the first of two ways.
        fatal_k: consecutive errors at which an episode is lost.
        max_turns: turns at which it is lost.
        seed: keys the expert's choices together with task and rollout.
    """

    def __init__(
        self,
        executor: ToolExecutor,
        judge: AnswerCheck,
        *,
        system_prompt: str,
        detour: float = 0.5,
        habit: float = 0.7,
        fatal_k: int = 3,
        max_turns: int = 16,
        seed: int = 0,
    ) -> None:
        self.executor = executor
        self.judge = judge
        self.system_prompt = system_prompt
        self.detour = detour
        self.habit = habit
        self.fatal_k = fatal_k
        self.max_turns = max_turns
        self.seed = seed

    async def collect(
        self, tasks: Sequence[Task], *, rollouts: int = 1, concurrency: int = 32
    ) -> tuple[list[dict[str, Any]], ExpertStatistics]:
        """Trajectories that end in the right answer, as ShareGPT rows in the order of the tasks."""
        gate = asyncio.Semaphore(concurrency)

        async def one(task: Task, rollout: int) -> dict[str, Any] | str:
            async with gate:
                return await self.solve(task, rollout)

        outcomes = await asyncio.gather(*(one(task, r) for task in tasks for r in range(rollouts)))
        rows = [outcome for outcome in outcomes if not isinstance(outcome, str)]
        dropped = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
        return rows, ExpertStatistics(tried=len(outcomes), kept=len(rows), dropped=dict(dropped))

    async def solve(self, task: Task, rollout: int = 0) -> dict[str, Any] | str:
        """One ShareGPT row, or the reason why there is none."""
        digest = hashlib.blake2b(f"{self.seed}\x1f{task.id}\x1f{rollout}".encode(), digest_size=8).digest()
        episode = _Episode(task, (task.id, rollout), ImageBook(), random.Random(digest))
        for image in task.images:
            episode.book.add(image)
            episode.pictures.append(image)
        try:
            response = await self._answer(episode)
        except _GaveUp as reason:
            return str(reason)
        if not await self.judge.judge(task.question, response, task):
            return "wrong answer"
        self._say(episode, format_action("answer", response=response))
        question = "<image>" * len(task.images) + task.question
        return {
            "id": f"{task.id}-{rollout}",
            "conversations": [{"from": "human", "value": question}, *episode.turns],
            "images": episode.pictures,
            "system": self.system_prompt,
            "tools": "",
        }

    async def _answer(self, episode: _Episode) -> str:
        facts = episode.task.metadata
        wanted = [*facts["relations"], facts["attribute"]]
        entity = await self._identify(episode, plan=", ".join(wanted))
        for relation in wanted:
            query = {"q": f"{relation} of {entity}"}
            observation, _ = await self._call(episode, relation, (TEXT_SEARCH, query))
            found = re.search(rf"{re.escape(relation)} of {re.escape(entity)} is (.+?)\.(?:\s|$)", observation.text)
            if found is None:
                raise _GaveUp("fact not found")
            entity = found.group(1)
        return entity

    async def _identify(self, episode: _Episode, plan: str) -> str:
        """Name of the entity in the picture, repaired first where it needs it."""
        facts = episode.task.metadata
        image, thought = "img_1", plan
        if facts["repair"] is not None:
            call = facts["repair"]["name"], facts["repair"]["arguments"]
            repaired, _ = await self._call(episode, thought, call)
            if repaired.image is None or repaired.note is not None:
                raise _GaveUp("picture not repaired")
            image, thought = f"img_{len(episode.book)}", "look"
        looks = {IMAGE_SEARCH: {"url": image}, OCR: {"image": image}}
        result, tool = await self._call(episode, thought, *((name, looks[name]) for name in facts["find"]))
        if tool == OCR:
            return result.text.strip()
        title = re.match(r"1\. (.+) \(\S+\)$", result.text, re.MULTILINE)
        if title is None:
            raise _GaveUp("picture not found")
        return title.group(1)

    async def _call(
        self, episode: _Episode, thought: str, *ways: tuple[str, Mapping[str, Any]]
    ) -> tuple[ToolResult, str]:
        """Make a call until it succeeds, one way or another; returns the tool that did.

        With several ways to the same end the first is taken by habit. After an error the call is made again, or, now
        and then, another way is taken or, where there is none, something else is done first.
        """
        way = ways[0] if len(ways) == 1 or episode.rng.random() < self.habit else ways[1]
        result = await self._act(episode, thought, *way)
        while result.error is not None:
            if episode.errors_in_a_row >= self.fatal_k:
                raise _GaveUp("fatal errors")
            if episode.rng.random() < self.detour:
                others = [other for other in ways if other is not way]
                if others:
                    way = episode.rng.choice(others)
                else:
                    await self._act(episode, "wait", *_pastime(way[0]))
                    if episode.errors_in_a_row >= self.fatal_k:
                        raise _GaveUp("fatal errors")
            # the plan of the first turn is said once
            result = await self._act(episode, "look" if "," in thought else thought, *way)
        return result, way[0]

    async def _act(self, episode: _Episode, thought: str, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if episode.step + 1 >= self.max_turns:
            raise _GaveUp("too many turns")
        text = format_action(thought, call=ToolCall(name=name, arguments=arguments))
        self._say(episode, text)
        key = CallKey(task_id=episode.key[0], rollout=episode.key[1], step=episode.step)
        result = await self.executor.execute(parse_action(text), episode.book, key)
        episode.step += 1
        episode.errors_in_a_row = episode.errors_in_a_row + 1 if result.error is not None else 0
        placeholder = ""
        if result.image is not None:
            episode.book.add(result.image)
            episode.pictures.append(png_bytes(result.image))
            placeholder = "<image>"
        episode.turns.append({"from": "observation", "value": result.text + placeholder})
        return result

    @staticmethod
    def _say(episode: _Episode, text: str) -> None:
        episode.turns.append({"from": "gpt", "value": text})


def _pastime(failing: str) -> tuple[str, dict[str, str]]:
    """A call to pass the time with, of another tool than the one that fails."""
    return (IMAGE_SEARCH, {"url": "img_1"}) if failing == OCR else (OCR, {"image": "img_1"})
