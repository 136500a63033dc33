"""The short answer that a report marks."""


def short_answer(text: str) -> str | None:
    """The answer itself: what is marked as one, or a text that is short already; ``None`` for a report without."""
    raise NotImplementedError
