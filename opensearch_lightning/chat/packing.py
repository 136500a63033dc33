"""From token sequences to one row without padding, in which sequences with the same prompt hold it once.

The rollouts of a task begin with the same system message, question and picture. Laid once, the prompt passes through
the model, and its picture through the vision tower, once for all of them. (The same saving is known from prefix sharing
in serving engines; here it holds in training too, as the gradients of all continuations meet in the one prompt.)

Shapes: ``B`` sequences, ``T`` tokens of the longest, ``N`` tokens of the packed row, ``P`` image patches of all images,
``D`` values of a patch.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opensearch_lightning.chat.collate import TokenSequence, joined, moved, step_table
from opensearch_lightning.chat.positions import mrope_positions
from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.types import ImageInput

UNEVEN = 1.25
"""How far the fullest pack may lie above the mean before a group is cut, which costs its prompt a second time."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of the packed row; its tokens see those before them in it, and all of ``parent``.

    ``parent`` is the place of another segment in the list of segments, or −1.
    """

    start: int
    length: int
    parent: int = -1


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Sequences in one row without padding, with what the model needs to read them, and a table of where they lie.

    ``input_ids``, ``position_ids`` and the images are the model's. The ``[B, T]`` tables are the samples', as in
    :class:`~opensearch_lightning.chat.ModelBatch`: masks, log-probabilities and losses keep that shape.
    """

    input_ids: Tensor  # [1, N] int64
    position_ids: Tensor  # [3, 1, N] int64: time, height, width
    segments: tuple[Segment, ...]  # in the order of the row, without gaps
    index_BT: Tensor  # [B, T] int64: place in the row of each token, shared ones included; -1 on padding
    step_ids: Tensor  # [B, T] int64, -1: not sampled by the policy, or padding
    valid: Tensor  # [B, T] bool, False on padding
    pixel_values: Tensor | None = None  # [P, D] float32
    image_grid_thw: Tensor | None = None  # [images, 3] int64

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """The batch on ``device``."""
        return moved(self, device, non_blocking=non_blocking)


def pack(samples: Sequence[TokenSequence], *, image_token_id: int, merge_size: int) -> PackedBatch:
    """Lay sequences one behind the other, and a prompt that several have once.

    The prompt of a sequence is what stands before its first sampled token. Two are the same if their tokens and their
    images (encoded bytes, grids and patches) are.

    Args:
        samples: at least one sequence, on the CPU.
        image_token_id: id of ``<|image_pad|>``.
        merge_size: side of the square of patches that makes one token.

    Raises:
        DataError: if there is no sample, or one whose step ids are not as many as its tokens.
        RenderError: if the image pads of a sample are not those of its images.
    """
    step_ids, valid = step_table(samples)
    prompts = [_prompt(sample, image_token_id, merge_size) for sample in samples]
    row = _Row(image_token_id, merge_size)
    index_BT = torch.full(step_ids.shape, -1, dtype=torch.long)
    for family in _families(prompts):
        prompt = prompts[family[0]]
        parent, end, place = -1, 0, torch.empty(0, dtype=torch.long)
        cut, n_images = (prompt.length, len(prompt.images)) if len(family) > 1 else (0, 0)
        if cut:
            first = samples[family[0]]
            place, end = row.lay(first.token_ids[:cut], first.images[:n_images], start=0)
            parent = len(row.segments) - 1
        for number in family:
            sample = samples[number]
            rest, _ = row.lay(sample.token_ids[cut:], sample.images[n_images:], start=end, parent=parent)
            index_BT[number, : len(sample.token_ids)] = torch.cat([place, rest])
    return PackedBatch(
        input_ids=torch.cat(row.token_ids)[None],
        position_ids=torch.cat(row.positions, dim=1)[:, None],
        segments=tuple(row.segments),
        index_BT=index_BT,
        step_ids=step_ids,
        valid=valid,
        **joined(row.images),
    )


