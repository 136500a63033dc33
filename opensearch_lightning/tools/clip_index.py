"""A local reverse image search by CLIP embeddings: pictures that show the same kind of thing, not only the same pixels.

Weights are files of the operator's; nothing is ever downloaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.pictures import as_rgb
from opensearch_lightning.tools.image_index import ImageHit

T = TypeVar("T")
Vectors = NDArray[np.float32]

_ABOUT = "index.json"
_VECTORS = "vectors.npy"
_FORMAT = 1
_MOST_ASPECT = 16


class ClipEncoder:
    """The image side of an ``open_clip`` model. Safe to share by threads, which take turns.

    Args:
        model: its name in ``open_clip``, such as ``ViT-B-32``; for the weights of OpenAI ``ViT-B-32-quickgelu``.
        weights: file with the weights of the whole model, ``.safetensors``, or ``.pt``/``.bin`` of tensors alone.
        device: where it runs.
        batch_size: most pictures in a forward pass.

    Raises:
        ConfigurationError: ``open_clip`` is not installed, it knows no such model, the model needs files of its own
            from the network, or the weights are missing or not those of the model.
    """

    def __init__(self, model: str, weights: str | Path, *, device: str = "cpu", batch_size: int = 32) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"batch_size is {batch_size}: set 1 or more.")
        self.model = model
        path = Path(weights)
        if not path.is_file():
            raise ConfigurationError(
                f"There is no file {weights} with weights of {model}: save them there (they are never downloaded), or "
                "set weights to where they are."
            )
        self._device = device
        self._batch_size = batch_size
        self._lock = threading.Lock()
        self._net, self._prepare = _load(model, path, device)
        with path.open("rb") as file:
            self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.dimension = self._forward([Image.new("RGB", (32, 32), "gray")]).shape[1]

    def embed(self, images: Iterable[Image.Image]) -> Vectors:
        """Embeddings ``[images, dimension]`` of length 1, in order.

        Raises:
            ConfigurationError: the weights give no finite numbers.
        """
        rows = [self._forward(batch) for batch in _batches(images, self._batch_size)]
        return np.concatenate(rows) if rows else np.zeros((0, self.dimension), np.float32)

    def _forward(self, images: Sequence[Image.Image]) -> Vectors:
        import torch

        pixels = torch.stack([self._prepare(_no_strip(as_rgb(image))) for image in images])
        with self._lock, torch.inference_mode():
            features = self._net.encode_image(pixels.to(self._device)).float()
            vectors: Vectors = torch.nn.functional.normalize(features, dim=-1).cpu().numpy()
        if not np.isfinite(vectors).all():
            raise ConfigurationError(f"The weights of {self.model} give no finite embeddings: use others.")
        return vectors


class ClipIndex:
    """Search over embedded pictures kept in one directory; all it needs lies in memory. Safe to share by threads.

    The ``score`` of a hit is the cosine of the two embeddings, in [-1, 1].

    Args:
        pictures: ``(id, title, url)`` of each.
        vectors: their embeddings ``[pictures, dimension]``, of length 1.
        encoder: embeds what is searched for; the one that made ``vectors``.
        min_score: a hit needs at least this cosine. How alike unlike pictures are depends on the model: look at the
            scores of pictures of your own.
    """

    def __init__(
        self,
        pictures: Sequence[tuple[str, str, str]],
        vectors: Vectors,
        encoder: ClipEncoder,
        *,
        min_score: float = 0.75,
    ) -> None:
        _check_min_score(min_score)
        self._pictures = pictures
        self._vectors = vectors
        self._encoder = encoder
        self._min_score = min_score

    @classmethod
    def build(
        cls,
        path: str | Path,
        entries: Iterable[tuple[str, str, str, Image.Image]],
        *,
        model: str,
        weights: str | Path,
        device: str = "cpu",
        batch_size: int = 32,
        min_score: float = 0.75,
    ) -> ClipIndex:
        """Index ``(id, title, url, picture)`` entries into the new directory ``path``; it appears when it is complete.

        Pictures are taken from ``entries`` a batch at a time. Other arguments: see :class:`ClipEncoder`.

        Raises:
            DataError: ``path`` already exists.
            ConfigurationError: model or weights cannot be used.
        """
        _check_min_score(min_score)
        target = Path(path)
        if target.exists():
            raise DataError(f"CLIP index {target} already exists: remove it or choose another path.")
        encoder = ClipEncoder(model, weights, device=device, batch_size=batch_size)
        pictures: list[tuple[str, str, str]] = []
        rows = [np.zeros((0, encoder.dimension), np.float32)]
        for batch in _batches(entries, batch_size):
            pictures += [(entry_id, title, url) for entry_id, title, url, _ in batch]
            rows.append(encoder.embed(image for *_, image in batch))
        index = cls(pictures, np.concatenate(rows), encoder, min_score=min_score)
        index._save(target)
        return index

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        model: str,
        weights: str | Path,
        device: str = "cpu",
        min_score: float = 0.75,
    ) -> ClipIndex:
        """Load an index that :meth:`build` wrote, with the same model and weights.

        Raises:
            DataError: nothing usable is there, or it was built with another model or other weights.
            ConfigurationError: model or weights cannot be used.
        """
        folder = Path(path)
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            pictures = [(str(entry_id), str(title), str(url)) for entry_id, title, url in about["pictures"]]
            built_with, built_digest, written = about["model"], about["weights_sha256"], about["format"]
            vectors = np.load(folder / _VECTORS, allow_pickle=False)
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise DataError(f"No CLIP index at {path} ({error}): build one with ClipIndex.build.") from error
        if written != _FORMAT:
            raise DataError(f"The CLIP index {path} has format {written}, not {_FORMAT}: build it anew.")
        if built_with != model:
            raise DataError(f"The CLIP index {path} was built with {built_with}, not {model}: set that, or build anew.")
        encoder = ClipEncoder(model, weights, device=device)
        if built_digest != encoder.digest:
            raise DataError(
                f"The CLIP index {path} was built with other weights than {weights} (SHA-256 {built_digest!s:.12}…, "
                f"not {encoder.digest:.12}…): set weights to those, or build anew."
            )
        shape = (len(pictures), encoder.dimension)
        if vectors.shape != shape or vectors.dtype != np.float32 or not np.isfinite(vectors).all():
            raise DataError(f"The vectors of the CLIP index {path} are damaged: build it anew.")
        return cls(pictures, vectors, encoder, min_score=min_score)

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self._pictures)

    def search(self, image: Image.Image, top_k: int = 5) -> list[ImageHit]:
        """Indexed pictures most like ``image``, best first, at most ``top_k``; empty when none is like enough."""
        if not self._pictures:
            return []
        scores = self._vectors @ self._encoder.embed([image])[0]
        best = np.argsort(-scores, kind="stable")[:top_k]
        return [self._hit(int(i), float(scores[i])) for i in best if scores[i] >= self._min_score]

    def _hit(self, index: int, score: float) -> ImageHit:
        entry_id, title, url = self._pictures[index]
        # Rounding takes the cosine of equal pictures a little above 1.
        return ImageHit(id=entry_id, title=title, url=url, score=round(min(score, 1.0), 4))

    def _save(self, target: Path) -> None:
        about = {
            "format": _FORMAT,
            "model": self._encoder.model,
            "weights_sha256": self._encoder.digest,
            "pictures": self._pictures,
        }
        partial = target.with_name(f".{target.name}.{uuid4().hex}")
        partial.mkdir(parents=True)
        try:
            (partial / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
            np.save(partial / _VECTORS, self._vectors, allow_pickle=False)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _check_min_score(min_score: float) -> None:
    if not -1 <= min_score <= 1:
        raise ConfigurationError(f"min_score is {min_score}: set a cosine, -1 to 1.")


def _load(model: str, weights: Path, device: str) -> tuple[Any, Any]:
    """The model in evaluation mode, and what makes its input ``[3, side, side]`` of a picture."""
    try:
        import open_clip
    except ModuleNotFoundError as error:
        raise ConfigurationError("CLIP needs open_clip: pip install 'opensearch-lightning[clip]'.") from error
    # A name with a scheme, such as hf-hub:, is looked up on the network.
    if model not in open_clip.list_models():
        raise ConfigurationError(f"open_clip knows no model {model!r}: set one that open_clip.list_models() names.")
    if "hf_model_name" in (open_clip.get_model_config(model) or {}).get("text_cfg", {}):
        raise ConfigurationError(f"{model} takes its text side from the network: choose a model that is complete.")
    try:
        # An absolute path: a bare name could be that of weights that open_clip downloads.
        net, _, prepare = open_clip.create_model_and_transforms(
            model, pretrained=str(weights.resolve()), device=device, weights_only=True
        )
    except Exception as error:
        # What a loader raises depends on the format that it takes the file for.
        raise ConfigurationError(
            f"The weights {weights} cannot be loaded into {model} ({type(error).__name__}): set a file of tensors "
            "made for that model, .safetensors, .pt or .bin."
        ) from error
    return net.eval(), prepare


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _no_strip(image: Image.Image) -> Image.Image:
    """The middle of an image that is very long: its shorter side will be enlarged to the model's, all the rest too."""
    width, height = image.size
    if max(width, height) <= _MOST_ASPECT * min(width, height):
        return image
    wide, high = min(width, _MOST_ASPECT * height), min(height, _MOST_ASPECT * width)
    left, top = (width - wide) // 2, (height - high) // 2
    return image.crop((left, top, left + wide, top + high))
