"""Pictures as all parts see them: policy, tools, caches and shards agree on the pixels."""

from __future__ import annotations

import io

from PIL import Image, ImageOps


def as_rgb(image: Image.Image) -> Image.Image:
    """A copy of ``image``, upright (a camera's rotation undone) and RGB; what is transparent becomes white."""
    upright = ImageOps.exif_transpose(image)
    if upright.has_transparency_data:
        rgba = upright.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return upright.convert("RGB")


def png_bytes(image: Image.Image) -> bytes:
    """``image`` as a PNG file: without loss, and written fast rather than small."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
