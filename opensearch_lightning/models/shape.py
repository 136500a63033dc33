"""The dimensions of a Qwen3-VL policy, and what follows from them without a weight: its parameters, part by part."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from opensearch_lightning.errors import ConfigurationError

PARTS = (
    "embedding",
    "attention",
    "mlp",
    "experts",
    "router",
    "norms",
    "output_layer",
    "vision_tower",
    "projector",
)
"""Parts of a policy; the projector is the merger and the deepstack mergers."""


@dataclass(frozen=True, kw_only=True)
class Linears:
    """Linear layers of one name and size.

    Attributes:
        name: last part of their names in the model (``q_proj``).
        part: of :data:`PARTS`.
        count: how many there are.
        inputs: width of what they read.
        outputs: width of what they write.
        bias: whether they have one.
    """

    name: str
    part: str
    count: int
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        """Weights and biases of all of them."""
        return self.count * (self.inputs * self.outputs + self.outputs * self.bias)

    @property
    def flops(self) -> int:
        """Operations of all of them for one row of their input; a multiplication and an addition are two."""
        return 2 * self.count * self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """Dimensions of the vision tower and the projector behind it.

    Attributes:
        depth: layers.
        hidden: width.
        intermediate: width inside of a feed-forward layer.
        heads: attention heads.
        channels: of a picture.
        patch: side of a patch, pixels.
        temporal_patch: frames of a patch; a picture is repeated as often.
        merge: side, in patches, of the square that becomes one token.
        positions: learned position embeddings.
        deepstack: layers whose output goes to the language model as well, each through a merger of its own.
        out_hidden: width that the projector writes.
    """

    depth: int
    hidden: int
    intermediate: int
    heads: int
    channels: int = 3
    patch: int
    temporal_patch: int
    merge: int
    positions: int
    deepstack: int
    out_hidden: int

    @property
    def patch_values(self) -> int:
        """Numbers that describe one patch."""
        return self.channels * self.temporal_patch * self.patch**2

    def linears(self) -> tuple[Linears, ...]:
        """All linear layers, those of the projector last; the latter read a row for ``merge**2`` patches."""
        merged = self.hidden * self.merge**2
        layer = partial(Linears, part="vision_tower", count=self.depth, bias=True)
        merger = partial(Linears, part="projector", count=1 + self.deepstack, bias=True)
        return (
            layer(name="qkv", inputs=self.hidden, outputs=3 * self.hidden),
            layer(name="proj", inputs=self.hidden, outputs=self.hidden),
            layer(name="linear_fc1", inputs=self.hidden, outputs=self.intermediate),
            layer(name="linear_fc2", inputs=self.intermediate, outputs=self.hidden),
            merger(name="linear_fc1", inputs=merged, outputs=merged),
            merger(name="linear_fc2", inputs=merged, outputs=self.out_hidden),
        )

    def patch_embedding(self) -> Linears:
        """The convolution that reads a patch, as the matrix product it is."""
        return Linears(
            name="patch_embed", part="vision_tower", count=1, inputs=self.patch_values, outputs=self.hidden, bias=True
        )


@dataclass(frozen=True, kw_only=True)
class PolicyShape:
    """Dimensions of a Qwen3-VL policy, dense or a mixture of experts.

    Attributes:
        hidden: width of the language model.
        layers: its layers.
        heads: attention heads.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        intermediate: width inside of a dense feed-forward layer.
        vocabulary: rows of the embedding.
        tied: whether the output layer is the embedding.
        attention_bias: whether the linear layers of attention have biases.
        experts: of a routed layer; 0 for a dense model.
        experts_per_token: of them, those that read a token.
        moe_intermediate: width inside of an expert.
        routed_layers: layers with experts; the others are dense.
        vision: the vision tower.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    attention_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    routed_layers: int = 0
    vision: VisionShape

    @classmethod
    def of(cls, config: Any) -> Self:
        """The shape that a configuration describes.

        Args:
            config: a ``Qwen3VLConfig`` or ``Qwen3VLMoeConfig`` of transformers, or a folder with a ``config.json``.

        Raises:
            ConfigurationError: there is no such file, or it describes no Qwen3-VL.
        """
        if isinstance(config, str | Path):
            config = _read(Path(config))
        if getattr(config, "model_type", None) not in ("qwen3_vl", "qwen3_vl_moe"):
            raise ConfigurationError(
                f"the configuration is of {getattr(config, 'model_type', type(config).__name__)!r}, and shapes are "
                "counted of qwen3_vl and qwen3_vl_moe alone; give the config.json of a Qwen3-VL"
            )
        text, vision = config.text_config, config.vision_config
        routed = _routed_layers(text)
        return cls(
            hidden=text.hidden_size,
            layers=text.num_hidden_layers,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            intermediate=text.intermediate_size,
            vocabulary=text.vocab_size,
            tied=bool(config.tie_word_embeddings),
            attention_bias=text.attention_bias,
            experts=text.num_experts if routed else 0,
            experts_per_token=text.num_experts_per_tok if routed else 0,
            moe_intermediate=text.moe_intermediate_size if routed else 0,
            routed_layers=routed,
            vision=VisionShape(
                depth=vision.depth,
                hidden=vision.hidden_size,
                intermediate=vision.intermediate_size,
                heads=vision.num_heads,
                channels=vision.in_channels,
                patch=vision.patch_size,
                temporal_patch=vision.temporal_patch_size,
                merge=vision.spatial_merge_size,
                positions=vision.num_position_embeddings,
                deepstack=len(vision.deepstack_visual_indexes),
                out_hidden=vision.out_hidden_size,
            ),
        )

    @classmethod
    def named(cls, name: str) -> PolicyShape:
        """The shape of a released model, by its name or the folder named so (``models/Qwen3-VL-8B-Instruct``).

        Raises:
            ConfigurationError: a name that is not built in.
        """
        last = Path(name).name
        if last in RELEASED:
            return RELEASED[last]
        close = difflib.get_close_matches(last, RELEASED, n=1)
        near = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(
            f"the shape of {name!r} is not known{near}: give a folder that holds its config.json, or one of "
            f"{', '.join(RELEASED)}"
        )

    def linears(self) -> tuple[Linears, ...]:
        """Linear layers of the language model that read every token; experts, router and output layer are none."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = partial(Linears, part="attention", count=self.layers, bias=self.attention_bias)
        dense = partial(Linears, part="mlp", count=self.layers - self.routed_layers)
        return (
            attention(name="q_proj", inputs=self.hidden, outputs=queries),
            attention(name="k_proj", inputs=self.hidden, outputs=keys),
            attention(name="v_proj", inputs=self.hidden, outputs=keys),
            attention(name="o_proj", inputs=queries, outputs=self.hidden),
            dense(name="gate_proj", inputs=self.hidden, outputs=self.intermediate),
            dense(name="up_proj", inputs=self.hidden, outputs=self.intermediate),
            dense(name="down_proj", inputs=self.intermediate, outputs=self.hidden),
        )

    def parameters(self) -> dict[str, int]:
        """Parameters of each of :data:`PARTS`, as ``model.parameters()`` counts them: a tied matrix once."""
        vision, embedding = self.vision, self.vocabulary * self.hidden
        counts = dict.fromkeys(PARTS, 0)
        for linears in (*self.linears(), *vision.linears(), vision.patch_embedding()):
            counts[linears.part] += linears.parameters
        counts["embedding"] = embedding
        counts["experts"] = self.routed_layers * self.experts * self.expert_parameters
        counts["router"] = self.routed_layers * self.experts * self.hidden
        counts["norms"] = self.layers * 2 * (self.hidden + self.head_dim) + self.hidden
        counts["output_layer"] = 0 if self.tied else embedding
        counts["vision_tower"] += vision.positions * vision.hidden + vision.depth * 4 * vision.hidden
        # the merger normalises patches, the deepstack mergers normalise what they have put side by side
        counts["projector"] += 2 * vision.hidden * (1 + vision.deepstack * vision.merge**2)
        return counts

    def active_parameters(self) -> dict[str, int]:
        """As :meth:`parameters`, of the experts only those that one token meets."""
        counts = self.parameters()
        counts["experts"] = self.routed_layers * self.experts_per_token * self.expert_parameters
        return counts

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters().values())

    @property
    def active(self) -> int:
        """Parameters that one token meets."""
        return sum(self.active_parameters().values())

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer."""
        return 3 * self.hidden * self.moe_intermediate


