"""``opensearch plan``: what a run will need, told before anything is loaded."""

from __future__ import annotations

import argparse
import json

from opensearch_lightning.composition import compose_config
from opensearch_lightning.planning.clusters import CLUSTERS, find_cluster
from opensearch_lightning.planning.figures import Assumptions, Figures, read_figures
from opensearch_lightning.planning.plan import Plan, make_plan
from opensearch_lightning.planning.report import to_json, to_text
from opensearch_lightning.planning.setup import read_setup

_FIGURES = {
    "rows": (int, "trajectories for fine-tuning"),
    "mean_tokens": (float, "tokens of a trajectory"),
    "sampled_tokens": (float, "of them, those that the policy writes"),
    "prompt_tokens": (float, "of them, those before the first turn"),
    "tool_turns": (float, "tool turns of a trajectory"),
    "images_per_row": (float, "images of a trajectory"),
    "image_pixels": (int, "pixels of an image"),
}
_ASSUMED = {
    "mfu": (float, "model FLOPs over the peak, of training, scoring and prefill"),
    "network": (float, "share of the links' bandwidth that collectives reach"),
    "decoding": (float, "share of the memory's bandwidth that decoding reaches"),
    "tool_seconds": (float, "seconds of a tool call"),
    "tensor_parallel": (int, "GPUs of a server"),
    "max_sequences": (int, "rollouts that a server decodes at once"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``opensearch plan``."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for opensearch train")
    parser.add_argument("--config-dir", help="a folder with configuration groups of your own")
    parser.add_argument("--cluster", default="h20", help=f"one of {', '.join(CLUSTERS)} (default: h20)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    for name, (kind, what) in _FIGURES.items():
        default = getattr(Figures, name)
        parser.add_argument(
            _flag(name), type=kind, metavar="N", help=f"{what} (default: that of the data, or {default})"
        )
    for name, (kind, what) in _ASSUMED.items():
        default = getattr(Assumptions, name)
        parser.add_argument(_flag(name), type=kind, metavar="N", default=default, help=f"{what} (default: {default})")


def run(args: argparse.Namespace) -> int:
    """Print the plan of a configuration.

    Raises:
        OpenSearchError: the configuration or a figure cannot be used; one line that says what to change.
    """
    plan = plan_of(args)
    print(json.dumps(to_json(plan), indent=1) if args.json else to_text(plan), end="\n" if args.json else "")
    return 0


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan that parsed arguments ask for."""
    cluster = find_cluster(args.cluster)
    config = compose_config(args.overrides, extra_dir=args.config_dir)
    figures = read_figures(config, {name: getattr(args, name) for name in _FIGURES})
    assumed = Assumptions(**{name: getattr(args, name) for name in _ASSUMED})
    return make_plan(read_setup(config), figures, cluster, assumed)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
