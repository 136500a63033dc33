"""The measured run of TRL: its ``SFTTrainer`` on the same trajectories, with the loss on the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import corpus
from datasets import Dataset, Image, List, concatenate_datasets, load_dataset
from peers.measure import Recorder
from peers.sft_data import SFTSettings, digest
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from trl import SFTConfig, SFTTrainer

from opensearch_lightning.models import forbidden_token_ids

_ROLES = {"human": "user", "gpt": "assistant", "observation": "user"}
_CHECKED = 8
"""Rows whose tokens and loss are compared."""


def load_rows(source: Path) -> Dataset:
    """A corpus as TRL takes it: messages of structured content, and images decoded when read."""
    parts = []
    for path in corpus.source_files(source):
        rows = load_dataset("json", data_files=str(path), split="train")
        root = {"root": str(path.parent)}
        parts.append(rows.map(_converted, fn_kwargs=root, remove_columns=rows.column_names))
    return concatenate_datasets(parts).cast_column("images", List(Image()))


def _converted(row: Mapping[str, Any], root: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": _parts(row["system"])}]
    for turn in row["conversations"]:
        # the trainer fills in pictures of user turns alone; the template writes tool turns as just this
        wrapped = turn["from"] == "observation"
        text = f"<tool_response>\n{turn['value']}\n</tool_response>" if wrapped else turn["value"]
        messages.append({"role": _ROLES[turn["from"]], "content": _parts(text)})
    return {"messages": messages, "images": [f"{root}/{name}" for name in row["images"]]}


def _parts(text: str) -> list[dict[str, Any]]:
    first, *others = text.split("<image>")
    parts = [{"type": "text", "text": first}]
    for piece in others:
        parts += [{"type": "image", "text": None}, {"type": "text", "text": piece}]
    return [part for part in parts if part["text"] != ""]


def marked_template(template: str) -> str:
    """The policy's chat template, with marks around what it samples: an assistant's text and its end of turn."""
    opening, closing = "{{- '<|im_start|>assistant\\n' ~ plain(message.content) -}}", "{{- '<|im_end|>\\n' -}}"
    head, said = template.split(opening)
    calls, rest = said.split(closing, 1)
    return "".join(
        [
            head,
            "{{- '<|im_start|>assistant\\n' -}}{%- generation -%}{{- plain(message.content) -}}",
            calls,
            "{{- '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}",
            rest,
        ]
    )


def load_processor(policy: Path) -> Any:
    """The policy's processor with :func:`marked_template`."""
    processor = AutoProcessor.from_pretrained(policy, local_files_only=True)
    processor.chat_template = marked_template(processor.chat_template)
    return processor


class _Record(TrainerCallback):
    def __init__(self, recorder: Recorder, figures: dict[str, float]) -> None:
        self._recorder, self._figures = recorder, figures

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.end_step(**self._figures)


class _CountingTrainer(SFTTrainer):
    """Notes what each batch holds, and the seconds of its parts."""

    def __init__(self, recorder: Recorder, figures: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.recorder, self.step_figures = recorder, figures
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask = inputs["attention_mask"]
        self.step_figures.update(tokens=int(mask.sum()), places=mask.numel(), rows=len(mask))
        with self.recorder.timed("training_step_s"):
            return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.timed("forward_s"):
            return super().compute_loss(*args, **kwargs)


def make_trainer(settings: SFTSettings, checkpoint: Path, rows: Dataset, sampling: str, recorder: Recorder) -> Any:
    """The trainer, with what it is measured by."""
    figures: dict[str, float] = {}
    policy = AutoModelForImageTextToText.from_pretrained(
        checkpoint, dtype="float32", attn_implementation="sdpa", local_files_only=True
    )
    config = SFTConfig(
        output_dir=str(Path(settings.folder) / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings.batch,
        max_length=None,
        assistant_only_loss=True,
        optim="adamw_torch",
        weight_decay=0.0,
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=settings.steps + 1,
        train_sampling_strategy=sampling,
        length_column_name="length",
        remove_unused_columns=False,  # the sampler finds the lengths only where they are left
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings.seed,
    )
    return _CountingTrainer(
        recorder,
        figures,
        policy,
        config,
        train_dataset=rows,
        processing_class=load_processor(checkpoint),
        callbacks=[_Record(recorder, figures)],
    )


def run(settings: SFTSettings, *, sampling: str) -> dict[str, Any]:
    """Make the updates and tell what was measured."""
    recorder = Recorder()
    rows = load_rows(settings.corpus)
    if sampling == "group_by_length":
        rows = rows.add_column("length", _lengths(settings))
    trainer = make_trainer(settings, settings.policy, rows, sampling, recorder)
    recorder.figures.update(_compared(trainer, rows.select(range(_CHECKED))))
    trainer.train()
    return recorder.report()


def _lengths(settings: SFTSettings) -> list[int]:
    from peers.our_sft import stored_lengths

    return stored_lengths(settings.shards)


def _compared(trainer: Any, rows: Dataset) -> dict[str, Any]:
    """Loss of the first rows before training, over the whole vocabulary and over what a policy can say."""
    import torch

    batch = trainer.data_collator(list(rows))
    labels, valid = batch["labels"], batch["attention_mask"].bool()
    with torch.no_grad():
        trainer.model.train()
        loss = float(trainer.compute_loss(trainer.model, dict(batch)))
        logits = trainer.model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        logits[..., list(forbidden_token_ids(trainer.model.config))] = -torch.inf
        targets = labels[:, 1:]
        policy_loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100
        )
    trainer._metrics["train"].clear()
    pairs = [
        (ids[kept], label[kept] != -100) for ids, label, kept in zip(batch["input_ids"], labels, valid, strict=True)
    ]
    return {
        "loss": float(policy_loss),
        "own_loss": loss,
        "digest": digest(pairs),
        "supervised": int((targets != -100).sum()),
    }
