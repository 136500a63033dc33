"""The whole weights of a module whose parameters ZeRO-3 keeps in parts, one in each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

GATHERED_ELEMENTS = 2**27
"""Parameters are gathered in groups of this many elements (256 MiB in bfloat16); one may be larger."""


def is_sharded(module: nn.Module) -> bool:
    """Whether ZeRO-3 keeps the parameters of ``module``, so that each forward pass gathers them from all ranks."""
    return any(_in_parts(parameter) for parameter in module.parameters())


def full_weights(module: nn.Module, *, max_elements: int = GATHERED_ELEMENTS) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of each parameter, tied ones once, under any strategy.

    Under ZeRO-3 the parameters are gathered group by group, so that no rank holds more than ``max_elements`` (or one
    parameter) beyond its own part. Every rank must then run through all of them, also those that have no use for
    them. A value is good until the next one is asked for: copy what is to stay.

    Args:
        module: the policy, or any part of it.
        max_elements: most elements of a group that is gathered at a time.

    Yields:
        ``(name, value)`` in the order of ``module.named_parameters()``; the values carry no gradient.
    """
    for group in _groups(module.named_parameters(), max_elements):
        with _gathered([parameter for _, parameter in group]):
            for name, parameter in group:
                yield name, parameter.detach()


def largest_over_shards(module: nn.Module, count: int) -> int:
    """The largest ``count`` of the ranks that share the parameters of ``module``; ``count`` where none are shared.

    Under ZeRO-3 each call of a submodule waits for the same call in all ranks; a loop around one must therefore go
    round equally often everywhere.
    """
    part = next((parameter for parameter in module.parameters() if _in_parts(parameter)), None)
    if part is None:
        return count
    largest = torch.tensor(count, device=part.device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return int(largest)


def _in_parts(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[None]:
    parts = [parameter for parameter in parameters if _in_parts(parameter)]
    if not parts:
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(parts)
    return gathered


def _groups(named: Iterable[tuple[str, nn.Parameter]], max_elements: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    group: list[tuple[str, nn.Parameter]] = []
    held = 0
    for name, parameter in named:
        size = int(getattr(parameter, "ds_numel", parameter.numel()))
        if group and held + size > max_elements:
            yield group
            group, held = [], 0
        group.append((name, parameter))
        held += size
    if group:
        yield group
