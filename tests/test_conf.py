"""Every YAML file that ships is composed, and everything it names is built on a tiny world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opensearch_lightning.composition import compose_config, config_dir, groups, make
from opensearch_lightning.dashboards.ablation import ARMS
from opensearch_lightning.errors import ConfigurationError, OpenSearchError
from opensearch_lightning.launch import build
from opensearch_lightning.tools import CallKey, ImageBook
from opensearch_lightning.types import Action

GROUPS = ("experiment", "model", "module", "data", "rollout", "tools", "reward", "callbacks", "trainer", "logger")
EXPERIMENTS = sorted(
    path.relative_to(config_dir() / "experiment").with_suffix("").as_posix()
    for path in (config_dir() / "experiment").glob("**/*.yaml")
)
SEVEN = [
    "text_search",
    "image_search",
    "layout_parsing",
    "crop",
    "sharpen",
    "super_resolution",
    "perspective_correct",
]
NEEDS_GPU = {"sft_8b", "sft_32b", "sft_30b_a3b", "sft_lora", "grpo_8b", "grpo_30b_a3b", "grpo_1node"}
OPTIONS = [
    (group, option) for group, options in groups().items() if not group.startswith("experiment") for option in options
]
NEEDED = {
    "replay": ["tools.executor.path=calls.sqlite"],
    "clip": ["tools.executor.tools.image_search.index.weights=clip.pt"],
    "edsr": ["tools.executor.tools.super_resolution.network.weights=edsr.pb"],
}
"""What an option leaves to the user."""


def nodes(config: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Dotted name and node of everything with a ``_target_``."""
    if isinstance(config, dict):
        if "_target_" in config:
            yield name, config
        for key, value in config.items():
            yield from nodes(value, f"{name}.{key}" if name else key)
    elif isinstance(config, list):
        for index, value in enumerate(config):
            yield from nodes(value, f"{name}[{index}]")


