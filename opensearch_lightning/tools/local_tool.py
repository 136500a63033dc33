"""Tools made of blocking functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.protocol import ToolOutput
from opensearch_lightning.tools.threads import in_thread


@dataclass(frozen=True, kw_only=True)
class LocalTool:
    """A tool made of a blocking function, which runs in a thread.

    ``function(arguments, images)`` gets checked arguments and may raise
    :class:`~opensearch_lightning.errors.ToolError`; at most ``backend_limit`` calls of one backend have their turn at
    once (the thread of one that timed out may still go on). ``variant`` is what results depend on besides the schema.
    """

    name: str
    backend: str
    schema: Mapping[str, Any]
    function: Callable[[Mapping[str, Any], ImageBook], ToolOutput]
    backend_limit: int
    variant: str = ""

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Carry out one call in a thread."""
        return await in_thread(partial(self.function, arguments, images))


def worker_count(workers: int | None) -> int:
    """``workers``, by default one a core.

    Raises:
        ConfigurationError: below 1.
    """
    if workers is not None and workers < 1:
        raise ConfigurationError(f"workers is {workers}: set 1 or more, or None for one a core.")
    return workers or os.cpu_count() or 1
