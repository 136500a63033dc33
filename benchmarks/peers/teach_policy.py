"""Teaches a tiny policy to solve the search task in four turns, so that every trainer samples like rollouts."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
from peers.search_task import SYSTEM_PROMPT, Tools, Town, make_tasks, zoomed_blocks
from torch.utils.data import DataLoader

from opensearch_lightning.chat import (
    AssistantTurn,
    ChatRenderer,
    ObservationTurn,
    TokenizedSample,
    UserTurn,
    collate,
    format_action,
)
from opensearch_lightning.models import build_tiny_checkpoint, load_policy, load_processor
from opensearch_lightning.modules import AgenticSFT
from opensearch_lightning.modules.optim import muon_adamw
from opensearch_lightning.types import Task


def expert_turns(task: Task, town: Town, tools: Tools) -> list[Any]:
    """The whole conversation of a task that is solved."""
    text, image = (block[block["type"]] for block in zoomed_blocks())
    box = {"image": "img_1", "x": 16, "y": 16, "width": 64, "height": 64}
    return [
        UserTurn(parts=[*task.images, task.question]),
        AssistantTurn(text=format_action("I look closer.", call=("zoom", box))),
        ObservationTurn(parts=[text, image]),
        AssistantTurn(text=format_action("I look the town up.", call=("search", {"query": town.name}))),
        ObservationTurn(parts=[tools.page(town.name)]),
        AssistantTurn(text=format_action("I look its river up.", call=("search", {"query": town.river}))),
        ObservationTurn(parts=[tools.page(town.river)]),
        AssistantTurn(text=format_action("The page says it.", response=town.source)),
    ]


def teach_policy(folder: Path, towns: list[Town], *, steps: int, batch: int = 8, seed: int = 0) -> None:
    """Make a tiny policy that solves the tasks of ``towns`` by the script, and save it with its processor."""
    tools = Tools(towns)
    tasks = make_tasks(towns)
    conversations = [expert_turns(task, town, tools) for task, town in zip(tasks, towns, strict=True)]
    schemas = tools.schemas()
    texts = [SYSTEM_PROMPT, str(schemas)] * 20 + [text for turns in conversations for text in _texts(turns)]
    with tempfile.TemporaryDirectory() as scratch:
        untaught = build_tiny_checkpoint(Path(scratch) / "model", texts, vocab_size=2048, seed=seed)
        processor, policy = load_processor(untaught), load_policy(untaught)
    renderer = ChatRenderer(processor, tools_in_system=schemas)
    samples = [renderer.conversation(SYSTEM_PROMPT, turns) for turns in conversations]
    loader: Any = DataLoader(list(_batches(samples, steps, batch, policy, seed)), batch_size=None)
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = AgenticSFT(policy, optimizer=lambda model: muon_adamw(model, lr=3e-3))
    trainer.fit(module, loader)
    print(f"policy taught: loss {float(trainer.callback_metrics['train/loss']):.4f} after {steps} steps", flush=True)
    policy.save_pretrained(folder)
    processor.save_pretrained(folder)


def _texts(turns: list[Any]) -> Iterator[str]:
    for turn in turns:
        if isinstance(turn, AssistantTurn):
            yield turn.text
        else:
            yield from (part for part in turn.parts if isinstance(part, str))


def _batches(samples: list[TokenizedSample], steps: int, size: int, policy: Any, seed: int) -> Iterator[Any]:
    rng = random.Random(seed)
    config = policy.config
    for _ in range(steps):
        yield collate(
            rng.sample(samples, size),
            pad_id=0,
            image_token_id=config.image_token_id,
            merge_size=config.vision_config.spatial_merge_size,
        )
