"""Tables without a model of their structure: rows and columns by where the lines of text stand."""

from __future__ import annotations

import html
from collections.abc import Sequence

from opensearch_lightning.tools.text_lines import Line, same_row


def html_table(lines: Sequence[Line]) -> str:
    """The lines of one table as HTML.

    Lines side by side make a row, and white bands part the columns. What goes over several lines makes several rows,
    and columns that a cell spans become one.
    """
    rows = _rows(lines)
    columns = _columns(lines)
    return "<table>" + "".join(f"<tr>{_cells(row, columns)}</tr>" for row in rows) + "</table>"


def _rows(lines: Sequence[Line]) -> list[list[Line]]:
    rows: list[list[Line]] = []
    for line in sorted(lines, key=lambda line: (line.top + line.bottom, line.left)):
        if rows and same_row(rows[-1][0], line):
            rows[-1].append(line)
        else:
            rows.append([line])
    return [sorted(row, key=lambda line: line.left) for row in rows]


def _columns(lines: Sequence[Line]) -> list[tuple[float, float]]:
    columns: list[tuple[float, float]] = []
    for line in sorted(lines, key=lambda line: line.left):
        if columns and line.left < columns[-1][1]:
            columns[-1] = (columns[-1][0], max(columns[-1][1], line.right))
        else:
            columns.append((line.left, line.right))
    return columns


def _cells(row: Sequence[Line], columns: Sequence[tuple[float, float]]) -> str:
    words = [" ".join(line.text for line in row if left <= line.left < right) for left, right in columns]
    return "".join(f"<td>{html.escape(word, quote=False)}</td>" for word in words)