def test_the_groups_are_those_documented() -> None:
    on_disk = {path.name for path in config_dir().iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert on_disk == set(GROUPS)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_composes(experiment: str) -> None:
    config = compose_config([f"experiment={experiment}"])
    assert config["name"] == experiment
    assert config["run_dir"] == f"runs/{experiment}"
    targets = dict(nodes(config))
    assert {"model.policy", "model.processor", "data", "module", "trainer"} <= targets.keys()


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_composes_in_a_run_that_uses_its_group(group: str, option: str) -> None:
    experiment = "quickstart_sft" if option == "replay" else "quickstart_grpo"
    needed = NEEDED.get(option, [])
    config = compose_config(
        [f"experiment={experiment}", *tools_for(group), f"{group}={option}", "model.path=x", *needed]
    )
    assert config[group.partition("/")[0]]


def tools_for(group: str) -> list[str]:
    """What a group inside ``tools`` needs beside it."""
    return ["tools=offline"] if group.startswith("tools/") else []


@pytest.mark.parametrize("option", [option for group, option in OPTIONS if group == "tools" and option != "replay"])
def test_every_set_of_tools_is_built(option: str, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("SERPER_API_KEY", "JINA_API_KEY"):
        monkeypatch.setenv(key, "key-of-a-test")
    config = compose_config([f"tools={option}", f"data_dir={tiny['root']}"])
    executor = make("tools.executor", config["tools"]["executor"], {})
    assert [schema["function"]["name"] for schema in executor.schemas] == SEVEN


@pytest.mark.parametrize(
    ("group", "option"),
    [(group, option) for group, option in OPTIONS if group.startswith("tools/") and option != "clip"],
)
def test_every_tool_is_chosen_alone(
    group: str, option: str, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("SERPER_API_KEY", "JINA_API_KEY"):
        monkeypatch.setenv(key, "key-of-a-test")
    config = compose_config(["tools=offline", f"{group}={option}", f"data_dir={tiny['root']}", *NEEDED.get(option, [])])
    place = group.partition("/")[2]
    others = compose_config(["tools=offline", f"data_dir={tiny['root']}"])["tools"]["executor"]["tools"]
    chosen = config["tools"]["executor"]["tools"]
    assert {name: node for name, node in chosen.items() if name != place} == {
        name: node for name, node in others.items() if name != place
    }
    executor = make("tools.executor", config["tools"]["executor"], {})
    assert [schema["function"]["name"] for schema in executor.schemas] == SEVEN


async def test_a_recorded_run_is_replayed_through_the_configuration(tmp_path: Path, tiny: dict[str, Path]) -> None:
    experiment = ["experiment=quickstart_grpo", f"data_dir={tiny['root']}", "tools.executor.cache=null"]
    path = tmp_path / "calls.sqlite"
    recorder = f"tools.executor.recorder={{_target_:opensearch_lightning.tools.Recorder,path:{path}}}"
    action = Action(kind="tool_call", name="text_search", arguments={"q": "capital"}, well_formed=True)
    texts = []
    for overrides in ([recorder], ["tools=replay", f"tools.executor.path={path}"]):
        node = compose_config([*experiment, *overrides])["tools"]["executor"]
        executor = make("tools.executor", {**node, "faults": None}, {})
        result = await executor.execute(action, ImageBook(), CallKey(task_id="task", rollout=0, step=0))
        await executor.aclose()
        assert result.error is None
        texts.append((result.text, [schema["function"]["name"] for schema in executor.schemas]))
    assert texts[0] == texts[1]
    assert texts[0][1] == SEVEN


def test_a_setting_that_no_executor_has_is_refused_in_a_replay(tmp_path: Path) -> None:
    overrides = ["tools=replay", f"tools.executor.path={tmp_path}/calls.sqlite", "+tools.executor.tiemout_s=3"]
    with pytest.raises(ConfigurationError, match="no setting 'tiemout_s'"):
        make("tools.executor", compose_config(overrides)["tools"]["executor"], {})


@pytest.mark.parametrize("place", SEVEN)
def test_each_place_can_be_left_empty(place: str, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("SERPER_API_KEY", "JINA_API_KEY"):
        monkeypatch.setenv(key, "key-of-a-test")
    for tools in ("online", "offline_faults"):
        config = compose_config([f"tools={tools}", f"data_dir={tiny['root']}", f"tools.executor.tools.{place}=null"])
        executor = make("tools.executor", config["tools"]["executor"], {})
        assert [schema["function"]["name"] for schema in executor.schemas] == [name for name in SEVEN if name != place]


def test_a_key_that_is_missing_is_named_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    config = compose_config(["tools=online"])
    with pytest.raises(ConfigurationError, match="SERPER_API_KEY is not set: export SERPER_API_KEY="):
        make("tools.executor", config["tools"]["executor"], {})


def test_a_place_is_left_empty_and_another_is_added(tiny: dict[str, Path]) -> None:
    config = compose_config(
        [
            "tools=offline",
            f"data_dir={tiny['root']}",
            "tools.executor.tools.crop=null",
            "+tools.executor.tools.mine._target_=tests.tools.fakes.FakeTool",
        ]
    )
    executor = make("tools.executor", config["tools"]["executor"], {})
    names = [schema["function"]["name"] for schema in executor.schemas]
    assert names == [*(name for name in SEVEN if name != "crop"), "fake"]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_target_exists(experiment: str) -> None:
    from hydra.utils import get_object

    for name, node in nodes(compose_config([f"experiment={experiment}"])):
        assert callable(get_object(node["_target_"])), name


def overrides_of_tiny_run(experiment: str, tmp_path: Path, tiny: dict[str, Path]) -> list[str]:
    data = "sft" if "sft" in experiment else "rl"
    # The tiny vocabulary makes more tokens of a trajectory than the quickstart's.
    longer = ["data.max_length=4096"] if data == "sft" else []
    return [
        *longer,
        f"experiment={experiment}",
        f"run_dir={tmp_path / 'run'}",
        f"model.path={tiny['model']}",
        f"data_dir={tiny['root']}",
        f"data.shards={tiny[data]}",
        f"data.val_shards={tiny[data]}",
    ]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_everything_that_needs_no_gpu_is_built(
    experiment: str, tmp_path: Path, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("SERPER_API_KEY", "JINA_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(key, "key-of-a-test")
    overrides = overrides_of_tiny_run(experiment, tmp_path, tiny)
    if compose_config(overrides)["model"]["policy"]["float32_router"]:
        # the tiny policy is no mixture of experts
        overrides += ["model.policy.float32_router=false"]
        overrides += ["module.router_aux_coefficient=0", "module.router_z_coefficient=0"]
    if experiment in NEEDS_GPU:
        # The strategy needs CUDA and DeepSpeed; all the rest is built as it stands there.
        overrides += ["trainer.strategy=auto"]
        overrides += ["trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=1",
                      "trainer.precision=bf16-true", "model.policy.attn_implementation=sdpa"]  # fmt: skip
    run = build(compose_config(overrides))
    assert run.module.policy is run.shared["policy"]
    assert run.trainer.max_steps == compose_config(overrides)["trainer"]["max_steps"]
    assert not (tmp_path / "run").exists(), "building a run must not write"


def test_shared_objects_are_one(tmp_path: Path, tiny: dict[str, Path]) -> None:
    run = build(compose_config(overrides_of_tiny_run("quickstart_grpo", tmp_path, tiny)))
    by_name = {type(callback).__name__: callback for callback in run.trainer.callbacks}
    assert run.shared["engine"].policy is run.module.policy
    assert by_name["RolloutGeneration"].engine is run.shared["engine"]
    assert by_name["ToolExecution"].executor is run.shared["executor"]


def test_no_configuration_object_reaches_a_constructor() -> None:
    node = {"_target_": "builtins.dict", "a": {"b": [1, {"c": 2}]}}
    built = make("probe", node, {})
    assert type(built["a"]) is dict
    assert type(built["a"]["b"]) is list
    assert type(built["a"]["b"][1]) is dict


def test_an_argument_may_share_objects_too() -> None:
    part = {"_target_": "builtins.dict", "_shared_": {"a": "policy"}, "b": 1}
    built = make("probe", {"_target_": "builtins.dict", "part": part, "c": 2}, {"policy": "shared"})
    assert built == {"part": {"a": "shared", "b": 1}, "c": 2}
    with pytest.raises(ConfigurationError, match=r"probe\.part needs the shared object 'engine'"):
        make("probe", {"_target_": "builtins.dict", "part": part | {"_shared_": {"a": "engine"}}}, {"policy": "shared"})


def test_empty_tool_list_is_refused_before_anything_is_written(tmp_path: Path, tiny: dict[str, Path]) -> None:
    overrides = [*overrides_of_tiny_run("quickstart_grpo", tmp_path, tiny), "tools.executor.tools=[]"]
    with pytest.raises(
        ConfigurationError, match=r"tools\.executor\.tools=\[\] gives an empty list of tools .*leave it"
    ):
        build(compose_config(overrides))
    config = compose_config(overrides[:-1])
    config["tools"]["executor"]["tools"] = []
    with pytest.raises(ConfigurationError, match=r"tools\.executor\.tools is \[\], an empty tool list; leave it out"):
        build(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("callbacks.rollout_generation.group_size=1.5", r"rollout_generation\.group_size is 1\.5; set a whole number$"),
        (
            "+callbacks.rollout_generation.counted_errors=timeout",
            r"rollout_generation\.counted_errors is 'timeout'; set a list, as \[a, b\]$",
        ),
        ("callbacks.trajectory_log.directory=/dev/null/logs", "callbacks.trajectory_log: .*/dev/null is a file"),
        ("data.val_tasks=0", "data.val_tasks is 0; set 1 or more"),
        ("module.optimizer.lr=-1", "lr is -1; set a learning rate of 0 or more"),
    ],
)
def test_values_of_the_wrong_kind_are_named(override: str, message: str, tmp_path: Path, tiny: dict[str, Path]) -> None:
    overrides = [*overrides_of_tiny_run("quickstart_grpo", tmp_path, tiny), override]
    with pytest.raises(ConfigurationError, match=message):
        build(compose_config(overrides))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/nowhere/model", "/nowhere/model"),
        ("tools.executor.tools.text_search.world.path=/nowhere/world", "/nowhere/world"),
    ],
)
def test_missing_files_are_named_with_a_remedy(
    override: str, message: str, tmp_path: Path, tiny: dict[str, Path]
) -> None:
    overrides = [*overrides_of_tiny_run("quickstart_grpo", tmp_path, tiny), override]
    with pytest.raises(OpenSearchError, match=message) as caught:
        build(compose_config(overrides))
    assert "\n" not in str(caught.value)


def test_experiment_of_ones_own_builds_on_one_that_ships(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [quickstart_grpo]\nname: mine\nreward: {alpha: 0.5}\n"
    )
    config = compose_config(["experiment=mine"], extra_dir=tmp_path)
    assert config["run_dir"] == "runs/mine"
    assert config["reward"]["alpha"] == 0.5
    assert config["module"]["_target_"].endswith("FatalAwareGRPO")


def test_table_3b() -> None:
    """The arms of the ablation differ in mask and clamp, and in nothing else."""
    arms = {arm: compose_config([f"experiment=ablation/{arm}", "run_dir=run", "logger=csv"]) for arm in ARMS}
    settings = {}
    for arm, config in arms.items():
        assert config.pop("name") == f"ablation/{arm}"
        settings[arm] = (config["callbacks"]["fatal_masking"].pop("mode"), config["module"].pop("clamp_fatal"))
    assert settings == {
        "vanilla": ("none", False),
        "hard_mask": ("hard", False),
        "fatal_mask": ("fatal", False),
        "fatal_clamp": ("fatal", True),
    }
    assert all(config == arms["vanilla"] for config in arms.values())
    executor = arms["vanilla"]["tools"]["executor"]
    assert executor["faults"]["outages"]["image_search"]["rate"] == 0.55
    assert arms["vanilla"]["callbacks"]["advantage_logging"]["path"] == "run/advantages.csv"


@pytest.mark.parametrize(
    ("experiment", "group_size", "mini_batch", "micro_batch_tokens", "save_every"),
    [("grpo_8b", 8, 64, 74_576, 50), ("grpo_30b_a3b", 16, 128, 74_596, 1)],
)
def test_table_5(experiment: str, group_size: int, mini_batch: int, micro_batch_tokens: int, save_every: int) -> None:
    """The values of the paper that the large experiments claim to carry."""
    config = compose_config([f"experiment={experiment}"])
    data, module, trainer = config["data"], config["module"], config["trainer"]
    rollouts = config["callbacks"]["rollout_generation"]
    assert (data["prompts_per_step"], rollouts["group_size"]) == (256, group_size)
    assert (module["mini_batch_prompts"], module["max_tokens_per_micro_batch"]) == (mini_batch, micro_batch_tokens)
    assert rollouts["max_response_tokens"] == 70_000
    assert (rollouts["temperature"], rollouts["top_p"], rollouts["top_k"]) == (0.7, 1.0, 0)
    assert rollouts["val_top_p"] == 0.95
    assert (module["advantage"], module["aggregation"]) == ("rloo", "seq-mean-token-sum")
    assert (module["optimizer"]["lr"], module["clip"]) == (1e-6, [0.2, 0.28])
    assert (module["clamp_fatal"], config["callbacks"]["fatal_masking"]["mode"]) == (True, "fatal")
    assert (config["seed"], data["seed"], rollouts["seed"]) == (3407, 3407, 3407)
    assert config["callbacks"]["last_checkpoint"]["every_n_steps"] == save_every
    assert trainer["val_check_interval"] == 10
    assert trainer["max_steps"] == 200 * 256 // mini_batch
    assert config["tools"]["executor"]["max_concurrency"] == 2048
    assert config["trainer"]["strategy"]["config"]["zero_optimization"]["stage"] == 3
    ranks = trainer["num_nodes"] * trainer["devices"]
    assert ranks == 32
    assert data["prompts_per_step"] % ranks == data["val_tasks"] % ranks == 0


@pytest.mark.parametrize(
    ("size", "model"),
    [
        ("8b", "Qwen3-VL-8B-Instruct"),
        ("32b", "Qwen3-VL-32B-Instruct"),
        ("30b_a3b", "Qwen3-VL-30B-A3B-Instruct"),
    ],
)
def test_table_4(size: str, model: str) -> None:
    """The values of the paper that the large experiments claim to carry."""
    sft = compose_config([f"experiment=sft_{size}"])
    assert sft["model"]["path"] == f"models/{model}"
    assert (sft["model"]["processor"]["max_pixels"], sft["model"]["processor"]["video_max_pixels"]) == (262_144, 16_384)
    policy = sft["model"]["policy"]
    assert policy["train_vision"] and policy["train_projector"] and policy["train_language"]
    assert policy["lora"] is None
    assert policy["gradient_checkpointing"]
    assert (policy["dtype"], sft["trainer"]["precision"]) == ("bfloat16", "bf16-mixed")
    assert sft["trainer"]["strategy"]["config"]["zero_optimization"]["stage"] == 3
    assert sft["module"]["micro_batch"] is None
    assert sft["trainer"]["log_every_n_steps"] == 5
    assert sft["callbacks"]["last_checkpoint"]["every_n_steps"] == sft["trainer"]["val_check_interval"] == 400
    assert sft["module"]["optimizer"]["lr"] == 2e-5
    assert (sft["module"]["schedule"], sft["module"]["warmup_ratio"]) == ("cosine", 0.1)
    assert sft["data"]["max_length"] == 32_000
    assert sft["trainer"]["num_nodes"] * sft["trainer"]["devices"] * sft["data"]["batch_size"] == 256
    assert sft["trainer"]["max_steps"] == -(-8 * 36_592 // 256)


def test_adapters_of_the_small_experiment(tmp_path: Path, tiny: dict[str, Path]) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    overrides = [
        *overrides_of_tiny_run("sft_lora", tmp_path, tiny),
        "trainer.accelerator=cpu",
        "model.policy.attn_implementation=sdpa",
        "model.policy.lora.r=3",
    ]
    run = build(compose_config(overrides))
    trained = {name: p.shape for name, p in run.module.policy.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name and 3 in shape for name, shape in trained.items())
    assert run.shared["processor"].image_processor.size["longest_edge"] == 262_144
