"""The policy's log-probabilities of a batch of trajectories.

Shapes: ``B`` sequences, ``T`` tokens, ``R`` rows of tokens as the model reads them, ``L`` tokens of a row, ``N``
positions asked for, ``H`` hidden values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from opensearch_lightning.algorithms.logprobs import TokenScores
from opensearch_lightning.chat.collate import ModelBatch
from opensearch_lightning.chat.packing import PackedBatch
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models.attention import attend_by_segment
from opensearch_lightning.models.output_layer import output_layer_scores
from opensearch_lightning.models.sequence_parallel import SequenceParallel, hidden_of_stretch
from opensearch_lightning.models.weights import is_sharded, largest_over_shards


def forbidden_token_ids(config: Any) -> tuple[int, ...]:
    """Ids that a policy cannot say: a sampled image pad or vision tag would claim an image that is not there.

    The policy is the distribution over all other tokens, in sampling and in training alike.

    Args:
        config: a ``Qwen3VLConfig``.
    """
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return tuple(sorted({getattr(config, name) for name in names}))


def policy_logprobs(
    model: Any,
    batch: ModelBatch | PackedBatch,
    mask_BT: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_size: int = 1024,
    sequence_parallel: SequenceParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies (or ``None``) of :func:`policy_scores`, which takes the same arguments.

    Raises:
        ConfigurationError: as :func:`policy_scores`.
    """
    scores = policy_scores(
        model,
        batch,
        mask_BT,
        temperature=temperature,
        with_entropy=with_entropy,
        chunk_size=chunk_size,
        sequence_parallel=sequence_parallel,
    )
    return scores.logprobs, scores.entropy


def policy_scores(
    model: Any,
    batch: ModelBatch | PackedBatch,
    mask_BT: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_greedy: bool = False,
    chunk_size: int = 1024,
    sequence_parallel: SequenceParallel | None = None,
) -> TokenScores:
    """Log-probability of each token of the mask, given the tokens before it.

    Only the positions asked for pass through the output layer. A padded batch is padded on the right, so causal
    attention alone keeps padding out; in a packed one, each segment attends to its parent and itself. A batch without
    images takes part in the gradient of the vision tower with zeros, as data parallel training needs every parameter
    in every backward pass.

    Args:
        model: a ``Qwen3VLForConditionalGeneration``.
        batch: on the model's device, padded or packed; the result is the same.
        mask_BT: bool; which tokens to score. The first of a sequence has nothing before it and cannot be.
        temperature: divides the logits; the one the tokens were sampled with.
        with_entropy: whether to return the entropy, in nats, of the distribution at each of these tokens.
        with_greedy: whether to return the token that greedy decoding would take in the place of each.
        chunk_size: most positions at a time in the output layer.
        sequence_parallel: the group of ranks that reads the row together; all call with the same packed batch and mask.
            Each gets every value. Only those of its own stretch carry a gradient, so the gradients of a loss are to be
            summed over the ranks.

    Returns:
        The scores ``[B, T]``, 0 outside the mask.

    Raises:
        ConfigurationError: if the mask asks for the first token of a sequence or for padding, or the batch is packed
            and the model's attention cannot be kept inside of segments, or sequence parallelism is asked for and the
            batch is not packed or the model's heads cannot be shared.
    """
    mask_BT = mask_BT.bool()
    if bool(mask_BT[:, 0].any()):
        raise ConfigurationError("the mask asks for token 0 of a sequence, which nothing precedes: start it at token 1")
    if bool((mask_BT & ~batch.valid).any()):
        raise ConfigurationError("the mask asks for padding, which has no log-probability: leave it out (batch.valid)")
    hidden_RLH = _hidden(model, batch, sequence_parallel)
    if isinstance(batch, PackedBatch):
        index_BT = batch.index_BT
    else:
        index_BT = torch.arange(mask_BT.numel(), device=mask_BT.device).view(mask_BT.shape)
    own_BT, first = mask_BT, 0
    if sequence_parallel is not None:
        places = sequence_parallel.stretch(batch.input_ids.shape[1])
        before_BT, first = index_BT.roll(1, dims=1), places.start
        own_BT = mask_BT & (before_BT >= places.start) & (before_BT < places.stop)
    asked = own_BT[:, 1:]
    before_N, asked_N = index_BT[:, :-1][asked] - first, index_BT[:, 1:][asked]
    forbidden = torch.tensor(forbidden_token_ids(model.config), device=hidden_RLH.device)
    scores = output_layer_scores(
        model.lm_head,
        hidden_RLH.flatten(0, 1).index_select(0, before_N),
        batch.input_ids.flatten()[asked_N],
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        with_greedy=with_greedy,
        forbidden_ids=forbidden,
        n_chunks=largest_over_shards(model, math.ceil(int(asked.sum()) / chunk_size)),
    )

    def placed(values_N: Tensor) -> Tensor:
        values_BT = values_N.new_zeros(own_BT.shape).masked_scatter(own_BT, values_N)
        return values_BT if sequence_parallel is None else sequence_parallel.complete(values_BT, own_BT)

    return TokenScores(
        logprobs=placed(scores.logprobs),
        entropy=None if scores.entropy is None else placed(scores.entropy),
        greedy=None if scores.greedy is None else placed(scores.greedy),
    )


