"""Accuracy without a language model: exact match after normalisation."""

import re
import unicodedata

from opensearch_lightning.types import Task

_GROUPED = re.compile(r"(?<=\d)[,'’\u00a0\u2009\u202f](?=\d{3}(?!\d))")
_ARTICLES = re.compile(r"(?<![\w.])(?:a|an|the)(?=\s)")
_INITIALS = re.compile(r"(?<!\w)(?:[^\W\d_]\.){2,}")
_KEPT_POINT = re.compile(r"(?<=\d)\.(?=\d)")
_KEPT_MINUS = re.compile(r"(?<![\w)])[-\u2212](?=\.?\d)")
# Stand-ins of the private use area keep the two marks that belong to a number while punctuation goes.
_POINT, _MINUS = "\ue000", "\ue001"


def normalize_answer(text: str) -> str:
    """Bring spellings of one answer to one form.

    In this order: thousands separators go (``1,234``, ``1'234``, narrow spaces), Unicode NFKC, case folded, ``%``
    read as ``percent``, the dots of initials gone (``U.S.A.``), the articles *a*, *an*, *the* dropped where a word
    follows, punctuation to spaces except the decimal point and the minus sign of a number, runs of whitespace to one
    space.
    """
    text = unicodedata.normalize("NFKC", _GROUPED.sub("", text)).casefold().replace("%", " percent ")
    text = _INITIALS.sub(lambda initials: initials[0].replace(".", ""), text)
    text = _ARTICLES.sub(" ", text)
    text = _KEPT_MINUS.sub(_MINUS, _KEPT_POINT.sub(_POINT, text))
    text = "".join(" " if unicodedata.category(c).startswith("P") else c for c in text)
    return " ".join(text.replace(_POINT, ".").replace(_MINUS, "-").split())


class ExactMatchJudge:
    """Right when the response equals the answer or one of its aliases after :func:`normalize_answer`.

    A response, answer or alias that normalises to nothing matches nothing. It is the embedded
    :class:`~opensearch_lightning.rewards.AccuracyJudge`; it never fails.
    """

    name = "exact match"

    async def judge(self, question: str, response: str, reference: Task) -> bool:
        """Compare ``response`` with ``reference``; the question is not looked at."""
        said = normalize_answer(response)
        return bool(said) and said in {normalize_answer(right) for right in (reference.answer, *reference.aliases)}
