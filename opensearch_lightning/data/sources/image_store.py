"""The encoded bytes of an image, from whatever a row holds of it."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.data.images import checked_image, held_image
from opensearch_lightning.data.sources.image_places import ImagePlace, image_place

_URLS = ("http://", "https://")
_FILE_URL = "file://"
_COMPARED = 4
_Found = tuple[ImagePlace, str]


class ImageStore:
    """Finds images in folders and zip files; picklable, and safe to use behind a fork.

    A path is looked up as it stands. If nothing stands there, the image is taken whose name ends as the path does, or
    as whose name the path ends (a data set's prefix is missing or too much), and then the same with folders that
    repeat their parent's name (``images/images``) counted once. The longest common ending decides. No path leads out
    of a place, and nothing is unpacked to disk.

    Args:
        places: folders and zip files, those named first looked up first.
        fetch: gets the bytes behind a URL and raises :class:`~opensearch_lightning.data.UnusableRow` where it cannot;
            ``None`` refuses URLs.

    Raises:
        DataError: a place is missing or no zip file.
    """

    def __init__(self, places: Sequence[Path | str] = (), *, fetch: Callable[[str], bytes] | None = None) -> None:
        self._places = [image_place(Path(place)) for place in places]
        self._fetch = fetch
        self._by_file_name: dict[str, list[_Found]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by_file_name": None}

    @property
    def paths(self) -> tuple[Path, ...]:
        """The folders and zip files."""
        return tuple(place.path for place in self._places)

    def load(self, value: Any) -> bytes:
        """The encoded file of one image, checked to decode.

        Args:
            value: a path or URL, or any form of :func:`~opensearch_lightning.data.images.held_image`.

        Raises:
            UnusableRow: missing, ambiguous, broken, or a URL where none may be fetched.
        """
        held = held_image(value)
        if isinstance(held, bytes):
            return checked_image(held)
        if held.lower().startswith(_URLS):
            return checked_image(self._fetched(held), held)
        return checked_image(self._read(held), held)

    def _fetched(self, url: str) -> bytes:
        if self._fetch is None:
            raise UnusableRow(
                DropReason.REMOTE_IMAGE,
                f"image {url!r:.200} is a URL; allow URLs to have it fetched, or fetch it and give its path.",
            )
        return self._fetch(url)

    def _read(self, name: str) -> bytes:
        if not self._places:
            raise UnusableRow(
                DropReason.MISSING_IMAGE,
                f"image {name!r:.200} is a path; say which folder or zip file holds the images.",
            )
        steps = _steps(name)
        exact = "/".join(steps)
        if not _is_absolute(name):
            found = [(place, exact) for place in self._places if place.holds(exact)]
            if found:
                return _only(name, found)
        for collapse in (_as_is, _once):
            found = self._alike(steps, collapse)
            if found:
                return _only(name, found)
        places = ", ".join(str(path) for path in self.paths)
        raise UnusableRow(DropReason.MISSING_IMAGE, f"image {name!r:.200} is not in {places}.")

    def _alike(self, steps: list[str], collapse: Callable[[list[str]], list[str]]) -> list[_Found]:
        """Of the images whose path ends as ``steps`` does, or the other way round, those that agree longest."""
        wanted = collapse(steps)
        longest = 0
        found: list[_Found] = []
        for place, name in self._index().get(steps[-1], ()):
            held = collapse(name.split("/"))
            agree = min(len(held), len(wanted))
            if held[-agree:] == wanted[-agree:] and agree >= longest:
                found = [*found, (place, name)] if agree == longest else [(place, name)]
                longest = agree
        return found

    def _index(self) -> dict[str, list[_Found]]:
        if self._by_file_name is None:
            index = defaultdict(list)
            for place in self._places:
                for name in place.names():
                    index[name.rpartition("/")[2]].append((place, name))
            self._by_file_name = dict(index)
        return self._by_file_name


def _steps(name: str) -> list[str]:
    """The parts of a path below its root.

    Raises:
        UnusableRow: it leads out of it, or names nothing.
    """
    steps: list[str] = []
    for step in name.removeprefix(_FILE_URL).replace("\\", "/").split("/"):
        if step == ".." and not steps:
            raise UnusableRow(DropReason.MISSING_IMAGE, f"image {name!r:.200} leads out of the folder of images.")
        if step == "..":
            steps.pop()
        elif step not in ("", "."):
            steps.append(step)
    if not steps:
        raise UnusableRow(DropReason.MISSING_IMAGE, f"image {name!r:.200} is no path of a file.")
    return steps


def _is_absolute(name: str) -> bool:
    return name.startswith(("/", "\\", _FILE_URL)) or name[1:3] in (":/", ":\\")


def _as_is(steps: list[str]) -> list[str]:
    return steps


def _once(steps: list[str]) -> list[str]:
    return [step for step, before in zip(steps, [None, *steps], strict=False) if step != before]


def _only(name: str, found: list[_Found]) -> bytes:
    """The one image among those found; copies of the same bytes are one."""
    contents: Iterator[bytes] = (place.read(at) for place, at in found[:_COMPARED])
    first = next(contents)
    if len(found) > _COMPARED or any(content != first for content in contents):
        named = ", ".join(f"{at!r} in {place.path}" for place, at in found[:_COMPARED])
        raise UnusableRow(
            DropReason.AMBIGUOUS_IMAGE,
            f"image {name!r:.200} may be any of {len(found)}: {named}; give more of its path.",
        )
    return first