def plan_packs(
    samples: Sequence[TokenSequence], max_tokens: int, *, image_token_id: int, merge_size: int, at_least: int = 1
) -> list[list[int]]:
    """Which samples to :func:`pack` together, counting the tokens of the packed rows.

    As few packs as are found, evenly filled; samples with the same prompt stay together unless packs would become more
    or uneven by it. A sample longer than ``max_tokens`` is alone. The same samples give the same packs.

    Args:
        samples: the sequences; none give no pack.
        max_tokens: most tokens of a pack, shared prompts counted once. Table 5 has 74,576 for one GPU.
        image_token_id: id of ``<|image_pad|>``.
        merge_size: side of the square of patches that makes one token.
        at_least: fewest packs, for ranks that must make equally many passes. Each holds a sample, so fewer samples make
            fewer packs.

    Returns:
        Indices of each pack, ascending; the pack with the most tokens first.

    Raises:
        ConfigurationError: if ``max_tokens`` or ``at_least`` is below 1.
    """
    if max_tokens < 1 or at_least < 1:
        raise ConfigurationError(f"max_tokens={max_tokens} and at_least={at_least} must be at least 1")
    lengths = [len(sample.token_ids) for sample in samples]
    prompts = [_prompt(sample, image_token_id, merge_size) for sample in samples]
    alone = [number for number, length in enumerate(lengths) if length > max_tokens]
    families = [[n for n in family if lengths[n] <= max_tokens] for family in _families(prompts)]
    members = [
        _Member(number=n, family=number, prompt=prompts[n].length, rest=lengths[n] - prompts[n].length)
        for number, family in enumerate(families)
        for n in family
    ]
    packs = _packs(members, max_tokens, max(1, at_least - len(alone))) if members else []
    packs += [[_Member(number=n, family=-1, prompt=0, rest=lengths[n])] for n in alone]
    packs.sort(key=lambda pack: (-_tokens(pack), min(member.number for member in pack)))
    return [sorted(member.number for member in pack) for pack in packs]


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """What stands before the first sampled token; equal keys and patches are equal prompts."""

    length: int
    images: tuple[ImageInput, ...]
    key: Hashable

    def has_patches_of(self, other: _Prompt) -> bool:
        """Whether each image is made of the same patches as that of ``other``, whose key is equal."""
        pairs = ((a.pixel_values, b.pixel_values) for a, b in zip(self.images, other.images, strict=True))
        return all(one is two or torch.equal(one, two) for one, two in pairs)


