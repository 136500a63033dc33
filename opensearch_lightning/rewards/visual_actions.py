"""The visual actions of a trajectory: what it did to pictures, and to which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from opensearch_lightning.pictures import read_picture
from opensearch_lightning.rewards.calls import called_arguments, called_tool
from opensearch_lightning.types import Step, Task

VISUAL_TOOLS = frozenset({"crop", "sharpen", "super_resolution", "perspective_correct", "layout_parsing"})


@dataclass(frozen=True, kw_only=True)
class VisualAction:
    """One call of a visual tool that was carried out: at which step, and the names of its pictures.

    ``source`` is the picture that was worked on; ``made`` the one that came of it, ``None`` where text did.
    """

    step: int
    tool: str
    source: str
    made: str | None


def visual_actions(steps: Sequence[Step]) -> list[VisualAction]:
    """The visual actions among ``steps``, in order. A call that failed did nothing, and is none."""
    found = []
    for step in steps:
        tool = called_tool(step)
        if tool in VISUAL_TOOLS and step.result is not None and step.error is None:
            source = str(called_arguments(step).get("image", ""))
            found.append(VisualAction(step=step.index, tool=tool, source=source, made=step.image_name))
    return found


def pictures_of(task: Task, steps: Sequence[Step], names: Sequence[str]) -> Mapping[str, Image.Image]:
    """Those of the pictures ``names`` that there are: the task's own, and those that ``steps`` made.

    Raises:
        DataError: a picture of the task cannot be read.
    """
    own = {f"img_{i}": encoded for i, encoded in enumerate(task.images, start=1)}
    made = {step.image_name: step.result.image for step in steps if step.result is not None}
    pictures: dict[str, Image.Image] = {}
    for name in names:
        if name in own:
            pictures[name] = read_picture(own[name])
        elif (image := made.get(name)) is not None:
            pictures[name] = image
    return pictures
