"""What a composed configuration says about memory and time: one plain record."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models.adapters import LANGUAGE_LINEARS
from opensearch_lightning.models.shape import Linears, PolicyShape

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by torch's name of its type."""

Place = Literal["gpu", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Zero:
    """Settings of DeepSpeed's ZeRO, numbers of elements.

    Attributes:
        stage: 2 or 3; 0 without DeepSpeed.
        optimizer_at: where optimizer state lives.
        weights_at: where the parts of the weights live.
        reduce_bucket: gradients that are reduced together.
        gather_bucket: weights that ZeRO-2 gathers together.
        max_live: weights that ZeRO-3 keeps gathered at most.
        overlap: whether reduction overlaps with computing, which takes a second bucket under ZeRO-2.
    """

    stage: int = 0
    optimizer_at: Place = "gpu"
    weights_at: Place = "gpu"
    reduce_bucket: int = 500_000_000
    gather_bucket: int = 500_000_000
    max_live: int = 1_000_000_000
    overlap: bool = True


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run, as far as its size goes.

    Attributes:
        name: of the experiment.
        kind: fine-tuning or GRPO.
        model: name of the policy's checkpoint.
        shape: of the policy.
        trained: parameters that are trained, by part.
        adapters: of them, those that adapters (LoRA) add to the policy.
        reference: whether a frozen reference model is loaded.
        width: bytes of a weight.
        compute_width: bytes of an activation.
        checkpointing: whether layers are computed again in the backward pass.
        zero: how ranks share the state.
        nodes: machines.
        ranks_per_node: training processes of each.
        sequence_parallel: ranks that read a row together.
        packed: whether passes are packed rows, without padding.
        full_packs: whether an update is counted in packs rather than in trajectories.
        rows_per_rank: trajectories of one update on one rank, or full packs (fine-tuning).
        rows_per_pass: of them, those of one pass at most, where they are padded.
        max_length: tokens of a trajectory at most.
        max_prompt: of them, those of the prompt (GRPO).
        max_tokens: tokens of a pass of a group of ranks at most; ``None`` where rows alone limit it.
        max_steps: optimizer updates; ``None`` where epochs limit the run.
        max_epochs: passes over the data; ``None`` where updates limit the run.
        prompts_per_step: tasks of a GRPO step.
        group_size: rollouts of a task.
        mini_batch_prompts: tasks of one update.
        scoring_passes: forward passes over all rollouts before the updates: old and reference log-probabilities.
        routers_taught: whether routers have losses of their own, which keep ranks from reading rows together.
        servers: engines that sample; 0 where the policy samples in the training processes.
        cache_tokens: tokens that the cache of such a process holds.
        own_weights: whether it samples from a copy of the policy.
        ahead: whether rollouts run while the step before is trained.
    """

    name: str
    kind: Literal["sft", "grpo"]
    model: str
    shape: PolicyShape
    trained: Mapping[str, int]
    adapters: int = 0
    reference: bool = False
    width: int
    compute_width: int
    checkpointing: bool
    zero: Zero
    nodes: int
    ranks_per_node: int
    sequence_parallel: int = 1
    packed: bool = False
    full_packs: bool = False
    rows_per_rank: int = 1
    rows_per_pass: int = 1
    max_length: int
    max_prompt: int = 0
    max_tokens: int | None = None
    max_steps: int | None = None
    max_epochs: int | None = None
    prompts_per_step: int = 0
    group_size: int = 0
    mini_batch_prompts: int = 0
    scoring_passes: int = 0
    routers_taught: bool = False
    servers: int = 0
    cache_tokens: int = 0
    own_weights: bool = False
    ahead: bool = False

    @property
    def ranks(self) -> int:
        """All training processes."""
        return self.nodes * self.ranks_per_node

    @property
    def parameters(self) -> int:
        """Parameters of the policy, adapters counted."""
        return self.shape.total + self.adapters

    @property
    def trained_total(self) -> int:
        """Parameters that are trained."""
        return sum(self.trained.values())

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parts of the policy whose own weights are not trained."""
        return tuple(part for part in self.shape.parameters() if not self.trained.get(part))

    @property
    def pass_tokens(self) -> int:
        """Tokens of the largest pass on one rank; no trajectory is cut, so the longest may be a pass of its own."""
        limit = math.inf if self.max_tokens is None else max(self.max_tokens, self.max_length)
        whole = limit if self.packed else min(limit, self.rows_per_pass * self.max_length)
        return math.ceil(whole / self.sequence_parallel)

    @property
    def one_pass(self) -> bool:
        """Whether no rank ever needs a second pass for an update, however long its rows are.

        Of GRPO it is never sure: how many tokens a rank gets is known when the trajectories are.
        """
        if self.kind != "sft":
            return False
        if self.full_packs or self.rows_per_rank == 1:
            return self.rows_per_rank == 1
        all_fit = self.max_tokens is None or self.rows_per_rank * self.max_length <= self.max_tokens
        return all_fit and (self.packed or self.rows_per_pass >= self.rows_per_rank)

    @property
    def largest_trained(self) -> int:
        """Elements of the largest tensor that is trained, as the experts of a layer are one; adapters count 0."""
        shape = self.shape
        linears = (*shape.linears(), *shape.vision.linears())
        embedding, experts = shape.vocabulary * shape.hidden, shape.experts * 2 * shape.hidden * shape.moe_intermediate
        sizes = [(layer.part, layer.inputs * layer.outputs) for layer in linears if layer.count]
        sizes += [("embedding", embedding), ("output_layer", embedding), ("experts", experts)]
        return max((size for part, size in sizes if self.trained.get(part)), default=0)


def read_setup(config: Mapping[str, Any]) -> Setup:
    """The run that a composed configuration describes.

    Raises:
        ConfigurationError: a model whose shape is not known, or a setting that cannot be counted; the message names it.
    """
    module, policy = config["module"], config["model"]["policy"]
    kind = _kind(str(module.get("_target_")))
    shape, model = _shape(str(config["model"]["path"]))
    trained, adapters = _trained(shape, policy)
    trainer, data = config["trainer"], config["data"]
    zero = _zero(trainer.get("strategy"))
    half = str(trainer.get("precision", "32-true")).startswith(("bf16", "16"))
    width = _width(policy)
    common: dict[str, Any] = {
        "name": str(config["name"]),
        "kind": kind,
        "model": model,
        "shape": shape,
        "trained": trained,
        "adapters": adapters,
        "width": 2 if half and zero.stage else width,
        "compute_width": 2 if half else width,
        "checkpointing": bool(policy.get("gradient_checkpointing")),
        "zero": zero,
        "nodes": _count("trainer.num_nodes", trainer.get("num_nodes", 1)),
        "ranks_per_node": _devices(trainer.get("devices", 1)),
        "sequence_parallel": _count("module.sequence_parallel_size", module.get("sequence_parallel_size") or 1),
        **_end(trainer),
    }
    setup = Setup(**common, **(_sft(module, data) if kind == "sft" else _grpo(config)))
    if setup.ranks % setup.sequence_parallel:
        raise ConfigurationError(
            f"module.sequence_parallel_size={setup.sequence_parallel} does not divide {setup.ranks} ranks; set one "
            "that divides trainer.num_nodes times trainer.devices"
        )
    return setup


def _kind(target: str) -> Literal["sft", "grpo"]:
    last = target.rpartition(".")[2]
    kinds: dict[str, Literal["sft", "grpo"]] = {"AgenticSFT": "sft", "FatalAwareGRPO": "grpo"}
    if last not in kinds:
        raise ConfigurationError(f"module._target_ is {target!r}, and a plan is made for {' and '.join(kinds)} alone")
    return kinds[last]


def _shape(path: str) -> tuple[PolicyShape, str]:
    if (Path(path) / "config.json").is_file():
        return PolicyShape.of(path), Path(path).name
    return PolicyShape.named(path), Path(path).name


def _trained(shape: PolicyShape, policy: Mapping[str, Any]) -> tuple[dict[str, int], int]:
    """Trained parameters by part, adapters as a part of their own; and how many adapters add."""
    vision = bool(policy.get("train_vision", True))
    projector = policy.get("train_projector")
    trains = {"vision_tower": vision, "projector": vision if projector is None else bool(projector)}
    language, lora = bool(policy.get("train_language", True)), policy.get("lora")
    counts = {part: count * trains.get(part, language) for part, count in shape.parameters().items()}
    if lora:
        adapters = _adapters(shape, lora)
        return {**dict.fromkeys(counts, 0), "adapters": adapters}, adapters
    if not any(counts.values()):
        raise ConfigurationError(
            "train_vision, train_projector and train_language are all false, and nothing is left to train: set one"
        )
    return counts, 0


def _adapters(shape: PolicyShape, lora: Mapping[str, Any]) -> int:
    """Parameters of low-rank adapters: ``r · (inputs + outputs)`` for each matrix that gets one."""
    rank = _count("model.policy.lora.r", lora.get("r", 16))
    wanted = lora.get("target_modules", LANGUAGE_LINEARS)
    adapted = [layer for layer in (*shape.linears(), *shape.vision.linears()) if _is_meant(layer, wanted)]
    if not adapted:
        raise ConfigurationError(
            f"model.policy.lora.target_modules is {wanted!r} and no layer has that name; name linear layers, as "
            "[q_proj, v_proj]"
        )
    return sum(layer.count * rank * (layer.inputs + layer.outputs) for layer in adapted)


_PLACES = {
    "attention": "model.language_model.layers.0.self_attn.",
    "mlp": "model.language_model.layers.0.mlp.",
    "vision_tower": "model.visual.blocks.0.",
    "projector": "model.visual.merger.",
}


def _is_meant(layer: Linears, wanted: Any) -> bool:
    inside = {"qkv": "attn.", "proj": "attn."}.get(layer.name, "mlp.") if layer.part == "vision_tower" else ""
    name = f"{_PLACES[layer.part]}{inside}{layer.name}"
    if isinstance(wanted, str):
        return layer.count > 0 and re.fullmatch(wanted, name) is not None
    return layer.count > 0 and any(name.endswith(f".{part}") for part in wanted)


def _width(policy: Mapping[str, Any]) -> int:
    dtype = str(policy.get("dtype", "float32"))
    if dtype not in WIDTHS:
        raise ConfigurationError(f"model.policy.dtype is {dtype!r}; set one of {', '.join(WIDTHS)}")
    return WIDTHS[dtype]


def _zero(strategy: Any) -> Zero:
    if strategy is None or (isinstance(strategy, str) and strategy.split("_")[0] in ("auto", "ddp")):
        return Zero()
    if not isinstance(strategy, Mapping):
        raise ConfigurationError(
            f"trainer.strategy is {strategy!r}; a plan counts DeepSpeed (trainer=deepspeed), ddp, auto"
        )
    target = str(strategy.get("_target_")).rpartition(".")[2]
    if target == "DDPStrategy":
        return Zero()
    if target not in ("ZeroStrategy", "DeepSpeedStrategy"):
        raise ConfigurationError(
            f"trainer.strategy is {target}; a plan counts ZeroStrategy (trainer=deepspeed) and ddp"
        )
    settings = (strategy.get("config") or {}).get("zero_optimization") or {}
    stage = int(settings.get("stage", 0))
    if stage not in (2, 3):
        raise ConfigurationError(f"zero_optimization.stage is {stage}; set 2 or 3 (trainer=deepspeed_zero2, deepspeed)")
    return Zero(
        stage=stage,
        optimizer_at=_place(settings.get("offload_optimizer")),
        weights_at=_place(settings.get("offload_param")),
        reduce_bucket=int(settings.get("reduce_bucket_size", Zero.reduce_bucket)),
        gather_bucket=int(settings.get("allgather_bucket_size", Zero.gather_bucket)),
        max_live=int(settings.get("stage3_max_live_parameters", Zero.max_live)),
        overlap=bool(settings.get("overlap_comm", True)),
    )


def _place(offload: Any) -> Place:
    device = str((offload or {}).get("device", "none"))
    places: dict[str, Place] = {"none": "gpu", "cpu": "cpu", "nvme": "nvme"}
    if device not in places:
        raise ConfigurationError(f"an offload device is {device!r}; set cpu or nvme")
    return places[device]


def _devices(devices: Any) -> int:
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, str) and devices.isdigit():
        devices = int(devices)
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ConfigurationError(
            f"trainer.devices is {devices!r}, which this machine cannot tell; set trainer.devices=8"
        )
    return devices


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} is {value!r}; set a whole number of at least 1")
    return value


