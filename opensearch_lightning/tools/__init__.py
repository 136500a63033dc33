"""The seven tools, their local backends, and the executor that runs them."""

from opensearch_lightning.tools.backends import BackendPolicy
from opensearch_lightning.tools.cache import ResultCache
from opensearch_lightning.tools.executor import ToolExecutor
from opensearch_lightning.tools.faults import FaultInjector, Outage
from opensearch_lightning.tools.image_index import ImageHit, ImageIndex
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.local import LocalTool, offline_tools
from opensearch_lightning.tools.mcp import McpTool, mcp_tools
from opensearch_lightning.tools.metrics import NO_TOOL, ExecutorMetrics, ToolMetrics
from opensearch_lightning.tools.ocr import LayoutReader
from opensearch_lightning.tools.protocol import CallKey, ClosableTool, LimitedTool, Probe, ProbedTool, Tool, ToolOutput
from opensearch_lightning.tools.recording import Recorder, Replay
from opensearch_lightning.tools.summary import ExtractiveSummarizer
from opensearch_lightning.tools.text_index import Document, TextHit, TextIndex
from opensearch_lightning.tools.threads import in_thread

__all__ = [
    "NO_TOOL",
    "BackendPolicy",
    "CallKey",
    "ClosableTool",
    "Document",
    "ExecutorMetrics",
    "ExtractiveSummarizer",
    "FaultInjector",
    "ImageBook",
    "ImageHit",
    "ImageIndex",
    "LayoutReader",
    "LimitedTool",
    "LocalTool",
    "McpTool",
    "Outage",
    "Probe",
    "ProbedTool",
    "Recorder",
    "Replay",
    "ResultCache",
    "TextHit",
    "TextIndex",
    "Tool",
    "ToolExecutor",
    "ToolMetrics",
    "ToolOutput",
    "in_thread",
    "mcp_tools",
    "offline_tools",
]
