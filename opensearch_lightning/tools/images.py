"""The images of one rollout, by the names the policy uses."""

from __future__ import annotations

import hashlib

from PIL import Image

from opensearch_lightning.errors import DataError, ToolError
from opensearch_lightning.pictures import as_rgb, read_picture
from opensearch_lightning.types import ErrorKind


class ImageBook:
    """Images named ``img_1``, ``img_2``, … in the order they were added.

    Nothing else is ever reached by a name: a path or an address is an unknown image.
    """

    def __init__(self) -> None:
        self._images: dict[str, Image.Image] = {}
        self._digests: dict[str, str] = {}
        self._urls: dict[str, str] = {}

    def __len__(self) -> int:
        """Number of images."""
        return len(self._images)

    @property
    def next_name(self) -> str:
        """Name the next added image gets."""
        return f"img_{len(self._images) + 1}"

    def add(self, image: Image.Image | bytes, url: str | None = None) -> str:
        """Append an image (or an encoded image file) and return its name.

        Args:
            image: the picture.
            url: its address on the internet, where one is known; nothing here contacts it.

        Raises:
            DataError: the bytes are no image file that Pillow reads.
        """
        if isinstance(image, bytes):
            try:
                picture = read_picture(image)
            except DataError as error:
                raise DataError(f"{self.next_name} cannot be read as an image: {error}") from error
        else:
            picture = as_rgb(image)
        name = self.next_name
        self._images[name] = picture
        if url is not None:
            self._urls[name] = url
        return name

    def get(self, name: str) -> Image.Image:
        """The image of that name, RGB.

        Raises:
            ToolError: ``unknown_image``, naming those there are.
        """
        image = self._images.get(name)
        if image is None:
            raise ToolError(ErrorKind.UNKNOWN_IMAGE, f"There is no image {name[:40]!r}; {self._known()}.")
        return image

    def url(self, name: str) -> str | None:
        """The address that came with the image, ``None`` for one that exists only here; unchecked.

        Raises:
            ToolError: ``unknown_image``, naming those there are.
        """
        self.get(name)
        return self._urls.get(name)

    def digest(self, name: str) -> str:
        """SHA-256 of the image's size and pixels: equal for equal pictures whatever their names and files."""
        if name not in self._digests:
            image = self.get(name)
            size = f"{image.width}x{image.height}:".encode()
            self._digests[name] = hashlib.sha256(size + image.tobytes()).hexdigest()
        return self._digests[name]

    def is_digested(self, name: str) -> bool:
        """Whether :meth:`digest` knows its answer, and does not look at the pixels."""
        return name in self._digests

    def _known(self) -> str:
        if not self._images:
            return "there are no images"
        return "known: img_1" if len(self) == 1 else f"known: img_1 to img_{len(self)}"
