"""A key-value cache of fixed rows in which sequences of different lengths live side by side.

Shapes: ``S`` slots, ``N`` rows of one forward pass, ``Q`` new tokens, ``L`` cached tokens, ``H`` key-value heads,
``D`` head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Window:
    """Which rows the next forward pass writes, and from where."""

    slots_N: Tensor
    starts_N: Tensor
    lengths_N: Tensor
    span: int
    contiguous: bool


class SlotCache:
    """Keys and values of ``n_slots`` sequences of up to ``max_length`` tokens, for transformers' attention layers.

    A forward pass is announced by :meth:`window`; the attention layers then call :meth:`update`, which writes the new
    keys and values at each row's own position and returns what the rows may look at. Rows that decode lie in the first
    slots, so that decoding reads views and copies nothing; :meth:`swap` keeps them there.
    """

    def __init__(self, n_slots: int, max_length: int) -> None:
        self.n_slots = n_slots
        self.max_length = max_length
        self._capacity = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._window: _Window | None = None

    def window(
        self, slots: list[int], starts: list[int], lengths: list[int], device: torch.device, width: int = 0
    ) -> Tensor:
        """Announce a forward pass and return its attention mask.

        Args:
            slots: the slot of each row, ``N`` of them.
            starts: tokens each row has cached already.
            lengths: new tokens of each row; shorter rows are padded on the right.
            device: where the mask is made.
            width: pad to so many new tokens, if that is more than the longest row has.

        Returns:
            Bool ``[N, 1, Q, max(starts) + Q]``: the cached tokens first, then the new ones.
        """
        width = max(width, *lengths)
        span = max(starts)
        contiguous = width == 1 and slots == list(range(len(slots)))
        starts_N = torch.tensor(starts, device=device)
        lengths_N = torch.tensor(lengths, device=device)
        self._window = _Window(torch.tensor(slots, device=device), starts_N, lengths_N, span, contiguous)
        self._grow(max(start + length for start, length in zip(starts, lengths, strict=True)))
        if contiguous:
            seen = torch.arange(span + 1, device=device) <= starts_N[:, None]
            return seen[:, None, None, :]
        past = torch.arange(span, device=device) < starts_N[:, None]
        new = torch.arange(width, device=device)
        causal = new[:, None] >= new[None, :]
        rows = len(slots)
        return torch.cat(
            [past[:, None, None, :].expand(rows, 1, width, span), causal[None, None].expand(rows, 1, width, width)],
            dim=-1,
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values ``[N, H, Q, D]``; called by transformers' attention layers."""
        window = self._window
        assert window is not None, "window() comes before the forward pass"
        if layer_idx not in self._keys:
            self._allocate(layer_idx, key_states, value_states)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if window.contiguous:
            rows = len(window.slots_N)
            keys[window.slots_N, :, window.starts_N] = key_states[:, :, 0]
            values[window.slots_N, :, window.starts_N] = value_states[:, :, 0]
            return keys[:rows, :, : window.span + 1], values[:rows, :, : window.span + 1]
        past_keys = keys[window.slots_N, :, : window.span]
        past_values = values[window.slots_N, :, : window.span]
        offset = torch.arange(key_states.shape[2], device=key_states.device)
        row_N, column_N = torch.nonzero(offset < window.lengths_N[:, None], as_tuple=True)
        slot, position = window.slots_N[row_N], window.starts_N[row_N] + column_N
        keys[slot, :, position] = key_states[row_N, :, column_N]
        values[slot, :, position] = value_states[row_N, :, column_N]
        return torch.cat([past_keys, key_states], dim=2), torch.cat([past_values, value_states], dim=2)

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Give ``targets`` the first ``length`` tokens of ``source`` (rollouts of one task share their prompt)."""
        for store in (*self._keys.values(), *self._values.values()):
            # a clone: torch refuses to write into a tensor what is a view of it
            store[targets, :, :length] = store[source, :, :length].clone()

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the first ``length`` tokens of two slots."""
        for store in (*self._keys.values(), *self._values.values()):
            store[[first, second], :, :length] = store[[second, first], :, :length]

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self._keys.clear()
        self._values.clear()
        self._capacity = 0
        self._window = None

    def _grow(self, needed: int) -> None:
        if needed <= self._capacity:
            return
        # in large strides: growing copies the whole cache
        self._capacity = min(self.max_length, max(needed, 2 * self._capacity, 256))
        for store in (self._keys, self._values):
            for layer_idx, old in store.items():
                new = old.new_zeros(self.n_slots, old.shape[1], self._capacity, old.shape[3])
                new[:, :, : old.shape[2]] = old
                store[layer_idx] = new

    def _allocate(self, layer_idx: int, key_states: Tensor, value_states: Tensor) -> None:
        for store, states in ((self._keys, key_states), (self._values, value_states)):
            store[layer_idx] = states.new_zeros(self.n_slots, states.shape[1], self._capacity, states.shape[3])