def _hidden(model: Any, batch: ModelBatch | PackedBatch, parallel: SequenceParallel | None) -> Tensor:
    """Last hidden states ``[R, L, H]`` of the rows of ``batch.input_ids``, or of the own stretch of a row.

    Every submodule runs, whether there are images or not, and in one order: ranks that share the weights gather those
    of each submodule together, with or without a gradient.
    """
    learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.model.visual.parameters())
    without = batch.pixel_values is None and (learns or is_sharded(model))
    if isinstance(batch, PackedBatch):
        return _packed_hidden(model, batch, without, parallel)
    if parallel is not None:
        raise ConfigurationError(
            "sequence parallelism splits packed rows, and this batch is padded: lay it out with chat.pack"
        )
    with _black_image(model) if without else nullcontext():
        hidden_BTH: Tensor = model.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            pixel_values=batch.pixel_values,
            image_grid_thw=batch.image_grid_thw,
            use_cache=False,
        ).last_hidden_state
    return hidden_BTH


def _packed_hidden(model: Any, batch: PackedBatch, without_images: bool, parallel: SequenceParallel | None) -> Tensor:
    attend_by_segment(model)
    images: Any = None
    zero: Tensor | float = 0.0
    if batch.pixel_values is not None:
        # called apart, as the model would hand the segments to the vision tower too
        images = model.model.get_image_features(batch.pixel_values, batch.image_grid_thw, return_dict=True)
    elif without_images:
        zero = _zero_from_vision(model)
    if parallel is not None:
        return hidden_of_stretch(model, batch, images, parallel) + zero
    outputs = model.model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        mm_encoder_outputs=None if images is None else {"image": images},
        use_cache=False,
        segments=batch.segments,
    )
    hidden_1NH: Tensor = outputs.last_hidden_state + zero
    return hidden_1NH


@contextmanager
def _black_image(model: Any) -> Iterator[None]:
    """Adds the features of a black image, times 0, to the embeddings.

    It does so at the place of the pass where images are read: ranks that share weights gather them in one order.
    """

    def add(_module: Any, _inputs: Any, embeddings_BTH: Tensor) -> Tensor:
        return embeddings_BTH + _zero_from_vision(model).to(embeddings_BTH.dtype)

    handle = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _zero_from_vision(model: Any) -> Tensor:
    """A zero that depends on every parameter of the vision tower: features of one black image, times 0."""
    config = model.config.vision_config
    merge, patch = config.spatial_merge_size, config.patch_size
    patches = torch.zeros(
        merge**2, config.in_channels * config.temporal_patch_size * patch**2, device=model.device, dtype=torch.float32
    )
    features = model.model.get_image_features(
        patches, torch.tensor([[1, merge, merge]], device=model.device), return_dict=True
    )
    levels = [features.pooler_output, *features.deepstack_features]
    return 0.0 * sum(image.sum() for level in levels for image in level)
