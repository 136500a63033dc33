"""Shortening a conversation: it ends with a turn of the policy, and holds whole images only."""

import itertools

from opensearch_lightning.chat.records import TokenizedSample
from opensearch_lightning.errors import ConfigurationError, RenderError


def cut_at_turn(
    sample: TokenizedSample, max_tokens: int, *, image_token_id: int, merge_size: int
) -> TokenizedSample | None:
    """The longest beginning of ``sample`` that ends with a whole turn of the policy and fits ``max_tokens``.

    Images whose tokens are cut away go with their pixels. What is kept ends with the turn's ``<|im_end|>``: the newline
    that a template puts behind it teaches nothing there.

    Args:
        sample: the conversation.
        max_tokens: most tokens to keep, image tokens counted.
        image_token_id: id of ``<|image_pad|>``.
        merge_size: side of the square of patches that makes one token.

    Returns:
        ``sample`` itself if it fits; ``None`` if not even the policy's first turn does.

    Raises:
        ConfigurationError: ``max_tokens`` below 1.
        RenderError: the cut would fall inside an image, which whole turns of a conversation exclude.
    """
    if max_tokens < 1:
        raise ConfigurationError(f"max_tokens={max_tokens} must be at least 1")
    if len(sample.token_ids) <= max_tokens:
        return sample
    steps = sample.step_ids
    turn_ends = (((steps[:-1] >= 0) & (steps[1:] != steps[:-1])).nonzero().flatten() + 1).tolist()
    end = max((end for end in turn_ends if end <= max_tokens), default=0)
    if not end:
        return None
    pads = int((sample.token_ids[:end] == image_token_id).sum())
    sizes = [t * h * w // merge_size**2 for t, h, w in (image.grid_thw for image in sample.images)]
    counts = list(itertools.accumulate(sizes, initial=0))
    if pads not in counts:
        raise RenderError(f"{pads} image tokens before token {end} are no whole images of {sizes} tokens")
    return TokenizedSample(
        token_ids=sample.token_ids[:end].clone(),
        step_ids=steps[:end].clone(),
        images=sample.images[: counts.index(pads)],
    )
