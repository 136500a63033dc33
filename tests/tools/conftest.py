"""Fixtures of the tests of tools."""

import pytest

from opensearch_lightning.tools import ToolExecutor


@pytest.fixture
async def make():
    """Makes executors of the tools given, and closes them."""
    made = []

    def build(*tools, **options):
        made.append(ToolExecutor(tools, **options))
        return made[-1]

    yield build
    for executor in made:
        await executor.aclose()
