"""Sequence parallelism: neighbouring ranks read one packed row together, each a stretch of it.

Everything but attention works token by token, on the own stretch. Around attention two exchanges turn "a stretch, all
heads" into "the whole row, a part of the heads" and back (DeepSpeed Ulysses, arXiv 2309.14509), so that segments with
shared prompts are attended to as by one rank. The exchanges are DeepSpeed's ``UlyssesSPAttentionHF``; what it lacks for
pictures is here: features are laid into the stretch that their tokens fall in, of every level of the vision tower.

Shapes: ``B`` sequences, ``T`` tokens, ``N`` tokens of the packed row, ``S`` tokens of a rank's stretch, ``H`` hidden
values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from opensearch_lightning.chat.packing import PackedBatch, Segment
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models.attention import segmented_attention

T = TypeVar("T")
Exchange = Callable[..., tuple[Tensor, None]]


class SequenceParallel:
    """The group of ``size`` neighbouring ranks that this rank belongs to.

    All ranks make theirs together, once torch's process group stands: the first ``size`` ranks are one group, the next
    ones another. Lay the ranks of one machine side by side, as launchers do: each layer talks inside the group only.

    Attributes:
        size: ranks of a group.
        rank: place of this rank in its group.

    Raises:
        ConfigurationError: the ranks do not make whole groups of at least 2, or DeepSpeed is not installed.
    """

    def __init__(self, size: int) -> None:
        started = distributed.is_available() and distributed.is_initialized()
        world_size = distributed.get_world_size() if started else 1
        if size < 2 or world_size % size:
            raise ConfigurationError(
                f"a sequence-parallel size of {size} does not fit {world_size} rank(s): groups have 2 ranks or more "
                "and divide all ranks evenly; set trainer.devices (times trainer.num_nodes) to a multiple of it"
            )
        try:
            import deepspeed
        except ImportError as error:
            raise ConfigurationError(
                "sequence parallelism needs DeepSpeed: pip install 'opensearch-lightning[deepspeed]'."
            ) from error
        # joins torch's process group where DeepSpeed has not started it
        deepspeed.init_distributed(distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
        self.size = size
        self.rank = distributed.get_rank() % size
        self._group, _ = distributed.new_subgroups(size)
        # whole trajectories travel through main memory
        self._records, _ = distributed.new_subgroups(size, backend="gloo")

    def stretch(self, n_tokens: int) -> range:
        """Places of a row of ``n_tokens`` that are this rank's; the last ones may lie behind its end."""
        length = -(-n_tokens // self.size)
        return range(self.rank * length, (self.rank + 1) * length)

    def gather(self, record: T) -> list[T]:
        """The records of all ranks of the group, in their order."""
        records: list[Any] = [None] * self.size
        distributed.all_gather_object(records, record, group=self._records)
        return records

    def complete(self, values: Tensor, own: Tensor) -> Tensor:
        """The values of all ranks of the group; those of this rank carry their gradient, the others none.

        Args:
            values: of any shape, the same on all ranks.
            own: bool, of that shape: which values are this rank's. No two ranks own the same one; what none owns is 0.
        """
        everything = values.detach().masked_fill(~own, 0.0)
        distributed.all_reduce(everything, group=self._group)
        return torch.where(own, values, everything)

    def check_heads(self, config: Any) -> None:
        """See that the attention heads of a policy can be dealt to the ranks of a group.

        Args:
            config: a ``Qwen3VLConfig``.

        Raises:
            ConfigurationError: they cannot.
        """
        heads, kv_heads = config.text_config.num_attention_heads, config.text_config.num_key_value_heads
        if heads % self.size or (kv_heads % self.size and self.size % kv_heads):
            raise ConfigurationError(
                f"the policy has {heads} heads and {kv_heads} key-value heads, which {self.size} sequence-parallel "
                "ranks cannot share evenly; set a size that divides the heads, and that divides the key-value heads or "
                "is a multiple of them"
            )

    def exchange(self, config: Any) -> Exchange:
        """Attention of :func:`~opensearch_lightning.models.attention.segmented_attention` between two exchanges.

        It takes queries, keys and values of the own stretch, and keywords ``segments`` (of the whole row), ``dropout``
        and ``scaling``.

        Args:
            config: a ``Qwen3VLConfig``.

        Raises:
            ConfigurationError: as :meth:`check_heads`.
        """
        self.check_heads(config)
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        text = config.text_config
        ulysses = UlyssesSPAttentionHF(
            attn=segmented_attention,
            batch_size=1,
            attn_head_count=text.num_attention_heads,
            attn_head_size=text.head_dim,
            kv_head_count=text.num_key_value_heads,
            num_hidden_layers=text.num_hidden_layers,
            process_group=self._group,
            seq_length_is_variable=True,
        )

        def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, None]:
            # It gathers position ids, which segments have no use for, and leaves a number in the layer that it is
            # given, which would mislead a sampling engine: it gets a single id, and itself for the layer.
            position_ids = torch.zeros(1, 1, dtype=torch.long, device=query.device)
            attended, _ = ulysses(ulysses, query, key, value, None, position_ids=position_ids, **options)
            return attended, None

        return attend


def hidden_of_stretch(model: Any, batch: PackedBatch, images: Any, parallel: SequenceParallel) -> Tensor:
    """Last hidden states ``[1, S, H]`` of this rank's stretch of the row.

    The row is filled up to a multiple of the ranks, with a segment that nothing attends to.

    Args:
        model: a ``Qwen3VLForConditionalGeneration`` that takes segments.
        batch: the same on all ranks of the group.
        images: all image features of the batch as the model gives them, or ``None``.
        parallel: the group.

    Raises:
        ConfigurationError: the heads of the model cannot be dealt to the ranks.
    """
    n_tokens = batch.input_ids.shape[1]
    places = parallel.stretch(n_tokens)
    own = slice(places.start, places.stop)
    n_filled = len(places) * parallel.size - n_tokens
    filling = (Segment(start=n_tokens, length=n_filled),) if n_filled else ()
    is_image_1N = pad(batch.input_ids == model.config.image_token_id, (0, n_filled))
    embeddings_1SH = model.get_input_embeddings()(pad(batch.input_ids, (0, n_filled))[:, own])
    features: dict[str, Any] = {}
    if images is not None:
        is_image_1S = is_image_1N[:, own]
        first = int(is_image_1N[:, : own.start].sum())
        mine = slice(first, first + int(is_image_1S.sum()))
        # also where none falls into the stretch: every rank has a gradient for the whole vision tower
        embedded, *deeper = [
            torch.cat(list(level))[mine] for level in (images.pooler_output, *images.deepstack_features)
        ]
        embeddings_1SH = embeddings_1SH.masked_scatter(is_image_1S[..., None], embedded.to(embeddings_1SH.dtype))
        features = {"visual_pos_masks": is_image_1S, "deepstack_visual_embeds": deeper}
    hidden_1SH: Tensor = model.model.language_model(
        inputs_embeds=embeddings_1SH,
        position_ids=pad(batch.position_ids, (0, n_filled))[..., own],
        use_cache=False,
        segments=(*batch.segments, *filling),
        exchange=parallel.exchange(model.config),
        **features,
    ).last_hidden_state
    return hidden_1SH
