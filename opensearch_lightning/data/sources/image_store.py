"""The encoded bytes of an image, from whatever a row holds of it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class ImageStore:
    """Finds images in folders and zip files; picklable, and safe to use behind a fork.

    Args:
        places: folders and zip files.
        fetch: gets the bytes behind a URL; ``None`` refuses URLs.
    """

    def __init__(self, places: Sequence[Path | str] = (), *, fetch: Callable[[str], bytes] | None = None) -> None:
        raise NotImplementedError

    def load(self, value: Any) -> bytes:
        """The encoded file of one image, checked to decode.

        Raises:
            UnusableRow: missing, ambiguous, broken, or a URL where none may be fetched.
        """
        raise NotImplementedError
