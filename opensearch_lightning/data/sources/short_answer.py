r"""The short answer that a report marks.

Answers of Search-VL-RL-8K are reports; what can be compared with a response is marked in them by ``\boxed{…}``.
"""

import re

MAX_CHARACTERS = 200
# Also the backspace that a JSON reader makes of "\b".
_BOXED = re.compile(r"(?:\\+f?b|\x08)oxed\s*\{")
_BRACE = re.compile(rf"(?P<box>{_BOXED.pattern})|\\.|[{{}}]", re.DOTALL)
_TAGGED = re.compile(r"<(answer|response)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_WORDS = r"(?:(?:final|short|correct)\s+)?answer|最终答案|答案"
# A line such as "**Final answer:** Lyon", "### Answer: Lyon" or "Answer: **Lyon**".
_LINE = re.compile(rf"^[ \t>#*_-]*(?:{_WORDS})[ \t*_]*[:：][ \t*_]*(?P<answer>[^\n]*)$", re.IGNORECASE | re.MULTILINE)
# A heading of its own, with the answer below it.
_HEADING = re.compile(
    rf"^[ \t]*(?:#+[ \t]*(?:\*\*)?|\*\*)(?:{_WORDS})[ \t:：*_]*\n\s*(?P<answer>[^\n]+)$", re.IGNORECASE | re.MULTILINE
)
_TEX_TEXT = re.compile(r"\\(?:f?boxed|text|textbf|textit|textrm|texttt|mathrm|mathbf|mathit|emph|mbox)\s*\{([^{}]*)\}")
_TEX_SPACE = re.compile(r"\\(?:[,;:! ]|quad\b|qquad\b)|(?<!\\)~")
_TEX_ESCAPE = re.compile(r"\\([%$&_#{}])")
_REPORT = re.compile(r"\n|^#+ ", re.MULTILINE)


def short_answer(text: str) -> str | None:
    r"""The answer itself, without mark-up of TeX and Markdown; ``None`` for a report that marks none.

    The last ``\boxed{…}`` decides, then the last ``<answer>`` or ``<response>`` block, then the last line such as
    ``Final answer: …``. A text of one line and at most 200 characters that marks nothing is the answer as it stands.
    What is marked must be as short.
    """
    for found in (_boxed(text), [match[2] for match in _TAGGED.finditer(text)], _lines(text)):
        answers = [plain for part in found if (plain := _plain(part))]
        if answers:
            return answers[-1] if _is_short(answers[-1]) else None
    stripped = text.strip()
    return stripped if stripped and _is_short(stripped) and not _is_marked(stripped) else None


def _is_marked(text: str) -> bool:
    r"""Whether a text tries to mark an answer, such as by an empty or unclosed ``\boxed{``."""
    return any(mark.search(text) is not None for mark in (_BOXED, _TAGGED, _LINE, _HEADING))


def _is_short(text: str) -> bool:
    return len(text) <= MAX_CHARACTERS and _REPORT.search(text) is None


def _boxed(text: str) -> list[str]:
    """What stands in boxes, in the order in which they are closed."""
    found: list[str] = []
    opened: list[int | None] = []
    for match in _BRACE.finditer(text):
        if match["box"] is not None or match[0] == "{":
            opened.append(match.end() if match["box"] is not None else None)
        elif match[0] == "}" and opened and (start := opened.pop()) is not None:
            found.append(text[start : match.start()])
    return found


def _lines(text: str) -> list[str]:
    found = [*_LINE.finditer(text), *_HEADING.finditer(text)]
    return [match["answer"] for match in sorted(found, key=lambda match: match.start("answer"))]


def _plain(marked: str) -> str:
    """``marked`` without the commands that only set it."""
    text, before = marked, None
    while text != before:
        before, text = text, _TEX_TEXT.sub(r"\1", text)
    text = _TEX_ESCAPE.sub(r"\1", _TEX_SPACE.sub(" ", _unwrapped(text.strip(), "$")))
    for mark in ("**", "__", "*", "`"):
        text = _unwrapped(text.strip(), mark)
    return " ".join(text.split())


def _unwrapped(text: str, mark: str) -> str:
    inner = text[len(mark) : -len(mark)]
    is_wrapped = len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark) and mark not in inner
    return inner if is_wrapped else text
