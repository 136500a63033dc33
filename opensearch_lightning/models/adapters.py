"""Low-rank adapters (LoRA, arXiv 2106.09685) on a policy, through peft; the policy keeps its class."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opensearch_lightning.errors import ConfigurationError

LANGUAGE_LINEARS = r".*\.language_model\..*\.(?:[qkvo]|gate|up|down)_proj"
"""The linear layers of attention and feed-forward of the language model; experts and routers are none."""

_ADAPTER = re.compile(r"(?P<layer>.*)\.lora_(?P<side>[AB])\.default\.weight")
_BASE = re.compile(r"(?P<layer>.*)\.base_layer\.(?P<rest>weight|bias)")


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Settings of the adapters.

    Attributes:
        r: rank.
        alpha: the product of the two matrices is multiplied by ``alpha / r``.
        dropout: probability with which a value that goes into an adapter becomes 0, in training.
        target_modules: linear layers that get one: a regular expression for the whole name of a layer in the policy, or
            last parts of names.

    Raises:
        ConfigurationError: a rank below 1, an ``alpha`` that is not positive, a probability outside of [0, 1).
    """

    r: int = 16
    alpha: float = 32
    dropout: float = 0.0
    target_modules: str | Sequence[str] = LANGUAGE_LINEARS

    def __post_init__(self) -> None:
        if self.r < 1 or not self.alpha > 0 or not 0 <= self.dropout < 1:
            raise ConfigurationError(
                f"adapters of r={self.r}, alpha={self.alpha}, dropout={self.dropout} cannot be trained; set r of 1 or "
                "more, alpha above 0, and dropout from 0 to below 1"
            )


def add_lora(policy: Any, lora: Lora) -> None:
    """Put adapters into ``policy`` and freeze all its other parameters.

    Until they are trained they change nothing. They are float32 where the policy is of a half precision, in which small
    steps would be lost; a strategy that converts the policy (DeepSpeed) converts them too and keeps a float32 copy.

    Args:
        policy: a ``Qwen3VLForConditionalGeneration``, not yet sharded.
        lora: the settings.

    Raises:
        ConfigurationError: peft is not installed, there are adapters already, no layer has such a name, or one that
            has is the output layer or no linear layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigurationError("adapters need peft: pip install 'opensearch-lightning[lora]'") from error
    if has_adapters(policy):
        raise ConfigurationError("the policy has adapters already; load it anew to give it others")
    names = _targets(policy, lora.target_modules)
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=names)
    inject_adapter_in_model(config, policy)
    for name, parameter in policy.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    policy.lora_alpha = lora.alpha


def _targets(policy: Any, wanted: str | Sequence[str]) -> list[str]:
    """Names of the layers that get adapters."""

    def is_meant(name: str) -> bool:
        if isinstance(wanted, str):
            return re.fullmatch(wanted, name) is not None
        return any(name == part or name.endswith(f".{part}") for part in wanted)

    found = {name: module for name, module in policy.named_modules() if is_meant(name)}
    wrong = [name for name, module in found.items() if type(module) is not nn.Linear or module is policy.lm_head]
    if wrong or not found:
        what = (
            f"{wrong[0]} ({type(found[wrong[0]]).__name__}) can have no adapter" if wrong else "no layer has that name"
        )
        raise ConfigurationError(
            f"target_modules is {wanted!r} and {what}: name linear layers between embedding and output layer, as "
            "[q_proj, v_proj], or leave it out for those of the language model"
        )
    return list(found)


def has_adapters(policy: Any) -> bool:
    """Whether :func:`add_lora` put adapters into ``policy``."""
    return adapter_alpha(policy) is not None


def adapter_alpha(policy: Any) -> float | None:
    """The ``alpha`` of the adapters of ``policy``, ``None`` without any."""
    return getattr(policy, "lora_alpha", None)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return _ADAPTER.fullmatch(name) is not None


def merge_adapters(weights: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """The weights of a policy with adapters as those of one without: ``W + alpha/r · B·A``, under the names it had.

    Args:
        weights: value of each parameter, by the names of the policy with adapters; not changed.
        alpha: of the adapters' settings; the rank is told by the matrices.

    Returns:
        In the types of the weights; a sum is made in at least float32.
    """
    plain: dict[str, Tensor] = {}
    for name, weight in weights.items():
        base = _BASE.fullmatch(name)
        if base is not None and base["rest"] == "weight":
            a, b = (weights[f"{base['layer']}.lora_{side}.default.weight"] for side in "AB")
            wide = torch.promote_types(weight.dtype, torch.float32)
            product = b.to(wide) @ a.to(wide)
            plain[f"{base['layer']}.weight"] = (weight.to(wide) + alpha / len(a) * product).to(weight.dtype)
        elif base is not None:
            plain[f"{base['layer']}.{base['rest']}"] = weight
        elif not is_adapter(name):
            plain[name] = weight
    return plain
