"""The process judge of visual actions, which the paper has none of: were they needed, and was their result used?"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from PIL import Image

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.rewards.chat_judge import ChatJudge
from opensearch_lightning.rewards.chat_model import Content
from opensearch_lightning.rewards.judge_metrics import JudgeMetrics
from opensearch_lightning.rewards.parsing import parse_object
from opensearch_lightning.rewards.prompts import VISUAL_ACTIONS
from opensearch_lightning.rewards.quoting import cut, quoted
from opensearch_lightning.rewards.visual_actions import VisualAction, pictures_of, visual_actions
from opensearch_lightning.tools.threads import in_thread
from opensearch_lightning.types import Step, Task


class ChatVisualActionJudge:
    """Lets a model say of each visual action whether it was needed and whether its result was used.

    An action earns one half for each; the score is the mean over the actions.

    Args:
        chat: asks the model.
        send_images: show the model the pictures before and after each action; it has to be one that sees.
        max_image_pixels: a larger picture is made smaller, to so many pixels about.
        max_images: pictures shown at most, the first of the trajectory.
        max_turn_chars: the rest of a longer turn is not shown to the model.
        max_returned_chars: nor that of a longer result.

    Raises:
        ConfigurationError: a limit below 1.
    """

    def __init__(
        self,
        chat: ChatJudge,
        *,
        send_images: bool = False,
        max_image_pixels: int = 262_144,
        max_images: int = 16,
        max_turn_chars: int = 2_000,
        max_returned_chars: int = 500,
    ) -> None:
        limits = {
            "max_image_pixels": max_image_pixels,
            "max_images": max_images,
            "max_turn_chars": max_turn_chars,
            "max_returned_chars": max_returned_chars,
        }
        for limit, value in limits.items():
            if value < 1:
                raise ConfigurationError(f"{limit} is {value}: set 1 or more.")
        self.chat = chat
        self.name = chat.named(VISUAL_ACTIONS)
        self._send_images = send_images
        self._max_image_pixels = max_image_pixels
        self._max_images = max_images
        self._max_turn_chars = max_turn_chars
        self._max_returned_chars = max_returned_chars

    async def score(self, task: Task, steps: Sequence[Step]) -> float:
        """Score of ``steps`` in [0, 1]; 0 without a visual action, for which no model is asked.

        Raises:
            JudgeError: the model could not be reached or read.
            JudgeUnavailable: and that too often.
        """
        actions = visual_actions(steps)
        if not actions:
            return 0.0
        record = self._record(task, steps, actions)
        content: Content = record
        if self._send_images:
            content = await in_thread(partial(self._with_images, record, task, steps, actions))
        return await self.chat.ask(VISUAL_ACTIONS, content, partial(_read, len(actions)))

    def drain(self) -> JudgeMetrics:
        """What was done and spent since this was last called."""
        return self.chat.drain()

    async def aclose(self) -> None:
        """Close connections and the cache's file; a later call opens them again."""
        await self.chat.aclose()

    def _record(self, task: Task, steps: Sequence[Step], actions: Sequence[VisualAction]) -> str:
        numbers = {action.step: number for number, action in enumerate(actions, start=1)}
        return quoted(
            {
                "question": task.question,
                "pictures": len(task.images),
                "steps": [self._shown(step, numbers.get(step.index)) for step in steps],
            }
        )

    def _shown(self, step: Step, number: int | None) -> dict[str, Any]:
        shown: dict[str, Any] = {} if number is None else {"action": number}
        shown["turn"] = cut(step.text, self._max_turn_chars)
        if step.result is not None:
            shown["returned"] = cut(step.result.text, self._max_returned_chars)
        return shown

    def _with_images(
        self, record: str, task: Task, steps: Sequence[Step], actions: Sequence[VisualAction]
    ) -> list[Mapping[str, Any]]:
        names = dict.fromkeys(name for action in actions for name in (action.source, action.made) if name)
        pictures = pictures_of(task, steps, list(names)[: self._max_images])
        parts: list[Mapping[str, Any]] = [{"type": "text", "text": record}]
        for name, picture in pictures.items():
            url = _data_url(picture, self._max_image_pixels)
            parts += [{"type": "text", "text": f"{name}:"}, {"type": "image_url", "image_url": {"url": url}}]
        return parts


def _read(count: int, text: str) -> float | None:
    """Mean over the actions; ``None`` unless each of them, in order, has both its answers."""
    actions = (parse_object(text) or {}).get("actions")
    if not isinstance(actions, list) or not all(isinstance(action, dict) for action in actions):
        return None
    if [action.get("action") for action in actions] != list(range(1, count + 1)):
        return None
    answers = [action.get(name) for action in actions for name in ("needed", "used")]
    return sum(answers) / len(answers) if all(isinstance(answer, bool) for answer in answers) else None


def _data_url(picture: Image.Image, max_pixels: int) -> str:
    pixels = picture.width * picture.height
    if pixels > max_pixels:
        scale = math.sqrt(max_pixels / pixels)
        picture = picture.resize((max(1, int(picture.width * scale)), max(1, int(picture.height * scale))))
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, format="JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