def _prompt(sample: TokenSequence, image_token_id: int, merge_size: int) -> _Prompt:
    sampled = (sample.step_ids >= 0).nonzero()
    ids = sample.token_ids[: int(sampled[0]) if len(sampled) else None].long()
    n_pads = int((ids == image_token_id).sum())
    sizes = [t * h * w // merge_size**2 for t, h, w in (image.grid_thw for image in sample.images)]
    n_images = sum(before < n_pads for before in itertools.accumulate(sizes[:-1], initial=0)) if sizes else 0
    images = tuple(sample.images[:n_images])
    named = tuple((image.encoded, image.grid_thw) for image in images)
    return _Prompt(length=len(ids), images=images, key=(ids.numpy().tobytes(), named))


def _families(prompts: Sequence[_Prompt]) -> list[list[int]]:
    """Indices of the samples of each prompt, in order of appearance; without a prompt each is by itself."""
    families: list[list[int]] = []
    alike: dict[Hashable, list[list[int]]] = {}
    for number, prompt in enumerate(prompts):
        candidates = alike.setdefault(prompt.key if prompt.length else number, [])
        # The file does not say it all: a processor of other limits, or records without files, make other patches.
        family = next((one for one in candidates if prompt.has_patches_of(prompts[one[0]])), None)
        if family is None:
            family = []
            candidates.append(family)
            families.append(family)
        family.append(number)
    return families


class _Row:
    """The packed row while it grows."""

    def __init__(self, image_token_id: int, merge_size: int) -> None:
        self.token_ids: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.images: list[ImageInput] = []
        self.segments: list[Segment] = []
        self._image_token_id = image_token_id
        self._merge_size = merge_size
        self._length = 0

    def lay(
        self, token_ids: Tensor, images: Sequence[ImageInput], *, start: int, parent: int = -1
    ) -> tuple[Tensor, int]:
        """Append a segment at position ``start``; its places in the row, and the first position behind it."""
        positions, end = mrope_positions(
            token_ids,
            [image.grid_thw for image in images],
            image_token_id=self._image_token_id,
            merge_size=self._merge_size,
            start=start,
        )
        place = torch.arange(self._length, self._length + len(token_ids))
        if len(token_ids):
            self.segments.append(Segment(start=self._length, length=len(token_ids), parent=parent))
        self.token_ids.append(token_ids.long())
        self.positions.append(positions)
        self.images.extend(images)
        self._length += len(token_ids)
        return place, end


@dataclass(frozen=True, kw_only=True)
class _Member:
    """A sample to plan for: its tokens before and from the first sampled one."""

    number: int
    family: int
    prompt: int
    rest: int


def _tokens(members: Sequence[_Member]) -> int:
    """Tokens of the packed row: each prompt once."""
    return sum({member.family: member.prompt for member in members}.values()) + sum(member.rest for member in members)


def _packs(members: Sequence[_Member], max_tokens: int, at_least: int) -> list[list[_Member]]:
    """As few packs as found, from families kept as whole as evenness allows. No member is above ``max_tokens``."""
    total = _tokens(members)
    n_packs = min(len(members), max(at_least, -(-total // max_tokens)))
    while True:
        best: list[list[_Member]] = []
        for units in _ever_smaller_units(members, max_tokens):
            packs = _spread(units, n_packs)
            fullest = max(map(_tokens, packs))
            if fullest > max_tokens or not all(packs):
                continue
            if not best or fullest < max(map(_tokens, best)):
                best = packs
            if fullest * n_packs <= UNEVEN * total:
                break
        if best:
            return best
        n_packs += 1


def _ever_smaller_units(members: Sequence[_Member], max_tokens: int) -> Iterator[list[list[_Member]]]:
    """Families whole where they fit, then cut into parts of at most a half, a quarter, … of a pack, at last singly."""
    families = [list(family) for _, family in itertools.groupby(members, key=lambda member: member.family)]
    limit = max_tokens
    while True:
        units = [unit for family in families for unit in _cut(family, limit)]
        yield units
        if len(units) == len(members):
            return
        limit //= 2


def _cut(family: list[_Member], limit: int) -> list[list[_Member]]:
    """The fewest even parts of at most ``limit`` tokens; single members where there is no such cut."""
    for n_parts in range(1, len(family)):
        parts = _spread([[member] for member in family], n_parts)
        if max(map(_tokens, parts)) <= limit:
            return parts
    return [[member] for member in family]


def _spread(units: Sequence[list[_Member]], n_packs: int) -> list[list[_Member]]:
    """Units over packs, longest first, each to where the fullest becomes least full.

    This is the longest-processing-time rule (Graham, 1969), with prompts that are there already free of charge.
    """
    packs: list[list[_Member]] = [[] for _ in range(n_packs)]
    loads = [0] * n_packs
    families: list[set[int]] = [set() for _ in range(n_packs)]
    for unit in sorted(units, key=_tokens, reverse=True):
        family, rest = unit[0].family, sum(member.rest for member in unit)
        after = [
            load + rest + (0 if family in present else unit[0].prompt)
            for load, present in zip(loads, families, strict=True)
        ]
        # of equals an empty one, so that as many units as packs leave none empty
        chosen = min(range(n_packs), key=lambda number: (after[number], len(packs[number]) > 0, number))
        packs[chosen] += unit
        loads[chosen] = after[chosen]
        families[chosen].add(family)
    return packs
