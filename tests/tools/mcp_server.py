"""An MCP server for the tests: over its standard streams, or with a port as argument over HTTP."""

import base64
import io
import json
import os
import sys
import time
from pathlib import Path

import anyio
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from PIL import Image as Pictures
from pydantic import BaseModel

server = MCPServer("Test server", log_level="ERROR")


class Filters(BaseModel):
    tags: list[str]
    year: int | None = None
    part_of: "Filters | None" = None


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Pictures.new("RGB", (width, height), "blue").save(buffer, format="PNG")
    return buffer.getvalue()


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def find(filters: Filters, sizes: list[int] | None = None) -> str:
    """Say what was asked."""
    return json.dumps({"filters": filters.model_dump(), "sizes": sizes})


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ToolError(text)


@server.tool()
def picture() -> list:
    """Two pictures."""
    return [Image(data=png(30, 20), format="png"), "A blue field.", Image(data=png(3, 2), format="png")]


@server.tool()
def size(photo: str, other: str = "") -> str:
    """Size of a picture."""
    sizes = [Pictures.open(io.BytesIO(base64.b64decode(text.split(",")[-1]))).size for text in (photo, other) if text]
    return f"{sizes} {other[:22]}"


@server.tool()
async def slow(seconds: float) -> str:
    """Wait."""
    await anyio.sleep(seconds)
    return "waited"


@server.tool()
async def hang(seconds: float) -> str:
    """Answer nobody for a while."""
    time.sleep(seconds)  # noqa: ASYNC251 - what a careless server does
    return "hung"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def pid() -> str:
    """Which process this is."""
    return str(os.getpid())


@server.tool()
def variable(name: str) -> str:
    """What the environment holds."""
    return os.environ.get(name, "nothing")


@server.tool()
def contents(kind: str) -> CallToolResult:
    """Contents of all kinds."""
    data = base64.b64encode(png(4, 4)).decode()
    made = {
        "resources": [
            EmbeddedResource(resource=TextResourceContents(uri="file:///a.txt", text="Text of a file.")),
            EmbeddedResource(resource=BlobResourceContents(uri="file:///a.png", mime_type="image/png", blob=data)),
            EmbeddedResource(resource=BlobResourceContents(uri="file:///a.zip", mime_type="x/zip", blob=data)),
            ResourceLink(name="page", uri="http://velmora.test/"),
        ],
        "audio": [AudioContent(data=data, mime_type="audio/wav")],
        "no picture": [ImageContent(data="AAAA", mime_type="image/png")],
        "text and no picture": [
            TextContent(text="Here."),
            ImageContent(data=base64.b64encode(b"x" * 50).decode(), mime_type="image/png"),
        ],
        "no base64": [ImageContent(data="é!", mime_type="image/png")],
        "long": [TextContent(text="x" * 30_000)],
    }
    structured = {"emblem": "höhle"} if kind == "structured" else None
    return CallToolResult(content=made.get(kind, []), structured_content=structured)


class Gate:
    """Asks for the key, and refuses calls where a file says with which status."""

    def __init__(self, app) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        status = self.status(scope)
        if status is None:
            await self.app(scope, receive, send)
            return
        headers = [(b"retry-after", b"7"), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def status(self, scope) -> int | None:
        if scope["type"] != "http":
            return None
        key = os.environ.get("MCP_TEST_KEY")
        if key and dict(scope["headers"]).get(b"authorization") != f"Bearer {key}".encode():
            return 401
        refusal = Path(os.environ["MCP_TEST_REFUSAL"])
        return int(refusal.read_text()) if refusal.exists() else None


if __name__ == "__main__":
    if sys.argv[1:]:
        import uvicorn

        uvicorn.run(Gate(server.streamable_http_app()), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
    else:
        server.run()
