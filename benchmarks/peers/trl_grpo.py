"""The measured run of TRL's GRPOTrainer."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from peers.measure import Recorder, Settings, digest
from peers.search_task import SYSTEM_PROMPT, TURNS, Tools, make_tasks, make_towns
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

_UNSAYABLE = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


class _TimedTrainer(GRPOTrainer):
    """Takes the seconds of each part; ``generation`` includes the tools, which run inside of it."""

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        self.recorder = recorder
        self.step_figures: dict[str, float] = {}
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.timed("training_step_s"):
            return super().training_step(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.timed("forward_s"):
            return super().compute_loss(*args, **kwargs)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.timed("prepare_s"):
            return super()._prepare_inputs(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.timed("sampling_s"):
            return super()._generate_single_turn(*args, **kwargs)

    def _generate(self, prompts: list[Any]) -> Any:
        with self.recorder.timed("generation_s"):
            result = super()._generate(prompts)
        prompt_ids, completion_ids, tool_mask, completions = result[:4]
        self.recorder.figures.setdefault("prompts", digest([list(map(int, ids)) for ids in prompt_ids]))
        turns = [sum(message["role"] == "assistant" for message in completion) for completion in completions]
        self.step_figures = {
            "rollouts": len(turns),
            "turns": sum(turns) / len(turns),
            "whole": sum(count == TURNS for count in turns) / len(turns),
            "sampled_tokens": sum(map(sum, tool_mask)),
            "prompt_tokens": sum(map(len, prompt_ids)),
            "completion_tokens": sum(map(len, completion_ids)),
        }
        return result


class _Record(TrainerCallback):
    """Sets how long the tools take and keeps the figures of each step."""

    def __init__(self, recorder: Recorder, tools: Tools, times: list[float]) -> None:
        self._recorder, self._tools, self._times = recorder, tools, times
        self.trainer: _TimedTrainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tools.seconds = self._times[state.global_step]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.end_step(tool_s=self._tools.seconds, **self.trainer.step_figures)


def run(settings: Settings) -> dict[str, Any]:
    """Train for the steps of ``settings`` and tell what was measured."""
    recorder = Recorder()
    towns = make_towns(settings.task_count())
    tools = Tools(towns, coroutines=settings.coroutines)
    processor = AutoProcessor.from_pretrained(settings.policy, padding_side="left", local_files_only=True)
    # the trainer knows by the template's very text how calls are read; it renders the same tokens
    processor.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3_vl.jinja").read_text()
    policy = AutoModelForImageTextToText.from_pretrained(
        settings.policy, dtype="float32", attn_implementation="sdpa", local_files_only=True
    )
    rollouts = settings.prompts * settings.group
    if rollouts % settings.micro_batch:
        raise SystemExit(f"{rollouts} rollouts cannot be split into micro-batches of {settings.micro_batch}")
    config = GRPOConfig(
        output_dir=str(Path(settings.folder) / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=rollouts // settings.micro_batch,
        num_generations=settings.group,
        max_completion_length=settings.completion_tokens,
        max_tool_calling_iterations=TURNS - 1,
        temperature=1.0,
        # this package's engine never says them either: a pad without its image cannot be trained on
        generation_kwargs={"suppress_tokens": processor.tokenizer.convert_tokens_to_ids(list(_UNSAYABLE))},
        beta=0.0,
        loss_type="grpo",
        epsilon=0.2,
        epsilon_high=0.28,
        optim="adamw_torch",
        weight_decay=0.0,
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=len(settings.tool_times()),
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings.seed,
    )
    record = _Record(recorder, tools, settings.tool_times())

    def reward(prompts: Sequence[Any], **columns: Any) -> list[float]:
        return [settings.reward(row) for row in range(len(prompts))]

    trainer = _TimedTrainer(
        recorder,
        policy,
        reward,
        config,
        Dataset.from_list([_row(task) for task in make_tasks(towns)]),
        processing_class=processor,
        tools=tools.functions(),
        callbacks=[record],
    )
    record.trainer = trainer
    trainer.train()
    return recorder.report()


def _row(task: Any) -> dict[str, Any]:
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task.question}]
    return {"prompt": prompt, "images": [Image.open(io.BytesIO(file)).convert("RGB") for file in task.images]}
