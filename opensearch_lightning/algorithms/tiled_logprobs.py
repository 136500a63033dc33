"""Log-probabilities and entropies from tiles of logits: never more of them at a time than a tile.

The output layer of a large vocabulary makes logits that are far larger than anything else in a training step. Here they
exist a tile at a time, in the forward pass and, computed again, in the backward pass; between the two, four numbers a
position are kept.

Shapes: ``N`` positions, ``H`` hidden values, ``V`` tokens of the vocabulary; ``n`` positions by ``v`` tokens a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opensearch_lightning.errors import ConfigurationError

# A tile of float32 this size stays in the cache of one core through all passes over it, and its matrix products run as
# fast as any larger ones. Devices that compute while the next kernel is launched want few, large tiles instead; their
# width is bounded by the copy in float32 of that part of a half-precision matrix.
_CPU_ROWS, _CPU_COLUMNS = 512, 1024
_OTHER_COLUMNS = 16_384


def impossible(dtype: torch.dtype) -> float:
    """Logit of a forbidden token: its probability is 0 beside any other.

    Far from minus infinity, and from what overflows to it: the entropy and its gradient multiply logits by
    probabilities, and 0 · inf is not 0.
    """
    return torch.finfo(dtype).min * 2**-20


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """How the logits of one call are computed: in tiles of at most ``rows`` positions by ``columns`` tokens.

    ``forbidden`` are ids whose logits become :func:`impossible`.
    """

    temperature: float
    rows: int
    columns: int
    dtype: torch.dtype
    with_entropy: bool
    with_greedy: bool
    forbidden: Tensor | None

    @classmethod
    def for_device(
        cls,
        device: torch.device,
        *,
        temperature: float,
        chunk_size: int,
        dtype: torch.dtype,
        with_entropy: bool,
        forbidden: Tensor | None,
        with_greedy: bool = False,
    ) -> TilePlan:
        """Tiles of at most ``chunk_size`` positions, and on a CPU of what its cache holds."""
        on_cpu = device.type == "cpu"
        return cls(
            temperature=temperature,
            rows=min(chunk_size, _CPU_ROWS) if on_cpu else chunk_size,
            columns=_CPU_COLUMNS if on_cpu else _OTHER_COLUMNS,
            dtype=dtype,
            with_entropy=with_entropy,
            with_greedy=with_greedy,
            forbidden=forbidden,
        )

    def row_slices(self, positions: int) -> Iterator[slice]:
        """The positions of one row of tiles after another."""
        return (slice(start, min(start + self.rows, positions)) for start in range(0, positions, self.rows))

    def column_tiles(self, vocabulary: int) -> list[_Columns]:
        """The tokens of each tile of a row of tiles."""
        tiles = []
        for start in range(0, vocabulary, self.columns):
            stop = min(start + self.columns, vocabulary)
            forbidden = self.forbidden
            if forbidden is not None:
                forbidden = forbidden[(forbidden >= start) & (forbidden < stop)] - start
            tiles.append(_Columns(start=start, stop=stop, forbidden=forbidden))
        return tiles

    def buffer(self, hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
        """Room for the largest tile."""
        size = min(self.rows, len(hidden_NH)) * min(self.columns, len(weight_VH))
        return torch.empty(size, dtype=self.dtype, device=hidden_NH.device)

    def logits(self, hidden_nH: Tensor, weight_vH: Tensor, columns: _Columns, buffer: Tensor) -> Tensor:
        """Scaled logits of a tile, in ``buffer``; those of forbidden tokens are low but finite."""
        tile_nv = _tile(buffer, hidden_nH, weight_vH)
        torch.mm(hidden_nH, weight_vH.T, out=tile_nv)
        if self.temperature != 1:
            tile_nv.div_(self.temperature)
        if columns.forbidden is not None:
            tile_nv.index_fill_(1, columns.forbidden, impossible(self.dtype))
        return tile_nv


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Tokens ``start`` to ``stop`` of the vocabulary, and which of them, counted from ``start``, are forbidden."""

    start: int
    stop: int
    forbidden: Tensor | None

    def of(self, weight_VH: Tensor) -> Tensor:
        return weight_VH[self.start : self.stop]

    def locate(self, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, 1]`` column of each target, and whether it lies in the tile at all (else the column is any)."""
        column_n1 = (targets_n - self.start)[:, None]
        width = self.stop - self.start
        return column_n1.clamp(0, width - 1), (column_n1 >= 0) & (column_n1 < width)


def _tile(buffer: Tensor, hidden_nH: Tensor, weight_vH: Tensor) -> Tensor:
    rows, columns = len(hidden_nH), len(weight_vH)
    return buffer[: rows * columns].view(rows, columns)


class _RunningSoftmax:
    """Sums over the vocabulary that grow tile by tile, all relative to the largest logit so far.

    As in Milakov and Gimelshein, "Online normalizer calculation for softmax": when a larger logit appears, what was
    summed before shrinks by the same factor.
    """

    def __init__(self, targets_n: Tensor, plan: TilePlan) -> None:
        self._targets_n = targets_n
        dtype = plan.dtype
        shape = (len(targets_n), 1)
        # Finite, as 0 · inf is not 0, and below any logit.
        self.top_n1 = torch.full(shape, torch.finfo(dtype).min / 2, dtype=dtype, device=targets_n.device)
        self.chosen_n1 = torch.zeros_like(self.top_n1)
        self.total_n1 = torch.zeros_like(self.top_n1)
        self._weighted_n1 = torch.zeros_like(self.top_n1)
        self.likeliest_n1 = torch.zeros(shape, dtype=torch.long, device=targets_n.device) if plan.with_greedy else None

    def add(self, logits_nv: Tensor, columns: _Columns, exponentials: Tensor | None) -> None:
        """Take in one tile, and overwrite it. ``exponentials`` is room for another tile; without it, no entropy."""
        column_n1, inside_n1 = columns.locate(self._targets_n)
        self.chosen_n1 = torch.where(inside_n1, logits_nv.gather(1, column_n1), self.chosen_n1)
        if self.likeliest_n1 is None:
            tile_top_n1 = logits_nv.amax(1, keepdim=True)
        else:
            tile_top_n1, place_n1 = logits_nv.max(1, keepdim=True)
            # of equals the first, as argmax has it
            self.likeliest_n1 = torch.where(tile_top_n1 > self.top_n1, place_n1 + columns.start, self.likeliest_n1)
        top_n1 = torch.maximum(self.top_n1, tile_top_n1)
        change_n1 = self.top_n1 - top_n1
        shrink_n1 = change_n1.exp()
        shifted_nv = logits_nv.sub_(top_n1)
        if exponentials is None:
            sums_n1 = shifted_nv.exp_().sum(1, keepdim=True)
        else:
            exponentials_nv = torch.exp(shifted_nv, out=exponentials[: shifted_nv.numel()].view_as(shifted_nv))
            sums_n1 = exponentials_nv.sum(1, keepdim=True)
            new_n1 = shifted_nv.mul_(exponentials_nv).sum(1, keepdim=True)
            self._weighted_n1 = (self._weighted_n1 + change_n1 * self.total_n1) * shrink_n1 + new_n1
        self.total_n1 = self.total_n1 * shrink_n1 + sums_n1
        self.top_n1 = top_n1

    def logprobs(self) -> Tensor:
        # In this order: the logarithm of a sure token is the small difference of two large numbers.
        return ((self.chosen_n1 - self.top_n1) - self.total_n1.log()).squeeze(1)

    def entropy(self) -> Tensor:
        return (self.total_n1.log() - self._weighted_n1 / self.total_n1).squeeze(1)


class TiledLogprobs(torch.autograd.Function):
    """Log-probabilities, entropies and likeliest tokens ``[N]``; gradients come from logits computed once more.

    With ``p = softmax(l)`` and entropy ``E``: ``d log p_t / d l_j = [j = t] - p_j`` and
    ``d E / d l_j = -p_j (log p_j + E)``.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, plan: TilePlan
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Values; no entropy and no token where the plan asks for none."""
        results_4N = hidden_NH.new_empty((4, len(targets_N)), dtype=plan.dtype)
        logprobs_N, entropy_N, top_N, total_N = results_4N.unbind()
        greedy_N = torch.empty_like(targets_N) if plan.with_greedy else None
        buffer = plan.buffer(hidden_NH, weight_VH)
        exponentials = torch.empty_like(buffer) if plan.with_entropy else None
        tiles = plan.column_tiles(len(weight_VH))
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for rows in plan.row_slices(len(targets_N)):
                hidden_nH = hidden_NH[rows].to(plan.dtype)
                sums = _RunningSoftmax(targets_N[rows], plan)
                for columns in tiles:
                    weight_vH = columns.of(weight_VH).to(plan.dtype)
                    sums.add(plan.logits(hidden_nH, weight_vH, columns, buffer), columns, exponentials)
                logprobs_N[rows], entropy_N[rows] = sums.logprobs(), sums.entropy()
                top_N[rows], total_N[rows] = sums.top_n1.squeeze(1), sums.total_n1.squeeze(1)
                if greedy_N is not None and sums.likeliest_n1 is not None:
                    greedy_N[rows] = sums.likeliest_n1.squeeze(1)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, top_N, total_N, entropy_N)
        if greedy_N is not None:
            ctx.mark_non_differentiable(greedy_N)
        return logprobs_N, entropy_N if plan.with_entropy else None, greedy_N

    @staticmethod
    def backward(
        ctx: Any, of_logprobs_N: Tensor | None, of_entropy_N: Tensor | None, _of_greedy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden states and of the matrix, each if asked for.

        Raises:
            ConfigurationError: when the gradients are to be differentiated again.
        """
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "log-probabilities of tiles can be differentiated once, and create_graph=True asks for more: give "
                "token_logprobs the output layer as a module"
            )
        plan: TilePlan = ctx.plan
        hidden_NH, weight_VH, targets_N, top_N, total_N, entropy_N = ctx.saved_tensors
        gradient = _LogitGradient.of(of_logprobs_N, of_entropy_N, top_N, total_N, entropy_N, plan.temperature)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=plan.dtype) if needs_weight else None
        buffer = plan.buffer(hidden_NH, weight_VH)
        exponentials = torch.empty_like(buffer) if of_entropy_N is not None else None
        tiles = plan.column_tiles(len(weight_VH))
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for rows in plan.row_slices(len(targets_N)):
                hidden_nH = hidden_NH[rows].to(plan.dtype)
                hidden_grad_nH = torch.zeros_like(hidden_nH)
                for columns in tiles:
                    weight_vH = columns.of(weight_VH).to(plan.dtype)
                    logits_nv = plan.logits(hidden_nH, weight_vH, columns, buffer)
                    gradient_nv = gradient.at(rows, logits_nv, targets_N[rows], columns, exponentials)
                    if needs_hidden:
                        hidden_grad_nH.addmm_(gradient_nv, weight_vH)
                    if weight_grad_VH is not None:
                        columns.of(weight_grad_VH).addmm_(gradient_nv.T, hidden_nH)
                if hidden_grad_NH is not None:
                    hidden_grad_NH[rows] = hidden_grad_nH
        return hidden_grad_NH, None if weight_grad_VH is None else weight_grad_VH.to(weight_VH.dtype), None, None


