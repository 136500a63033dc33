"""A plan as text to read, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from opensearch_lightning.planning.memory import Item
from opensearch_lightning.planning.paper import DAY, Comparison
from opensearch_lightning.planning.plan import Plan
from opensearch_lightning.planning.rollouts import Rollouts

_HOUR, _MINUTE = 3600.0, 60.0


def to_text(plan: Plan) -> str:
    """The plan in sections: parameters, memory, data, time, assumptions, the paper's run."""
    parts = [_head(plan), _parameters(plan), _memory(plan), _node(plan), _data(plan), _time(plan), _assumptions(plan)]
    if plan.comparison is not None:
        parts.append(_paper(plan, plan.comparison))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON: counts, bytes and seconds."""
    setup, memory, training = plan.setup, plan.memory, plan.training
    figures = {**dataclasses.asdict(plan.figures), "lengths": None}
    return {
        "name": setup.name,
        "kind": setup.kind,
        "model": setup.model,
        "cluster": dataclasses.asdict(plan.cluster),
        "nodes": setup.nodes,
        "training_gpus": setup.ranks,
        "rollout_gpus": setup.servers * plan.assumed.tensor_parallel,
        "parameters": {
            "total": setup.parameters,
            "active": setup.shape.active,
            "trained": setup.trained_total,
            "by_part": setup.shape.parameters(),
            "trained_by_part": dict(setup.trained),
        },
        "gpu_memory": {
            "items": [dataclasses.asdict(item) for item in memory.gpu],
            "reserve": memory.reserve,
            "peak": memory.peak,
            "fits": plan.fits,
            "remedies": plan.remedies,
        },
        "node_memory": {"items": [dataclasses.asdict(item) for item in memory.node], "peak": memory.node_peak},
        "data": figures,
        "training": {
            **dataclasses.asdict(training),
            "bound": training.bound,
            "seconds": training.seconds,
            "seconds_without_overlap": training.seconds_apart,
        },
        "scoring_seconds": plan.scoring,
        "rollouts": None
        if plan.rollouts is None
        else {**dataclasses.asdict(plan.rollouts), "seconds": plan.rollouts.seconds},
        "steps": plan.steps,
        "step_seconds": plan.step_seconds,
        "seconds": plan.seconds,
        "assumptions": dataclasses.asdict(plan.assumed),
        "paper": None
        if plan.comparison is None
        else {**dataclasses.asdict(plan.comparison), "ratio": plan.comparison.ratio},
    }


def _head(plan: Plan) -> list[str]:
    setup, cluster = plan.setup, plan.cluster
    zero = f"ZeRO-{setup.zero.stage}" if setup.zero.stage else "no sharding"
    ranks = f"{setup.ranks} {cluster.name.upper()} ({_counted(setup.nodes, 'node')} × {setup.ranks_per_node}), {zero}"
    if setup.sequence_parallel > 1:
        ranks += f", {setup.sequence_parallel} ranks a row"
    servers = f", {setup.servers} servers of {plan.assumed.tensor_parallel} GPUs beside" if setup.servers else ""
    what = "supervised fine-tuning" if setup.kind == "sft" else "GRPO"
    return [f"{setup.name}: {what} of {setup.model} on {ranks}{servers}"]


def _parameters(plan: Plan) -> list[str]:
    setup = plan.setup
    counts, active = setup.shape.parameters(), setup.shape.active_parameters()
    rows: list[tuple[str, ...]] = [
        (part, _millions(count), _millions(setup.trained.get(part, 0)), _millions(active[part]))
        for part, count in counts.items()
        if count
    ]
    if setup.adapters:
        rows.append(("adapters", *[_millions(setup.adapters)] * 3))
    total = (setup.parameters, setup.trained_total, setup.shape.active + setup.adapters)
    rows.append(("all", *map(_millions, total)))
    return _table(("parameters, millions", "all", "trained", "active"), rows)


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    rows = [(item.name, _gigabytes(item.bytes), _when(item)) for item in memory.gpu]
    rows.append(("CUDA, NCCL, fragmentation", _gigabytes(memory.reserve), ""))
    rows.append(("most at one moment", _gigabytes(memory.peak), f"of {_gigabytes(plan.cluster.memory)}"))
    lines = _table(("GPU memory, GB", "", ""), rows)
    if plan.fits:
        return [*lines, "It fits."]
    told = plan.remedies or [
        "no change of one or two settings is enough; take more nodes and a shorter data.max_length"
    ]
    return [*lines, "IT DOES NOT FIT. Instead:", *(f"  {remedy}" for remedy in told)]


def _when(item: Item) -> str:
    told = {"always": "", "pass": "a pass runs", "update": "the optimizer steps", "rollout": "rollouts run"}[item.when]
    return f"while {told}" if told else ""


def _node(plan: Plan) -> list[str]:
    told = {"always": "", "pass": "until training begins"}
    rows = [(item.name, _gigabytes(item.bytes), told[item.when]) for item in plan.memory.node]
    rows.append(("most at one moment", _gigabytes(plan.memory.node_peak), "without data and caches"))
    return _table(("main memory of a node, GB", "", ""), rows)


def _data(plan: Plan) -> list[str]:
    figures, training, setup = plan.figures, plan.training, plan.setup
    per_step = training.updates_per_step
    rows = [
        ("steps", f"{plan.steps:,.0f}", f"{training.updates:,} updates" if per_step > 1 else ""),
        ("trajectories of a step", f"{training.trajectories * per_step:,}", ""),
        (
            "tokens of a step",
            f"{training.tokens * per_step:,.0f}",
            "a shared prompt counted once" if setup.group_size else "",
        ),
        ("tokens of the run", f"{training.tokens * training.updates:,.0f}", ""),
    ]
    if setup.kind == "sft":
        epochs = training.trajectories * training.updates / figures.rows
        rows.append(("epochs", f"{epochs:.2f}", f"of {figures.rows:,} rows"))
    told = (
        f"a trajectory: {figures.mean_tokens:,.0f} tokens, {figures.sampled_tokens:,.0f} of them sampled, "
        f"{figures.tool_turns:.3g} tool turns, {figures.images_per_row:.3g} images of {figures.image_pixels:,} pixels"
    )
    return [*_table(("data", "", ""), rows), told, f"({figures.origin})"]


def _time(plan: Plan) -> list[str]:
    training = plan.training
    rows = []
    if plan.rollouts is not None:
        rows += _rollouts(plan.rollouts)
    if plan.scoring:
        rows.append(("log-probabilities before the updates", _duration(plan.scoring), ""))
    rows += [
        (
            "an update: computing",
            _duration(training.compute),
            f"{training.flops:.3g} FLOPs, {_counted(training.passes, 'pass', 'passes')} a rank",
        ),
        (
            "an update: communication, at least",
            _duration(training.communication),
            f"{_gigabytes(training.gathered)} GB to each rank",
        ),
        (
            "an update",
            _duration(training.seconds),
            f"bound by {training.bound}; {_duration(training.seconds_apart)} if nothing overlaps",
        ),
        *_stragglers(plan),
        ("a step", _duration(plan.step_seconds), ""),
        ("the run", _duration(plan.seconds), f"{plan.steps:,.0f} steps"),
    ]
    return _table(("time", "", ""), rows)


def _stragglers(plan: Plan) -> Iterator[tuple[str, str, str]]:
    training = plan.training
    if training.compute_longest:
        what = f"one rank has {plan.setup.max_length:,} tokens a row"
        yield "an update with the longest rows", _duration(training.compute_longest), what
    if plan.setup.nodes > 1:
        needed = f"{training.network_needed / 1e9:,.2g} GB/s"
        yield "network of a node that keeps up", needed, "below it, communication is what an update waits for"


def _rollouts(rollouts: Rollouts) -> list[tuple[str, str, str]]:
    speed = f"{rollouts.tokens_per_second:,.0f} tokens/s of {rollouts.engines} engines, {rollouts.at_once} at once"
    return [
        ("rollouts: decoding", _duration(rollouts.decoding), f"{rollouts.sampled:,.0f} tokens at {speed}"),
        ("rollouts: prompts and observations", _duration(rollouts.prefill), ""),
        ("rollouts: tools", _duration(rollouts.tools), "of one trajectory; others decode meanwhile"),
    ]


def _assumptions(plan: Plan) -> list[str]:
    assumed, cluster = plan.assumed, plan.cluster
    lines = [
        "assumptions",
        f"  utilization (MFU) {assumed.mfu:.0%} of {cluster.flops / 1e12:g} TFLOP/s, recomputed layers not counted",
        f"  {cluster.memory / 1e9:g} GB at {cluster.bandwidth / 1e12:g} TB/s; NVLink {cluster.nvlink / 1e9:g} GB/s a "
        f"GPU, network {cluster.network / 1e9:g} GB/s a node, one way, {assumed.network:.0%} of them reached",
        f"  {cluster.source}",
        "  ranks are level; not counted: validation, checkpoints, waiting for data, padding, traffic of offloading",
    ]
    if plan.rollouts is not None:
        lines.append(
            f"  decoding reaches {assumed.decoding:.0%} of the memory's bandwidth; a tool call takes "
            f"{assumed.tool_seconds:g} s; all rollouts are trained on; no judge is waited for"
        )
    return lines


def _paper(plan: Plan, found: Comparison) -> list[str]:
    run = found.run
    rows = [
        ("estimate", f"{found.estimated_days:.2f} days", f"of {run.updates:,} updates"),
        *(
            [("with the longest rows", f"{found.longest_days:.2f} days", "if every update has one of them")]
            if found.longest_days is not None
            else []
        ),
        (f"paper, {run.where}", f"{run.days:g} days", f"{run.gpus} H20; {run.framework}"),
        ("ratio", f"{found.ratio:.2f}", ""),
    ]
    told = (
        f"In the paper's time training alone would reach {found.implied_mfu:.1%} of the peak, or move "
        f"{found.implied_network / 1e9:.2g} GB/s a node."
    )
    return [*_table(("beside the paper", "", ""), rows), told]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    last_is_note = not head[-1]

    def cells(row: Sequence[str]) -> Iterator[str]:
        for column, (text, width) in enumerate(zip(row, widths, strict=True)):
            is_left = column == 0 or (last_is_note and column == len(row) - 1)
            yield f"{text:<{width}}" if is_left else f"{text:>{width}}"

    title, *body = ("  ".join(cells(row)).rstrip() for row in (head, *rows))
    return [title, *(f"  {line}" for line in body)] if last_is_note else [title, *body]


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _millions(count: float) -> str:
    return f"{count / 1e6:,.2f}"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f}"


def _duration(seconds: float) -> str:
    if seconds >= DAY:
        return f"{seconds / DAY:.2f} days"
    if seconds >= _HOUR:
        return f"{seconds / _HOUR:.1f} h"
    if seconds >= 2 * _MINUTE:
        return f"{seconds / _MINUTE:.1f} min"
    return f"{seconds:.2f} s"
