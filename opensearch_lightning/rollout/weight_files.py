"""Weights of the policy as safetensors files, for an engine in another process."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from opensearch_lightning.errors import ConfigurationError

T = TypeVar("T")

_TRANSPOSED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
"""Experts, which transformers holds transposed to the checkpoint's layout."""


@contextmanager
def weight_files(
    named_weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    folder: Path,
    dtype: torch.dtype,
    max_file_bytes: int,
) -> Iterator[list[Path]]:
    """Files with all weights under the checkpoint's names and in its layout; removed when the context is left.

    Args:
        named_weights: of the policy. Read to the end whatever is wrong with them: gathering them may be work that all
            ranks do together.
        shapes: what the checkpoint holds.
        folder: where a folder of the files is made.
        dtype: of floating-point weights in the files.
        max_file_bytes: a file grows no further than the weight that reaches this.

    Raises:
        ConfigurationError: a name or shape is not the checkpoint's, one of its weights is missing, or ``folder``
            cannot be written.
    """
    writer = _FileWriter(shapes, dtype, max_file_bytes)
    try:
        writer.open(folder)
        for name, weight in named_weights:
            writer.add(name, in_checkpoint_layout(name, weight.detach()))
        writer.close()
        yield writer.files
    finally:
        if writer.place is not None:
            shutil.rmtree(writer.place, ignore_errors=True)


class _FileWriter:
    """Collects weights into files. The first problem is kept until :meth:`close`, and nothing is written after it."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_file_bytes: int) -> None:
        self.files: list[Path] = []
        self.place: Path | None = None
        self._shapes, self._dtype, self._max_file_bytes = shapes, dtype, max_file_bytes
        self._missing = set(shapes)
        self._waiting: dict[str, Tensor] = {}
        self._problem: str | None = None

    def open(self, folder: Path) -> None:
        try:
            self.place = Path(tempfile.mkdtemp(prefix="weights-", dir=folder))
            # the server may run as another user
            self.place.chmod(0o755)
        except OSError as error:
            self._problem = f"weight_folder {folder} cannot be written ({error}); set a folder that the servers see"

    def add(self, name: str, weight: Tensor) -> None:
        self._problem = self._problem or self._misfit(name, tuple(weight.shape))
        self._missing.discard(name)
        if self._problem:
            return
        dtype = self._dtype if weight.is_floating_point() else weight.dtype
        self._waiting[name] = weight.to("cpu", dtype).contiguous()
        if sum(weight.nbytes for weight in self._waiting.values()) >= self._max_file_bytes:
            self._write()

    def close(self) -> None:
        self._write()
        if self._missing and not self._problem:
            self._problem = self._not_those(f"{min(self._missing)} is missing, {len(self._missing)} in all")
        if self._problem:
            raise ConfigurationError(self._problem)

    def _misfit(self, name: str, shape: tuple[int, ...]) -> str | None:
        if name not in self._shapes:
            return self._not_those(f"{name} is none of its weights")
        if shape != self._shapes[name]:
            return self._not_those(f"{name} has the shape {shape} here and {self._shapes[name]} there")
        return None

    @staticmethod
    def _not_those(what: str) -> str:
        return f"the weights given are not those of the servers' model: {what}; start them from the policy's checkpoint"

    def _write(self) -> None:
        weights, self._waiting = self._waiting, {}
        if not weights or self._problem or self.place is None:
            return
        path = self.place / f"{len(self.files):05d}.safetensors"
        try:
            save_file(weights, path)
            self.files.append(path)
        except (OSError, SafetensorError) as error:
            self._problem = f"{path} cannot be written ({error}); make room there, or set another weight_folder"


def in_checkpoint_layout(name: str, weight: Tensor) -> Tensor:
    """A weight of a transformers model as its checkpoint holds it."""
    return weight.transpose(1, 2) if name.endswith(_TRANSPOSED) else weight


class Writers:
    """Which ranks write, and one outcome for all.

    Args:
        per_host: the first rank of each host writes, to a folder of that host; otherwise rank 0 alone, to a folder
            that all hosts share.
    """

    def __init__(self, *, per_host: bool) -> None:
        self._per_host = per_host
        self._own: bool | None = None

    def this_rank(self) -> bool:
        """Whether this rank is one. All ranks must ask the first time together."""
        if self._own is None and not _is_distributed():
            return True
        if self._own is None:
            rank = torch.distributed.get_rank()
            hosts = _of_all_ranks(socket.gethostname())
            self._own = rank == (hosts.index(hosts[rank]) if self._per_host else 0)
        return self._own

    @staticmethod
    def agree(error: Exception | None) -> None:
        """Wait for all ranks; what one failed of is raised on all, so that none goes on alone.

        Raises:
            Exception: ``error``, or the first of the other ranks' errors.
        """
        errors = [error] if not _is_distributed() else [error, *_of_all_ranks(error)]
        for first in errors:
            if first is not None:
                raise first


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _of_all_ranks(value: T) -> list[T]:
    values: list[T] = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