def _read(folder: Path) -> Any:
    from transformers import AutoConfig

    file = folder / "config.json" if folder.is_dir() else folder
    if not file.is_file():
        raise ConfigurationError(f"there is no {file}; give a folder that holds the config.json of a Qwen3-VL")
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        return AutoConfig.for_model(**described)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{file} cannot be read as a model's configuration ({type(error).__name__}); give that of a Qwen3-VL"
        ) from error


def _routed_layers(text: Any) -> int:
    """Layers with experts; the rule is that of ``Qwen3VLMoeTextDecoderLayer``."""
    experts, dense = getattr(text, "num_experts", 0), getattr(text, "mlp_only_layers", None) or ()
    if not experts:
        return 0
    return sum(
        layer not in dense and (layer + 1) % text.decoder_sparse_step == 0 for layer in range(text.num_hidden_layers)
    )


_VISION = VisionShape(
    depth=27,
    hidden=1152,
    intermediate=4304,
    heads=16,
    patch=16,
    temporal_patch=2,
    merge=2,
    positions=2304,
    deepstack=3,
    out_hidden=4096,
)
_8B = PolicyShape(
    hidden=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=12_288,
    vocabulary=151_936,
    tied=False,
    vision=_VISION,
)
RELEASED = {
    "Qwen3-VL-8B-Instruct": _8B,
    "Qwen3-VL-32B-Instruct": dataclasses.replace(
        _8B,
        hidden=5120,
        layers=64,
        heads=64,
        intermediate=25_600,
        vision=dataclasses.replace(_VISION, out_hidden=5120),
    ),
    "Qwen3-VL-30B-A3B-Instruct": dataclasses.replace(
        _8B,
        hidden=2048,
        layers=48,
        kv_heads=4,
        intermediate=6144,
        experts=128,
        experts_per_token=8,
        moe_intermediate=768,
        routed_layers=48,
        vision=dataclasses.replace(_VISION, out_hidden=2048),
    ),
}
"""Shapes of the models of the paper (Table 4), from the ``config.json`` of their model cards."""
