"""A JSON file read value by value, in memory that does not grow with the file.

Streaming parsers of the field write half a surrogate pair as ``?`` and refuse ``NaN``: they would change supervised
text unseen. This one gives what ``json.loads`` gives.
"""

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

_READ = 2**20
_SPACE = " \t\n\r"
# The longest token that may stand unfinished at the end of what was read: half a surrogate pair's two escapes.
_TOKEN = 16
_DECODER = json.JSONDecoder()


class JSONStream:
    """Reads one value after another.

    Args:
        file: UTF-8, with or without a byte order mark.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at, self._before, self._ended = "", 0, 0, False

    @property
    def position(self) -> int:
        """Characters read so far."""
        return self._before + self._at

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._read_on()

    def skip(self, *expected: str) -> str:
        """Go behind the next character, one of ``expected``, and return it.

        Raises:
            ValueError: another character, or the end.
        """
        found = self.peek()
        if found not in expected or not found:
            met = repr(found) if found else "the end of the file"
            raise ValueError(f"expected {' or '.join(expected)} at character {self.position}, met {met}")
        self._at += 1
        return found

    def value(self) -> Any:
        """The next value.

        Raises:
            ValueError: it is none, or the file ends within.
        """
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise ValueError(f"{error.msg} at character {self._before + error.pos}") from error
                is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _TOKEN
                if not is_cut:
                    raise ValueError(f"{error.msg} at character {self._before + error.pos}") from error
            except RecursionError as error:
                raise ValueError(f"a value at character {self.position} is nested too deep") from error
            else:
                # A number may go on in what was not read yet.
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            self._read_on()

    def items(self) -> Iterator[Any]:
        """The items of the list that comes next.

        Raises:
            ValueError: there is no list, or it is broken.
        """
        self.skip("[")
        if self.peek() == "]":
            self.skip("]")
            return
        while True:
            yield self.value()
            if self.skip(",", "]") == "]":
                return

    def _read_on(self) -> None:
        # As much again as is held, so that a value longer than one reading is not parsed a thousand times.
        held = self._text[self._at :]
        read = self._file.read(max(_READ, len(held)))
        self._before += self._at
        self._text, self._at, self._ended = held + self._decode(read, not read), 0, not read
