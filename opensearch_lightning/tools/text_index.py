"""A local full-text index (tantivy, BM25): what stands in for a web search engine and its page reader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from opensearch_lightning.errors import DataError
from opensearch_lightning.tools.analysis import query_words, words

if TYPE_CHECKING:
    import tantivy

_TITLE_BOOST = 2.0
_WRITER_HEAP_BYTES = 64_000_000


@dataclass(frozen=True, kw_only=True)
class Document:
    """One page to index. ``text`` is plain text; ``id`` is the caller's own and comes back with a hit."""

    id: str
    title: str
    url: str
    text: str


@dataclass(frozen=True, kw_only=True)
class TextHit:
    """One page found. ``score`` is BM25 (higher is better, comparable within one query only)."""

    id: str
    title: str
    url: str
    text: str
    score: float


def _schema() -> Any:
    from tantivy import SchemaBuilder

    builder = SchemaBuilder()
    builder.add_bytes_field("page", stored=True, indexed=False)
    # Words are made by tools.analysis, for index, query and summary alike; tantivy only cuts them at the spaces.
    for searched in ("title_words", "text_words"):
        builder.add_text_field(searched, stored=False, tokenizer_name="whitespace", index_option="freq")
    return builder.build()


def _write(directory: Path, documents: Iterable[Document]) -> None:
    from tantivy import Document as Row
    from tantivy import Index

    # One thread makes one segment, hence the same order of equal scores in every build.
    writer = Index(_schema(), path=str(directory)).writer(_WRITER_HEAP_BYTES, 1)
    try:
        for document in documents:
            row = Row()
            row.add_bytes("page", json.dumps(asdict(document), ensure_ascii=False).encode())
            row.add_text("title_words", " ".join(words(document.title)))
            row.add_text("text_words", " ".join(words(document.text)))
            writer.add_document(row)
        writer.commit()
    finally:
        # Ends the writer's threads, which would go on writing into a directory that is about to be removed.
        writer.wait_merging_threads()


class TextIndex:
    """Search over pages kept in one directory.

    Safe to share by threads. Example::

        TextIndex.build(path, [Document(id="1", title="Lyon", url="wiki/Lyon", text="Lyon is a city.")])
        TextIndex.open(path).search("city", top_k=5)
    """

    def __init__(self, index: tantivy.Index) -> None:
        self._index = index
        self._schema = index.schema

    @classmethod
    def build(cls, path: str | Path, documents: Iterable[Document]) -> TextIndex:
        """Write a new index to the directory ``path`` (moved there when complete) and open it.

        Raises:
            DataError: ``path`` already exists.
        """
        target = Path(path)
        if target.exists():
            raise DataError(f"Text index {target} already exists: remove it or choose another path.")
        partial = target.with_name(f".{target.name}.{uuid4().hex}")
        partial.mkdir(parents=True)
        try:
            _write(partial, documents)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return cls.open(target)

    @classmethod
    def open(cls, path: str | Path) -> TextIndex:
        """Open an index that :meth:`build` wrote.

        Raises:
            DataError: nothing usable is there.
        """
        from tantivy import Index

        try:
            index = Index.open(str(path))
        except (ValueError, OSError) as error:
            raise DataError(f"No text index at {path} ({error}): build one with TextIndex.build.") from error
        index.reload()
        return cls(index)

    def __len__(self) -> int:
        """Number of pages."""
        return int(self._index.searcher().num_docs)

    def search(self, query: str, top_k: int = 5) -> list[TextHit]:
        """The ``top_k`` best pages, best first; words of the title count double. No query syntax: every word is
        text. Empty when no word of the query occurs anywhere.
        """
        from tantivy import Occur, Query

        clauses: list[tuple[Any, Any]] = []
        for word in query_words(query):
            title = Query.term_query(self._schema, "title_words", word, "freq")
            clauses.append((Occur.Should, Query.boost_query(title, _TITLE_BOOST)))
            clauses.append((Occur.Should, Query.term_query(self._schema, "text_words", word, "freq")))
        if not clauses:
            return []
        searcher = self._index.searcher()
        found = searcher.search(Query.boolean_query(clauses), top_k, count=False).hits
        return [self._hit(searcher.doc(address), score) for score, address in found]

    @staticmethod
    def _hit(row: Any, score: float) -> TextHit:
        return TextHit(**json.loads(bytes(row.get_first("page"))), score=float(score))
