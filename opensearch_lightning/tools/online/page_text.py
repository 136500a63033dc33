"""The text of a downloaded page."""

from __future__ import annotations

import codecs
import html
import re

from opensearch_lightning.errors import ToolError
from opensearch_lightning.tools.download import Download
from opensearch_lightning.tools.online.web_protocol import WebPage
from opensearch_lightning.types import ErrorKind

_HTML = frozenset({"text/html", "application/xhtml+xml"})
_PLAIN = frozenset({"text/plain", "text/markdown", "application/json"})
_TITLE = re.compile(r"<title[^>]{0,300}>([^<]{0,1000})", re.IGNORECASE)
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_META_CHARSET = re.compile(rb"<meta[^>]{0,300}?charset\s{0,9}=\s{0,9}[\"']?\s{0,9}([\w:.-]{2,40})", re.IGNORECASE)
# The charsets of the web: Python knows others, some of which are no charsets and some of which are slow.
_CHARSETS = re.compile(
    r"ascii|utf-8|iso8859-\d+|cp\d+|koi8-[ru]|mac-(roman|cyrillic)|tis-620"
    r"|gb2312|gbk|gb18030|big5(hkscs)?|euc_(jp|kr)|shift_jis|iso2022_jp"
)
# Browsers read these as their supersets, and pages are written for browsers.
_SUPERSETS = {"ascii": "cp1252", "iso8859-1": "cp1252", "gb2312": "gb18030", "gbk": "gb18030"}


def page_text(page: Download, *, max_html_chars: int) -> WebPage:
    """Title and text of HTML (by trafilatura); plain text, Markdown and JSON as they are. Blocks.

    Args:
        page: what was downloaded.
        max_html_chars: the rest of longer HTML is not parsed.

    Raises:
        ToolError: ``backend_error`` for a page of another kind, without text, or beyond the parser.
    """
    kind = page.content_type
    if kind in _HTML:
        source = _decoded(page, stated_inside=True)[:max_html_chars]
        title = _TITLE.search(source)
        found = WebPage(title=html.unescape(title[1]).strip() if title else "", text=_extracted(source))
    elif kind in _PLAIN or (kind.startswith("application/") and kind.endswith("+json")):
        found = WebPage(title="", text=_decoded(page, stated_inside=False))
    else:
        raise ToolError(ErrorKind.BACKEND_ERROR, f"The page is of the kind {kind[:40]!r}, which is not read.")
    if not found.text.strip():
        raise ToolError(ErrorKind.BACKEND_ERROR, "The page holds no text.")
    return found


def _extracted(source: str) -> str:
    import trafilatura

    try:
        document = trafilatura.bare_extraction(source, include_comments=False)
    except Exception as error:
        # The parsers raise what they will on broken pages, RecursionError among it.
        message = f"The page could not be turned into text ({type(error).__name__})."
        raise ToolError(ErrorKind.BACKEND_ERROR, message) from None
    return (document.text if document is not None else "") or ""


def _decoded(page: Download, *, stated_inside: bool) -> str:
    """By the byte order mark, what the server says, what the page says, as UTF-8, or as Windows-1252."""
    for mark, encoding in _BOMS:
        if page.body.startswith(mark):
            return page.body.decode(encoding, "replace")
    stated = [page.charset or ""]
    if stated_inside and (meta := _META_CHARSET.search(page.body[:4096])):
        stated.append(meta[1].decode("ascii", "replace"))
    for name in stated:
        if (known := _known(name)) is not None:
            return page.body.decode(known, "replace")
    try:
        return page.body.decode()
    except UnicodeDecodeError:
        return page.body.decode("cp1252", "replace")


def _known(charset: str) -> str | None:
    """Python's name of a charset of the web, ``None`` for anything else."""
    try:
        name = codecs.lookup(charset.strip("\"' ")).name
    except (LookupError, ValueError):
        return None
    return _SUPERSETS.get(name, name) if _CHARSETS.fullmatch(name) else None
