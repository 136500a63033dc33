"""Routers of mixture-of-experts policies: their logits, the losses on them, and their precision (Table 5).

Shapes: ``B`` sequences, ``T`` tokens, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from opensearch_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """Losses of one micro-batch, each times its valid tokens, with gradient.

    Divide both by the valid tokens of the global batch, and add up the parts: the z-loss is then that of the whole
    batch. The load-balancing loss is not linear in the batch, as it multiplies two means over tokens; what comes out is
    the mean of the micro-batches' own losses, each weighted by its tokens, so that experts have to be balanced within
    each micro-batch.
    """

    load_balancing_sum: Tensor
    z_sum: Tensor
    tokens: Tensor


def router_losses(logits: Sequence[Tensor], n_experts: int, top_k: int, valid: Tensor) -> RouterLosses:
    """Load-balancing loss and z-loss of the routers of all layers, in float32.

    The load-balancing loss is ``E · Σ_e f_e · P_e`` (Switch Transformers, arXiv 2101.03961, Eq. 4-6): ``f_e`` choices
    of expert ``e`` a token, of which there are ``top_k``, and ``P_e`` its mean probability, both over the valid tokens
    of all layers together, as in transformers. Its value at perfect balance is ``top_k``. The z-loss is the mean of
    ``logsumexp(logits)²`` (ST-MoE, arXiv 2202.08906, Eq. 5) over valid tokens and layers.

    Args:
        logits: ``[B·T, E]`` of each layer, as :func:`collect_router_logits` gives them.
        n_experts: E.
        top_k: experts a token.
        valid: ``[B, T]`` bool, or of any shape with as many tokens in that order: which of them are no padding.

    Raises:
        ConfigurationError: if there are no logits, or their shape is not that of ``valid`` and ``n_experts``.
    """
    rows = valid.reshape(-1).bool()
    for layer in logits:
        if layer.shape != (len(rows), n_experts):
            raise ConfigurationError(
                f"router logits are of shape {tuple(layer.shape)}, but {len(rows)} tokens and {n_experts} experts were "
                "given: collect the logits of the pass that the mask belongs to, and read n_experts from its config"
            )
    if not logits:
        raise ConfigurationError("no router logits: run the model inside collect_router_logits")
    choices_E = probabilities_E = z_sum = torch.zeros((), device=rows.device)
    for layer in logits:
        # Padding is left out, not multiplied by 0: what stands there may be anything.
        kept_TE = layer[rows].float()
        softmax_TE = kept_TE.softmax(-1)
        chosen_TK = softmax_TE.detach().topk(top_k, dim=-1).indices
        choices_E = choices_E + one_hot(chosen_TK, n_experts).sum((0, 1)).float()
        probabilities_E = probabilities_E + softmax_TE.sum(0)
        z_sum = z_sum + kept_TE.logsumexp(-1).square().sum()
    tokens, layers = rows.sum(), len(logits)
    pairs = (choices_E * probabilities_E).sum() / layers**2
    return RouterLosses(load_balancing_sum=n_experts * pairs / tokens.clamp(min=1), z_sum=z_sum / layers, tokens=tokens)


@contextmanager
def collect_router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the logits of every router during one forward pass, however the pass is called.

    With gradient checkpointing, layers run again in the backward pass; what passes then is not collected.

    Args:
        model: a ``Qwen3VLMoeForConditionalGeneration`` or a part of it.

    Yields:
        a list that holds, after the pass, ``[B·T, E]`` logits of each layer with a router, in order.

    Raises:
        ConfigurationError: if the model has no router, is run twice, or is checkpointed in the reentrant way, which
            would leave the logits without a gradient.
    """
    logits: list[Tensor] = []
    seen: set[nn.Module] = set()

    def keep(router: nn.Module, _inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        # No operation on the logits here: checkpointing compares what both runs of a layer save.
        if torch._C._current_graph_task_id() != -1:
            return
        if router in seen:
            raise ConfigurationError("a router ran twice: open collect_router_logits anew for each forward pass")
        seen.add(router)
        logits.append(outputs[0])

    routers = _routers(model)
    wanted = torch.is_grad_enabled() and any(router.weight.requires_grad for router in routers)
    handles = [router.register_forward_hook(keep) for router in routers]
    try:
        yield logits
    finally:
        for handle in handles:
            handle.remove()
    if wanted and not all(layer.requires_grad for layer in logits):
        raise ConfigurationError(
            "router logits have no gradient, so their losses would do nothing: checkpoint activations with "
            "use_reentrant=False"
        )


def check_routers(model: nn.Module) -> None:
    """See that a model has routers.

    Raises:
        ConfigurationError: it has none.
    """
    _routers(model)


def float32_router(model: nn.Module) -> None:
    """Make the routers compute in float32, whatever the type of their weights, and under autocast too.

    Logits, probabilities and the choice of experts are float32; the weights handed to the experts have the type of the
    hidden states, as before. Parameters and their names stay as they are.

    Args:
        model: a ``Qwen3VLMoeForConditionalGeneration`` or a part of it, changed in place.

    Raises:
        ConfigurationError: if the model has no router.
    """
    for router in _routers(model):
        router.forward = MethodType(_float32_forward, router)


class _InFloat32:
    """A router as its own class's ``forward`` sees it, but for the type of its weight."""

    def __init__(self, router: nn.Module) -> None:
        self._router = router
        self.weight = router.weight.float()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)


def _float32_forward(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(hidden_states.device.type, enabled=False):
        logits, scores, indices = type(router).forward(_InFloat32(router), hidden_states.float())
    return logits, scores.to(hidden_states.dtype), indices


def _routers(model: nn.Module) -> list[Any]:
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextTopKRouter

    routers = [module for module in model.modules() if isinstance(module, Qwen3VLMoeTextTopKRouter)]
    if not routers:
        raise ConfigurationError(
            f"{type(model).__name__} has no router: these settings are for Qwen3-VL-MoE checkpoints, leave them out"
        )
    return routers