def _end(trainer: Mapping[str, Any]) -> dict[str, int | None]:
    steps, epochs = trainer.get("max_steps"), trainer.get("max_epochs")
    return {
        "max_steps": steps if isinstance(steps, int) and steps > 0 else None,
        "max_epochs": epochs if isinstance(epochs, int) and epochs > 0 else None,
    }


def _sft(module: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    rows, packing = _count("data.batch_size", data.get("batch_size")), str(data.get("packing", "off"))
    longest = _count("data.max_length", data.get("max_length", 32_000))
    if packing not in ("off", "batch", "tokens"):
        raise ConfigurationError(f"data.packing is {packing!r}; set one of off, batch, tokens")
    packed = packing != "off"
    tokens = (data.get("pack_tokens") or longest) if packed else data.get("max_tokens_per_pass")
    micro = [
        _count(f"{where}.micro_batch", node["micro_batch"])
        for where, node in (("module", module), ("data", data))
        if node.get("micro_batch") is not None
    ]
    return {
        "packed": packed,
        "full_packs": packing == "tokens",
        "rows_per_rank": rows,
        "rows_per_pass": min([rows, *micro]),
        "max_length": longest,
        "max_tokens": None if tokens is None else _count("tokens of a pass", tokens),
    }


def _grpo(config: Mapping[str, Any]) -> dict[str, Any]:
    module, data = config["module"], config["data"]
    rollouts = config["callbacks"].get("rollout_generation")
    if not rollouts:
        raise ConfigurationError("callbacks.rollout_generation is missing, which says how many rollouts a task gets")
    prompts = _count("data.prompts_per_step", data.get("prompts_per_step"))
    reference = module.get("reference") is not None
    prompt = data.get("max_prompt_tokens") or 4096
    return {
        "packed": True,
        "reference": reference,
        "max_prompt": prompt,
        "max_length": prompt + _count("max_response_tokens", rollouts.get("max_response_tokens")),
        "max_tokens": _count("module.max_tokens_per_micro_batch", module.get("max_tokens_per_micro_batch", 74_576)),
        "prompts_per_step": prompts,
        "group_size": _count("group_size", rollouts.get("group_size")),
        "mini_batch_prompts": min(prompts, _count("mini_batch_prompts", module.get("mini_batch_prompts") or prompts)),
        "scoring_passes": (module.get("old_logprobs") == "policy") + reference,
        "routers_taught": bool(module.get("router_aux_coefficient") or module.get("router_z_coefficient")),
        **_engine(config),
        "ahead": bool(rollouts.get("max_staleness")),
    }


def _engine(config: Mapping[str, Any]) -> dict[str, Any]:
    """Servers that sample, or what sampling takes of the training processes."""
    engine = (config.get("rollout") or {}).get("engine") or {}
    listed = engine.get("servers")
    if not listed:
        tokens = int(engine.get("max_sequences", 0)) * int(engine.get("max_length", 0))
        return {"cache_tokens": tokens, "own_weights": bool(engine.get("own_weights"))}
    # each host reaches its own by the same addresses, unless one rank writes to all
    nodes = 1 if engine.get("writer") == "run" else int(config["trainer"].get("num_nodes", 1))
    return {"servers": len(listed) * nodes}
