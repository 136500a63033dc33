"""Tools of MCP servers (Model Context Protocol), as tools of the policy."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opensearch_lightning.errors import ConfigurationError, DataError, ToolError, one_line
from opensearch_lightning.pictures import png_bytes, read_picture
from opensearch_lightning.tools.base_url import base_url
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.mcp_session import ALL, Endpoint, McpServer, SessionError, list_once, shortened
from opensearch_lightning.tools.protocol import ToolOutput
from opensearch_lightning.tools.schemas import IMAGE_ID
from opensearch_lightning.tools.secrets import MissingKeyError, Secret
from opensearch_lightning.tools.threads import in_thread
from opensearch_lightning.types import ErrorKind

if TYPE_CHECKING:
    from mcp.types import CallToolResult
    from mcp.types import Tool as Listed
    from PIL.Image import Image

IMAGE_FORMS = ("base64", "data_url")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class McpTool:
    """One tool of an MCP server; made by :func:`mcp_tools`.

    Its schema is the server's, where parameters that take an image ask for the name of one. Text contents and texts of
    embedded resources are joined; a picture becomes the result's image; structured content is given as JSON where there
    is no text. What cannot be given is said in the note.
    """

    def __init__(
        self,
        server: McpServer,
        listed: Listed,
        *,
        name: str,
        backend: str,
        image_forms: Mapping[str, str],
        max_chars: int,
    ) -> None:
        self.name = name
        self.backend = backend
        function = {
            "name": name,
            "description": listed.description or listed.title or "",
            "parameters": _parameters(listed, image_forms),
        }
        self.schema: Mapping[str, Any] = {"type": "function", "function": server.endpoint.redact(function)}
        self._server = server
        self._remote_name = listed.name
        self._image_forms = image_forms
        self._max_chars = max_chars

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Have the server carry out one call.

        Raises:
            ToolError: ``backend_error`` with the server's own words where it says that the call failed;
                ``unreachable`` where the connection was lost; further kinds as :meth:`McpServer.call` has them.
        """
        sent = dict(arguments)
        for name, form in self._image_forms.items():
            if name in sent:
                sent[name] = await in_thread(partial(_encoded, images.get(sent[name]), form))
        result = await self._server.call(self._remote_name, sent, shown=self.name)
        return await in_thread(partial(self._output, result))

    def probes(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """One try of the server, by the name of its backend: connects, lists the tools, and looks for this one.

        Each raises :class:`~opensearch_lightning.errors.ToolError` where that fails, and leaves nothing open.
        """
        return {self.backend: partial(self._server.probe, [self._remote_name])}

    async def aclose(self) -> None:
        """Close the connection that all tools of the server share; a later call opens a new one."""
        await self._server.aclose()

    def _output(self, result: CallToolResult) -> ToolOutput:
        texts, pictures, left_out = _sorted(result)
        text = self._server.redact("\n".join(texts))
        if result.is_error:
            raise ToolError(ErrorKind.BACKEND_ERROR, shortened(text) or f"The tool {self.name} failed.")
        if not text and result.structured_content is not None:
            text = self._server.redact(json.dumps(result.structured_content, ensure_ascii=False))
        notes = []
        if len(text) > self._max_chars:
            notes.append(f"Only the first {self._max_chars} of {len(text)} characters are shown.")
            text = text[: self._max_chars]
        image = None
        if pictures:
            image = _decoded(pictures[0])
            if image is None and not text:
                raise ToolError(ErrorKind.BACKEND_ERROR, f"The tool {self.name} returned a picture that is none.")
            if image is None:
                notes.append("The picture of the result cannot be read.")
            if len(pictures) > 1:
                notes.append(f"Only the first of {len(pictures)} pictures is given.")
        if left_out:
            notes.append(f"Left out, since only text and pictures can be given: {', '.join(left_out)}.")
        if not (text or image or left_out):
            text = "The tool returned nothing."
        return ToolOutput(text=text, image=image, note=" ".join(notes) or None)


def mcp_tools(
    *,
    command: Sequence[str] | None = None,
    url: str | None = None,
    names: Sequence[str] | None = None,
    prefix: str = "",
    backend: str | None = None,
    env_names: Sequence[str] | str = (),
    token_env: str | None = None,
    image_arguments: Mapping[str, Mapping[str, str]] | None = None,
    timeout_s: float = 30.0,
    max_chars: int = 20_000,
    stderr_path: str | None = None,
) -> list[McpTool]:
    """The tools of one MCP server, which is asked for them now; blocks until it has answered.

    The session that serves calls is another one: it is opened at the first call, shared by the tools of this server,
    and opened anew at the call after one that met a lost connection.

    Args:
        command: program and arguments of a server that speaks over its standard streams. It gets ``PATH``, ``HOME``
            and the like, and nothing else of the environment but ``env_names``.
        url: address of a server that speaks streamable HTTP; redirects are followed within its origin only.
        names: which tools, by the server's names, in this order; all by default.
        prefix: put before each name, against clashes with other tools.
        backend: name for policies and metrics; by default the name that the server gives itself.
        env_names: environment variables that the command gets besides, or ``all``.
        token_env: environment variable with a key that is sent to ``url`` as a bearer token.
        image_arguments: by tool (the server's name) the string parameters that take a picture, each with the form in
            which the server takes it, ``base64`` or ``data_url``, of a PNG file. The policy gives the name of an image.
        timeout_s: seconds for start and listing; a call is limited by the executor.
        max_chars: most characters of a result's text.
        stderr_path: file that gets what the command writes on its error stream; dropped by default.

    Raises:
        ConfigurationError: neither or both of ``command`` and ``url``, a server that does not start, a name or a
            parameter that it does not have, a schema that is none, or a value out of range.
        MissingKeyError: an environment variable is not set.
    """
    endpoint = _endpoint(command, url, env_names, token_env, timeout_s, stderr_path)
    if max_chars < 1:
        raise ConfigurationError(f"max_chars is {max_chars}: set 1 or more.")
    with ThreadPoolExecutor(1) as pool:  # the caller's loop may be running
        server_name, listed = pool.submit(_listing, endpoint).result()
    chosen = _chosen(listed, names, endpoint.where)
    forms = _image_forms(chosen, image_arguments or {}, endpoint.where)
    server = McpServer(endpoint)
    backend = (
        backend
        or endpoint.redact(server_name)
        or (Path(endpoint.command[-1]).stem if endpoint.command else endpoint.url)
    )
    return [
        McpTool(
            server,
            tool,
            name=prefix + tool.name,
            backend=backend,
            image_forms=forms.get(tool.name, {}),
            max_chars=max_chars,
        )
        for tool in chosen
    ]


def _endpoint(
    command: Sequence[str] | None,
    url: str | None,
    env_names: Sequence[str] | str,
    token_env: str | None,
    timeout_s: float,
    stderr_path: str | None,
) -> Endpoint:
    if bool(command) == bool(url):
        raise ConfigurationError(
            f"An MCP server has a command or a url, not {'both' if url else 'neither'}: set "
            "command=[program, argument] to start it, or url=http://… where it runs."
        )
    if not timeout_s > 0:
        raise ConfigurationError(f"timeout_s of an MCP server is {timeout_s}: set seconds above 0.")
    token = None
    if command:
        if isinstance(command, str) or not all(isinstance(part, str) for part in command):
            raise ConfigurationError(f"The command of an MCP server is {command!r}: set a list of texts.")
        if token_env is not None:
            raise ConfigurationError("token_env is for a url: name the variable in env_names for a command.")
        _check_variables(env_names)
    else:
        base_url("an MCP server", str(url))
        if env_names or stderr_path is not None:
            raise ConfigurationError("env_names and stderr_path are for a command: leave them out for a url.")
        token = Secret.from_environment(token_env) if token_env is not None else None
    return Endpoint(
        command=tuple(command or ()),
        url=url or "",
        env_names=env_names if isinstance(env_names, str) else tuple(env_names),
        token=token,
        timeout_s=timeout_s,
        stderr_path=stderr_path,
    )


def _check_variables(env_names: Sequence[str] | str) -> None:
    if env_names == ALL:
        return
    if isinstance(env_names, str):
        raise ConfigurationError(f"env_names of an MCP server must be a list of names, or {ALL!r}.")
    for name in env_names:
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            # not repeated, for it may be a key
            raise ConfigurationError("env_names of an MCP server are names of environment variables, such as API_KEY.")
        if name not in os.environ:
            raise MissingKeyError(f"The environment variable {name} of env_names is not set: export {name}=…")


def _listing(endpoint: Endpoint) -> tuple[str | None, list[Listed]]:
    """Name and tools of a server, from a session of their own."""
    try:
        import mcp  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigurationError("MCP servers need the package mcp: pip install '.[mcp]'.") from error
    with tempfile.TemporaryDirectory() as folder:
        log = Path(endpoint.stderr_path or Path(folder, "stderr"))
        try:
            return asyncio.run(list_once(replace(endpoint, stderr_path=str(log) if endpoint.command else None)))
        except SessionError as error:
            if not endpoint.command:
                remedy = "look whether it runs and whether the path is right, which often is /mcp"
            else:
                last = endpoint.redact(_last_line(log))
                said = f" Its last words: {last}" if last else ""
                remedy = f"try the command in a shell, and name in env_names the variables that it needs.{said}"
            what = "could not be started" if endpoint.command else "could not be reached"
            message = f"The MCP server {endpoint.where} {what}: {str(error).rstrip('.')}; {remedy}"
            raise ConfigurationError(message if message.endswith(".") else f"{message}.") from error


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    said = [line for line in lines if line.strip()]
    return shortened(said[-1]) if said else ""


def _chosen(listed: Sequence[Listed], names: Sequence[str] | None, where: str) -> list[Listed]:
    by_name = {tool.name: tool for tool in listed}
    if len(by_name) < len(listed):
        raise ConfigurationError(f"The MCP server {where} lists a name twice in {[tool.name for tool in listed]}.")
    if not listed:
        raise ConfigurationError(f"The MCP server {where} offers no tools: mend it, or leave it out.")
    if names is None:
        return list(listed)
    if unknown := sorted(set(names) - by_name.keys()):
        raise ConfigurationError(f"The MCP server {where} has no tools {unknown}: choose from {sorted(by_name)}.")
    if not names or len(set(names)) < len(names):
        raise ConfigurationError(f"names of the MCP server {where} is {list(names)}: name at least one, each once.")
    return [by_name[name] for name in names]


def _image_forms(
    chosen: Sequence[Listed], forms: Mapping[str, Mapping[str, str]], where: str
) -> Mapping[str, Mapping[str, str]]:
    by_name = {tool.name: tool for tool in chosen}
    for name, parameters in forms.items():
        if name not in by_name:
            raise ConfigurationError(f"image_arguments names {name!r}: choose from {sorted(by_name)} of {where}.")
        rules = by_name[name].input_schema.get("properties") or {}
        for parameter, form in parameters.items():
            if parameter not in rules:
                raise ConfigurationError(f"{name} has no parameter {parameter!r}: choose from {sorted(rules)}.")
            if form not in IMAGE_FORMS:
                raise ConfigurationError(f"image_arguments.{name}.{parameter} is {form!r}: choose {IMAGE_FORMS}.")
            kind = rules[parameter].get("type", "string") if isinstance(rules[parameter], Mapping) else "string"
            if kind != "string" and "string" not in kind:
                raise ConfigurationError(f"{parameter} of {name} is of type {kind}: only a string can take an image.")
    return forms


def _parameters(listed: Listed, image_forms: Mapping[str, str]) -> dict[str, Any]:
    """The server's schema of arguments, with ``properties`` that are there and are mappings."""
    schema: dict[str, Any] = dict(listed.input_schema)
    _check_schema(listed.name, schema)
    schema["type"] = "object"
    schema["properties"] = {
        name: rule if isinstance(rule, Mapping) else ({} if rule else {"not": {}})
        for name, rule in (schema.get("properties") or {}).items()
    }
    for name in image_forms:
        schema["properties"][name] = {
            "type": "string",
            "format": IMAGE_ID,
            "description": "image id, such as img_1",
        }
    return schema


def _check_schema(name: str, schema: Mapping[str, Any]) -> None:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise ConfigurationError(
            f"The schema of the MCP tool {name} is no JSON Schema ({one_line(error.message)[:200]}): choose others by "
            "names, or mend the server."
        ) from error


def _encoded(image: Image, form: str) -> str:
    encoded = base64.b64encode(png_bytes(image)).decode("ascii")
    return f"data:image/png;base64,{encoded}" if form == "data_url" else encoded


def _sorted(result: CallToolResult) -> tuple[list[str], list[str], list[str]]:
    """``(texts, pictures, left_out)`` of a result: pictures in base64, and words for what is neither."""
    texts: list[str] = []
    pictures: list[str] = []
    left_out: list[str] = []
    for content in result.content:
        match content.type:
            case "text":
                texts.append(content.text)
            case "image":
                pictures.append(content.data)
            case "resource_link":
                texts.append(f"{content.title or content.name}: {content.uri}")
            case "resource":
                resource = content.resource
                if (text := getattr(resource, "text", None)) is not None:
                    texts.append(text)
                elif (resource.mime_type or "").startswith("image/"):
                    pictures.append(resource.blob)
                else:
                    left_out.append(f"a file of type {shortened(resource.mime_type or 'unknown')}")
            case other:
                left_out.append(shortened(str(other)))
    return [text for text in texts if text], pictures, left_out


def _decoded(encoded: str) -> Image | None:
    try:
        return read_picture(base64.b64decode(encoded, validate=True))
    except (ValueError, DataError):
        return None
