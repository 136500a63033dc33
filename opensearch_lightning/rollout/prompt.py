"""The first turn that the policy sees of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from opensearch_lightning.chat import ChatRenderer, Rendered
from opensearch_lightning.errors import DataError, RenderError
from opensearch_lightning.pictures import read_picture

if TYPE_CHECKING:
    from PIL.Image import Image

    from opensearch_lightning.tools import ToolExecutor
    from opensearch_lightning.types import Task


class Prompt:
    """Makes the prompt of a task: system turn, tool schemas, pictures, question.

    Args:
        renderer: of the engine.
        executor: whose tools' schemas stand in the system turn.
        system_prompt: text of the system turn.
        render_tools: put the schemas there, as the chat template does.
        tell_image_sizes: begin the question with name and size in pixels of each image.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        executor: ToolExecutor,
        *,
        system_prompt: str,
        render_tools: bool = True,
        tell_image_sizes: bool = False,
    ) -> None:
        self.renderer = renderer.with_tools(executor.schemas) if render_tools else renderer
        self.system_prompt = system_prompt
        self.tell_image_sizes = tell_image_sizes

    def render(self, task: Task, pictures: Sequence[Image]) -> Rendered:
        """Tokens and images of the prompt.

        Raises:
            DataError: the task cannot be shown to the policy.
        """
        sizes = [f"img_{i}: {picture.width}x{picture.height} pixels." for i, picture in enumerate(pictures, start=1)]
        question = "\n".join([*sizes, task.question]) if self.tell_image_sizes else task.question
        try:
            return self.renderer.prompt(self.system_prompt, [*pictures, question])
        except RenderError as error:
            raise DataError(f"task {task.id} cannot be shown to the policy: {error}") from error


class PromptTokens:
    """Counts the tokens of a task's prompt, for a DataModule that refuses those that are too long.

    Args:
        processor: of the policy, or a :class:`~opensearch_lightning.chat.ChatRenderer` made of it.
        executor: as the rollouts' own.
        settings: ``system_prompt``, ``render_tools``, ``tell_image_sizes``, as the rollouts' own.
    """

    def __init__(self, processor: Any, executor: ToolExecutor, **settings: Any) -> None:
        renderer = processor if isinstance(processor, ChatRenderer) else ChatRenderer(processor)
        self._prompt = Prompt(renderer, executor, **settings)

    def __call__(self, task: Task) -> int:
        """Tokens, image tokens counted.

        Raises:
            DataError: the task cannot be shown to the policy.
        """
        return len(self._prompt.render(task, [read_picture(image) for image in task.images]).token_ids)
