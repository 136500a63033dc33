"""The seven tools, their local backends, and the executor that runs them; those on services are in ``online``."""

from opensearch_lightning.tools.backends import BackendPolicy
from opensearch_lightning.tools.cache import ResultCache
from opensearch_lightning.tools.clip_index import ClipEncoder, ClipIndex
from opensearch_lightning.tools.edsr import EDSR
from opensearch_lightning.tools.executor import ToolExecutor
from opensearch_lightning.tools.faults import FaultInjector, Outage
from opensearch_lightning.tools.image_index import ImageHit, ImageIndex
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.layout import Block, Layout, LayoutSource
from opensearch_lightning.tools.local import (
    index_image_search,
    local_image_search,
    local_layout_parsing,
    local_text_search,
    offline_tools,
)
from opensearch_lightning.tools.local_tool import LocalTool
from opensearch_lightning.tools.mcp import McpTool, mcp_tools
from opensearch_lightning.tools.metrics import NO_TOOL, ExecutorMetrics, ToolMetrics
from opensearch_lightning.tools.ocr import LayoutReader
from opensearch_lightning.tools.picture_calls import (
    crop_tool,
    perspective_correct_tool,
    sharpen_tool,
    super_resolution_tool,
)
from opensearch_lightning.tools.protocol import CallKey, ClosableTool, LimitedTool, Probe, ProbedTool, Tool, ToolOutput
from opensearch_lightning.tools.recording import Recorder, Replay
from opensearch_lightning.tools.region_layout import RegionLayoutReader
from opensearch_lightning.tools.secrets import MissingKeyError, Secret
from opensearch_lightning.tools.summary import ExtractiveSummarizer
from opensearch_lightning.tools.text_index import Document, TextHit, TextIndex
from opensearch_lightning.tools.threads import in_thread

__all__ = [
    "EDSR",
    "NO_TOOL",
    "BackendPolicy",
    "Block",
    "CallKey",
    "ClipEncoder",
    "ClipIndex",
    "ClosableTool",
    "Document",
    "ExecutorMetrics",
    "ExtractiveSummarizer",
    "FaultInjector",
    "ImageBook",
    "ImageHit",
    "ImageIndex",
    "Layout",
    "LayoutReader",
    "LayoutSource",
    "LimitedTool",
    "LocalTool",
    "McpTool",
    "MissingKeyError",
    "Outage",
    "Probe",
    "ProbedTool",
    "Recorder",
    "RegionLayoutReader",
    "Replay",
    "ResultCache",
    "Secret",
    "TextHit",
    "TextIndex",
    "Tool",
    "ToolExecutor",
    "ToolMetrics",
    "ToolOutput",
    "crop_tool",
    "in_thread",
    "index_image_search",
    "local_image_search",
    "local_layout_parsing",
    "local_text_search",
    "mcp_tools",
    "offline_tools",
    "perspective_correct_tool",
    "sharpen_tool",
    "super_resolution_tool",
]