@dataclass(frozen=True, kw_only=True)
class _LogitGradient:
    """Gradient of the unscaled logits ``l``: with ``x = l - top``, ``chosen·[j = t] + exp(x)·(level + slope·x)``."""

    top_N1: Tensor
    chosen_N1: Tensor | None
    level_N1: Tensor
    slope_N1: Tensor | None

    @classmethod
    def of(
        cls,
        of_logprobs_N: Tensor | None,
        of_entropy_N: Tensor | None,
        top_N: Tensor,
        total_N: Tensor,
        entropy_N: Tensor,
        temperature: float,
    ) -> _LogitGradient:
        level_N = torch.zeros_like(top_N)
        chosen_N1 = slope_N1 = None
        if of_logprobs_N is not None:
            level_N -= of_logprobs_N / total_N / temperature
            chosen_N1 = of_logprobs_N[:, None] / temperature
        if of_entropy_N is not None:
            slope_N1 = -(of_entropy_N / total_N / temperature)[:, None]
            level_N += slope_N1.squeeze(1) * (entropy_N - total_N.log())
        return cls(top_N1=top_N[:, None], chosen_N1=chosen_N1, level_N1=level_N[:, None], slope_N1=slope_N1)

    def at(
        self, rows: slice, logits_nv: Tensor, targets_n: Tensor, columns: _Columns, exponentials: Tensor | None
    ) -> Tensor:
        """The gradient of one tile, in its place; ``exponentials`` is room for another tile where there is a slope."""
        gradient_nv = logits_nv.sub_(self.top_N1[rows])
        if self.slope_N1 is None or exponentials is None:
            gradient_nv.exp_().mul_(self.level_N1[rows])
        else:
            exponentials_nv = torch.exp(gradient_nv, out=exponentials[: gradient_nv.numel()].view_as(gradient_nv))
            torch.addcmul(self.level_N1[rows], gradient_nv, self.slope_N1[rows], out=gradient_nv)
            gradient_nv.mul_(exponentials_nv)
        if self.chosen_N1 is not None:
            column_n1, inside_n1 = columns.locate(targets_n)
            one_hot_n1 = torch.where(inside_n1, self.chosen_N1[rows], 0.0)
            gradient_nv.scatter_(1, column_n1, gradient_nv.gather(1, column_n1) + one_hot_n1)
        if columns.forbidden is not None:
            gradient_nv.index_fill_(1, columns.forbidden, 0.0)
        return gradient_nv
