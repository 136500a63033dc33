"""Samples of groups that share prompts, with images in prompts and behind them, of random tokens."""

from collections.abc import Sequence

import torch

from opensearch_lightning.chat import ModelBatch, PackedBatch, TokenizedSample, collate, pack
from opensearch_lightning.types import ImageInput
from tests.models.tiny import tiny_renderer

MERGE = 2
VALUES_OF_A_PATCH = 3 * 2 * 16 * 16
Piece = int | ImageInput


def image(seed: int, height: int = 4, width: int = 2) -> ImageInput:
    """Random patches; ``height`` and ``width`` count patches."""
    generator = torch.Generator().manual_seed(seed)
    return ImageInput(
        name=f"img_{seed}",
        encoded=f"file {seed}".encode(),
        pixel_values=torch.randn(height * width, VALUES_OF_A_PATCH, generator=generator),
        grid_thw=(1, height, width),
    )


def run(seed: int, prompt: Sequence[Piece], *turns: Sequence[Piece]) -> TokenizedSample:
    """A prompt and turns; each piece is a number of random text tokens or an image.

    The tokens of the prompt depend on its pieces only. Turns are sampled, but for images and the token behind each.
    """
    ids: list[int] = []
    steps: list[int] = []
    images: list[ImageInput] = []
    for step, pieces in enumerate([prompt, *turns], start=-1):
        names = ((piece.name, piece.grid_thw) if isinstance(piece, ImageInput) else piece for piece in pieces)
        source = [*names] if step < 0 else [seed, step]
        generator = torch.Generator().manual_seed(sum(map(ord, str(source))))
        for piece in pieces:
            if isinstance(piece, ImageInput):
                images.append(piece)
                n_pads = piece.grid_thw[1] * piece.grid_thw[2] // MERGE**2
                ids += [tiny_renderer().image_token_id] * n_pads
                steps += [-1] * n_pads
            else:
                ids += torch.randint(300, 400, (piece,), generator=generator).tolist()
                steps += [step] * (piece - 1) + [-1]
    return TokenizedSample(token_ids=torch.tensor(ids), step_ids=torch.tensor(steps), images=tuple(images))


def packed(samples: Sequence[TokenizedSample]) -> PackedBatch:
    return pack(samples, image_token_id=tiny_renderer().image_token_id, merge_size=MERGE)


def padded(samples: Sequence[TokenizedSample]) -> ModelBatch:
    return collate(samples, pad_id=0, image_token_id=tiny_renderer().image_token_id, merge_size=MERGE)


def mixed() -> list[TokenizedSample]:
    """Two groups with pictures at different places, one of text, groups of one; in mixed order."""
    first, second, tall = image(1), image(2, 2, 6), image(3, 8, 2)
    return [
        run(0, [3, first, 5], [6], [4, tall, 3]),
        run(1, [7], [5]),
        run(2, [first, second, 4], [7]),
        run(3, [3, first, 5], [9, second, 2], [3]),
        run(4, [first, second, 4], [3, tall, 2, first, 4]),
        run(5, [6, tall, 2], [8]),
        run(6, [3, first, 5], [2]),
        run(7, [7], [11, first, 2]),
        run(8, [5], [4], [6]),
    ]
