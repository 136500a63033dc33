"""Streaming reader of MediaWiki XML exports (schema 0.10 and 0.11), plain or compressed."""

from __future__ import annotations

import bz2
import gzip
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast
from xml.etree import ElementTree

from opensearch_lightning.errors import DataError

SUPPORTED_SCHEMAS = ("0.10", "0.11")
_ROOT = re.compile(r"\{http://www\.mediawiki\.org/xml/export-([\d.]+)/\}mediawiki$")


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of an export at its last revision there.

    ``redirect`` is the normalized title that the page redirects to, without a section; ``text`` is raw wikitext, empty
    for a deleted revision.
    """

    title: str
    namespace: int
    id: int
    text: str
    redirect: str | None = None


def normalize_title(title: str) -> str:
    """Canonical form of a title or link target: no section, one space for blanks and underscores, first letter upper.

    A link to a section of its own page (``#History``) gives ``""``.
    """
    bare = html.unescape(title).split("#", 1)[0].replace("_", " ").lstrip(" :")
    bare = " ".join(bare.split())
    return bare[:1].upper() + bare[1:]


def read_pages(path: str | Path) -> Iterator[Page]:
    """Read an export page by page, in file order; memory does not grow with the file.

    Args:
        path: ``*.xml``, ``*.xml.bz2`` or ``*.xml.gz``.

    Raises:
        DataError: the file is missing, is no MediaWiki export of schema 0.10 or 0.11, or is cut or damaged.
    """
    path = Path(path)
    try:
        with _open(path) as stream:
            yield from _pages(stream, path)
    except FileNotFoundError as error:
        raise DataError(f"no dump at {path}: give the path of a pages-articles XML export") from error
    except (ElementTree.ParseError, EOFError, OSError) as error:
        raise DataError(f"{path} is damaged or cut ({error}): download or export it again") from error


def _open(path: Path) -> IO[bytes]:
    match path.suffix:
        case ".bz2":
            return bz2.open(path, "rb")
        case ".gz":
            return cast(IO[bytes], gzip.open(path, "rb"))
        case _:
            return path.open("rb")


def _pages(stream: IO[bytes], path: Path) -> Iterator[Page]:
    events = ElementTree.iterparse(stream, events=("start", "end"))
    root = next(events)[1]
    match = _ROOT.match(root.tag)
    if match is None or match[1] not in SUPPORTED_SCHEMAS:
        raise DataError(
            f"{path} begins with <{root.tag}>: expected a MediaWiki export of schema {' or '.join(SUPPORTED_SCHEMAS)}"
        )
    prefix = root.tag.removesuffix("mediawiki")
    for event, element in events:
        if event == "end" and element.tag == f"{prefix}page":
            yield _page(element, prefix, path)
            root.clear()  # else iterparse keeps every page that it has read


def _page(element: ElementTree.Element, prefix: str, path: Path) -> Page:
    title = element.findtext(f"{prefix}title")
    if not title:
        raise DataError(f"{path} holds a page without a title: it is no usable export")
    redirect = element.find(f"{prefix}redirect")
    revisions = element.findall(f"{prefix}revision")
    text = revisions[-1].findtext(f"{prefix}text") if revisions else None
    return Page(
        title=normalize_title(title),
        namespace=int(element.findtext(f"{prefix}ns") or 0),
        id=int(element.findtext(f"{prefix}id") or 0),
        text=text or "",
        redirect=normalize_title(redirect.get("title", "")) if redirect is not None else None,
    )
