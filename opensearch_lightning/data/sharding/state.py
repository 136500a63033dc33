"""The unfinished work of a sharding job on disk: what a killed job leaves, and the next one goes on with.

Beside the place ``OUT`` of the shards lies ``.OUT.partial`` with ``job.json`` (settings, sources), ``rows`` (the folder
to be, with the chunk files of finished blocks), ``blocks`` (a JSON file for each of them, written last) and ``work``
(what is being written).
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from opensearch_lightning.data.sharding.settings import differences
from opensearch_lightning.data.sharding.worker import WrittenBlock
from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.paths import put_in_place


class PartialShards:
    """The folder of one job, held by one process at a time.

    Args:
        out: where the shards shall lie.
        job: what the shards are a function of, as JSON.
        fresh: throw away what an earlier job left.

    Raises:
        ConfigurationError: another process holds it, or what it holds was begun from other sources or settings.
    """

    def __init__(self, out: Path, job: Mapping[str, Any], *, fresh: bool) -> None:
        self._out = out
        self.folder = partial_folder(out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ConfigurationError(
                f"another process writes {out} at this moment; let it finish, or end it"
            ) from error
        try:
            self._open(job, fresh)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> "PartialShards":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.work_folder, ignore_errors=True)
        self._lock.close()

    @property
    def work_folder(self) -> Path:
        """Scratch space of the blocks in work; emptied when the job ends or begins."""
        return self.folder / "work"

    @property
    def rows_folder(self) -> Path:
        """The folder that becomes the shards."""
        return self.folder / "rows"

    def finished(self) -> dict[int, int]:
        """Records of each finished block, by its number."""
        return finished_blocks(self._out)

    def blocks(self) -> Iterator[WrittenBlock]:
        """Finished blocks in their order."""
        for path in sorted((self.folder / "blocks").glob("*.json")):
            yield WrittenBlock(**json.loads(path.read_text()))

    def keep(self, block: WrittenBlock, folder: Path) -> None:
        """Take over the files of a block in place of earlier ones of the same number.

        Args:
            block: its names of files are the writer's.
            folder: where they lie.
        """
        entry = self._entry(block.number)
        # without an entry the block counts as unfinished, so no moment of this can leave half of one behind
        entry.unlink(missing_ok=True)
        for old in self.rows_folder.glob(f"chunk-{block.number}-*.bin"):
            old.unlink()
        files = []
        for place, file in enumerate(block.files):
            name = f"chunk-{block.number}-{place}.bin"
            os.rename(folder / file["filename"], self.rows_folder / name)
            files.append({**file, "filename": name})
        folder.rmdir()
        written = entry.with_suffix(".new")
        written.write_text(json.dumps({**asdict(block), "files": files}))
        os.replace(written, entry)

    def publish(self) -> None:
        """Give the folder of rows its place, and remove the rest."""
        put_in_place(self.rows_folder, self._out)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self, job: Mapping[str, Any], fresh: bool) -> None:
        description = self.folder / "job.json"
        if fresh:
            description.unlink(missing_ok=True)
        if description.exists():
            changed = differences(json.loads(description.read_text()), job)
            if changed:
                raise ConfigurationError(
                    f"{self.folder} holds unfinished work that was begun otherwise ({'; '.join(changed)}). Set it "
                    "back to go on, or add --fresh to begin anew."
                )
        else:
            for name in ("rows", "blocks"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            written = description.with_suffix(".new")
            written.write_text(json.dumps(job))
            os.replace(written, description)
        shutil.rmtree(self.work_folder, ignore_errors=True)
        for folder in (self.work_folder, self.rows_folder, self.folder / "blocks"):
            folder.mkdir(exist_ok=True)
        self._sweep()

    def _sweep(self) -> None:
        """Remove files of blocks that were not finished, entries whose files are gone, and what an end was writing."""
        there = {path.name for path in self.rows_folder.iterdir()}
        held: set[str] = set()
        for block in self.blocks():
            names = {str(file["filename"]) for file in block.files}
            if names <= there:
                held |= names
            else:
                self._entry(block.number).unlink()
        for path in self.rows_folder.iterdir():
            if path.name not in held:
                path.unlink()

    def _entry(self, number: int) -> Path:
        return self.folder / "blocks" / f"{number:06d}.json"


def partial_folder(out: Path) -> Path:
    """Where unfinished work lies."""
    return out.with_name(f".{out.name}.partial")


def finished_blocks(out: Path) -> dict[int, int]:
    """Records of each finished block of unfinished work, by the block's number."""
    entries = sorted((partial_folder(out) / "blocks").glob("*.json"))
    blocks = (json.loads(path.read_text()) for path in entries)
    return {block["number"]: block["rows"] for block in blocks}


def check_complete(out: Path, job: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """See that finished shards were made from the same.

    Args:
        out: their folder.
        job: what new shards would be a function of, as JSON.
        meta: content of the folder's ``shards.json``.

    Raises:
        DataError: naming what changed, and the remedy.
    """
    if "made_from" not in meta:
        raise DataError(f"{out} exists already and was not made by this command; remove it, or name another folder.")
    changed = differences(meta["made_from"], job)
    if changed:
        raise DataError(
            f"{out} holds shards that were made otherwise ({'; '.join(changed)}) and stays as it is. Name another "
            "folder, or add --fresh to replace it when the new ones are complete."
        )
