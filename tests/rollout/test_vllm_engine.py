import asyncio
import base64
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from PIL import Image

from opensearch_lightning.chat import ChatRenderer
from opensearch_lightning.errors import ConfigurationError, DataError, RolloutLost
from opensearch_lightning.models import forbidden_token_ids, load_policy, load_processor
from opensearch_lightning.pictures import read_picture
from opensearch_lightning.rollout import FinishReason, Generation, SamplingParams, SessionKey
from opensearch_lightning.rollout import vllm_server as vllm_server_module
from opensearch_lightning.rollout.noise import turn_seed
from opensearch_lightning.rollout.vllm_engine import VLLMServerEngine, data_url, fold_image_pads
from opensearch_lightning.rollout.weight_files import Writers, weight_files
from tests.rollout.fake_vllm import FakeVLLM, answer


@pytest.fixture(scope="module")
def policy(tiny_model_dir: Path) -> Any:
    return load_policy(tiny_model_dir)


@pytest.fixture(scope="module")
def renderer(tiny_model_dir: Path) -> ChatRenderer:
    return ChatRenderer(load_processor(tiny_model_dir))


@pytest.fixture(scope="module")
def shapes(policy: Any) -> dict[str, list[int]]:
    return {name: list(weight.shape) for name, weight in policy.named_parameters()}


@pytest.fixture(autouse=True)
def soon_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server_module, "_RETRY_SECONDS", (0.0, 0.0, 0.0))


def engine_of(policy: Any, renderer: ChatRenderer, folder: Path, *servers: FakeVLLM, **settings: Any) -> Any:
    addresses = [server.url for server in servers]
    return VLLMServerEngine(policy, renderer, servers=addresses, weight_folder=folder, start_timeout_s=0.2, **settings)


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, 96, 3), dtype=np.uint8))


async def one_turn(
    engine: VLLMServerEngine, task: str = "t", rollout: int = 0, question: str = "Go.", **limits: Any
) -> Generation:
    async with engine.session(SessionKey(task_id=task, rollout=rollout)) as session:
        given = engine.renderer.prompt(None, [question])
        return await session.generate(given.token_ids, given.images, SamplingParams(**limits), 0)


async def test_a_request_holds_what_the_server_needs(
    policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    async with FakeVLLM(renderer, shapes) as server:
        engine = engine_of(policy, renderer, tmp_path, server)
        sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_turn_tokens=8, seed=3)
        key = SessionKey(task_id="t", rollout=2)
        async with engine.session(key) as session:
            prompt = renderer.prompt("Search.", [picture(1), picture(2), "Which?"])
            first = await session.generate(prompt.token_ids, prompt.images, sampling, 0)
            seen = renderer.observation("found", [picture(3)], first_image=3)
            await session.generate(seen.token_ids, seen.images, sampling, 1)
        await engine.aclose()
    assert first == Generation(
        token_ids=server.says, logprobs=[-0.25] * 3, finish=FinishReason.STOP, weight_versions=[0, 0, 0]
    )
    pad = renderer.image_token_id
    one, two = server.requests
    assert one["token_ids"] == fold_image_pads(prompt.token_ids, pad)
    assert two["token_ids"] == [*one["token_ids"], *server.says, *fold_image_pads(seen.token_ids, pad)]
    assert two["token_ids"].count(pad) == 3
    pixels = [np.asarray(read_picture(decoded(part["url"]))) for part in two["content_parts"]]
    assert all((pixel == np.asarray(picture(i))).all() for i, pixel in zip((1, 2, 3), pixels, strict=True))
    asked = dict(one["sampling_params"])
    assert asked.pop("logit_bias") == {str(i): -100.0 for i in forbidden_token_ids(policy.config)}
    assert asked == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "max_tokens": 8,
        "seed": turn_seed(3, key, 0),
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": [renderer.end_of_turn_id],
        "detokenize": False,
    }
    assert two["sampling_params"]["seed"] == turn_seed(3, key, 1)


def left_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def decoded(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


def test_seeds_are_keyed() -> None:
    keys = [SessionKey(task_id=task, rollout=rollout) for task in "ab" for rollout in range(2)]
    seeds = [turn_seed(seed, key, step) for seed in (0, 1) for key in keys for step in range(2)]
    assert len(set(seeds)) == 16
    assert seeds == [turn_seed(seed, key, step) for seed in (0, 1) for key in keys for step in range(2)]
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_why_a_turn_ended(policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path) -> None:
    prompt = len(renderer.prompt(None, ["Go."]).token_ids)
    async with FakeVLLM(renderer, shapes, max_length=prompt + 2) as server:
        engine = engine_of(policy, renderer, tmp_path, server)
        cut = await one_turn(engine, max_turn_tokens=1)
        full = await one_turn(engine, max_turn_tokens=9)
        both = await one_turn(engine, max_turn_tokens=2)
        long, short = await asyncio.gather(
            one_turn(engine, question="Go. " * 30), one_turn(engine, max_turn_tokens=1), return_exceptions=True
        )
        await engine.aclose()
    assert (cut.finish, len(cut.token_ids)) == (FinishReason.LENGTH, 1)
    assert (full.finish, len(full.token_ids)) == (FinishReason.CONTEXT, 2)
    assert both.finish is FinishReason.LENGTH
    assert long == Generation(token_ids=[], logprobs=[], finish=FinishReason.CONTEXT)
    assert short == cut
    assert len(server.requests) == 4


async def test_a_task_stays_on_one_server_and_tasks_are_spread(
    policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    async with FakeVLLM(renderer, shapes) as one, FakeVLLM(renderer, shapes) as two:
        engine = engine_of(policy, renderer, tmp_path, one, two)
        tasks = "abcdef"
        await asyncio.gather(*(one_turn(engine, task, rollout, task) for task in tasks for rollout in range(4)))
        await engine.aclose()
    homes = [{tuple(request["token_ids"]) for request in server.requests} for server in (one, two)]
    assert [len(home) for home in homes] == [3, 3]
    assert not homes[0] & homes[1]


FAILURES = {
    "status": (web.json_response({"error": {"message": "out of\nmemory", "code": 500}}, status=500), "500: out of mem"),
    "no json": (web.Response(text="<html>"), "no JSON"),
    "no logprobs": ({"choices": [{"token_ids": [5], "logprobs": None}], "usage": {}}, "answered something else"),
    "aborted": (answer([100], finish="abort", prompt_tokens=9), "'abort'"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_loses_this_rollout_only(
    name: str, policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    broken, message = FAILURES[name]
    async with FakeVLLM(renderer, shapes) as server:
        server.break_with["/inference/v1/generate"] = [broken]
        engine = engine_of(policy, renderer, tmp_path, server)
        with pytest.raises(RolloutLost, match=message) as caught:
            await one_turn(engine)
        assert (await one_turn(engine)).finish is FinishReason.STOP
        await engine.aclose()
    assert server.url in str(caught.value)
    assert len(server.calls) == len(["/server_info", "checkpoint_weights", "generate", "generate"])


async def test_a_broken_connection_is_tried_again_and_a_dead_server_is_avoided(
    policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    async with FakeVLLM(renderer, shapes) as one, FakeVLLM(renderer, shapes) as two:
        engine = engine_of(policy, renderer, tmp_path, one, two)
        one.break_with["/inference/v1/generate"] = [None, None]
        assert (await one_turn(engine)).finish is FinishReason.STOP
        one.break_with["/inference/v1/generate"] = [None] * 4
        with pytest.raises(RolloutLost, match=f"{one.url}/inference/v1/generate cannot be reached"):
            await one_turn(engine)
        done = await asyncio.gather(*(one_turn(engine, task) for task in "abc"))
        await engine.aclose()
    assert len(two.requests) == len(done) == 3


async def test_a_server_that_does_not_answer_in_time(
    policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    class Slow(FakeVLLM):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            if "generate" in request.path:
                await asyncio.Event().wait()
            return await super().handle(request)

    async with Slow(renderer, shapes) as server:
        engine = engine_of(policy, renderer, tmp_path, server, request_timeout_s=0.3)
        with pytest.raises(RolloutLost, match="did not answer within 0.3 s"):
            await one_turn(engine)
        await engine.aclose()


async def test_a_sampled_vision_token_loses_the_rollout(
    policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    async with FakeVLLM(renderer, shapes) as server:
        server.says = [100, renderer.image_token_id, renderer.end_of_turn_id]
        engine = engine_of(policy, renderer, tmp_path, server)
        with pytest.raises(RolloutLost, match="sampled a vision token"):
            await one_turn(engine)
        await engine.aclose()


async def test_a_server_that_expands_images_otherwise_is_refused(
    policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    async with FakeVLLM(renderer, shapes) as server:
        server.extra_prompt_tokens = 1
        engine = engine_of(policy, renderer, tmp_path, server)
        with pytest.raises(ConfigurationError, match="image processor included"):
            await one_turn(engine)
        await engine.aclose()


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("dev_mode", False, "start it with VLLM_SERVER_DEV_MODE=1"),
        ("logprobs_mode", "raw_logprobs", "gives raw_logprobs.*--logprobs-mode processed_logprobs"),
        ("extension", None, "--worker-extension-cls opensearch_lightning.vllm_worker.WeightFiles"),
        ("shapes", {}, "no folder of safetensors files"),
        ("max_length", 77, "differ in model, dtype or max_model_len"),
    ],
)
async def test_a_server_started_otherwise_is_refused(
    attribute: str, value: Any, message: str, policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    async with FakeVLLM(renderer, shapes) as right, FakeVLLM(renderer, shapes) as wrong:
        setattr(wrong, attribute, value)
        engine = engine_of(policy, renderer, tmp_path, right, wrong)
        with pytest.raises(ConfigurationError, match=message):
            await one_turn(engine)
        await engine.aclose()


async def test_no_server_at_all(policy: Any, renderer: ChatRenderer, tmp_path: Path) -> None:
    engine = VLLMServerEngine(policy, renderer, servers=["http://127.0.0.1:9"], start_timeout_s=0.1)
    with pytest.raises(ConfigurationError, match=r"no vLLM server answered at http://127.0.0.1:9 within 0.1 s; start"):
        await one_turn(engine)
    await engine.aclose()


async def test_an_update_in_order(policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path) -> None:
    async with FakeVLLM(renderer, shapes) as server:
        engine = engine_of(policy, renderer, tmp_path, server, max_file_bytes=200_000)
        await asyncio.to_thread(engine.update_weights, policy.named_parameters(), 7)
        generation = await one_turn(engine)
        await engine.aclose()
    assert engine.weight_version == 7
    assert generation.weight_versions == [7, 7, 7]
    loads = len(server.files)
    assert loads > 1
    assert server.calls == [
        "/server_info?config_format=json",
        "checkpoint_weights",
        "/pause?mode=keep",
        "start_weight_files",
        *["load_weight_file"] * loads,
        "finish_weight_files",
        "/reset_prefix_cache?reset_running_requests=true",
        "/reset_encoder_cache",
        "/update_weight_version",
        "/resume",
        "/inference/v1/generate",
    ]
    own = dict(policy.named_parameters())
    assert server.weights.keys() == own.keys()
    assert all(torch.equal(server.weights[name], own[name]) for name in own)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("what", ["unknown", "missing", "shape"])
async def test_weights_of_another_model_touch_no_server(
    what: str, policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    given = dict(policy.named_parameters())
    first = next(iter(given))
    if what == "unknown":
        given = {"model.wrong": torch.zeros(1), **given}
    elif what == "missing":
        del given[first]
    else:
        given[first] = given[first][:1]
    message = {"unknown": "model.wrong is none", "missing": f"{first} is missing, 1", "shape": f"{first} has the shape"}
    read: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in given.items():
            read.append(name)
            yield name, weight

    async with FakeVLLM(renderer, shapes) as server:
        engine = engine_of(policy, renderer, tmp_path, server)
        with pytest.raises(ConfigurationError, match=message[what]):
            await asyncio.to_thread(engine.update_weights, weights(), 1)
        assert (await one_turn(engine)).weight_versions == [0, 0, 0]
        await engine.aclose()
    assert server.calls[2:] == ["/inference/v1/generate"]
    assert read == list(given), "the other ranks would wait for the rest"
    assert (engine.weight_version, left_in(tmp_path)) == (0, [])


async def test_a_server_that_fails_an_update_is_left_out_until_the_next(
    policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failure = {"error": {"message": "Worker failed with error 'no room'", "code": 500}}
    async with FakeVLLM(renderer, shapes) as good, FakeVLLM(renderer, shapes) as bad:
        engine = engine_of(policy, renderer, tmp_path, bad, good)
        bad.break_with["load_weight_file"] = [web.json_response(failure, status=500)]
        with caplog.at_level(logging.WARNING):
            await asyncio.to_thread(engine.update_weights, policy.named_parameters(), 1)
        assert f"{bad.url} is left out until the next update" in caplog.text
        assert "no room" in caplog.text
        assert bad.calls[-2:] == ["/abort_requests", "/resume"]
        await asyncio.gather(*(one_turn(engine, task) for task in "ab"))
        assert (len(good.requests), len(bad.requests)) == (2, 0)
        await asyncio.to_thread(engine.update_weights, policy.named_parameters(), 2)
        await asyncio.gather(*(one_turn(engine, task) for task in "ab"))
        assert (len(good.requests), len(bad.requests)) == (3, 1)
        for server in (good, bad):
            server.break_with["/pause"] = [web.json_response(failure, status=500)]
        with pytest.raises(RolloutLost, match="no server took the weights of version 3"):
            await asyncio.to_thread(engine.update_weights, policy.named_parameters(), 3)
        with pytest.raises(RolloutLost, match="no vLLM server has the policy's weights"):
            await one_turn(engine)
        await engine.aclose()


async def test_a_server_that_was_restarted_has_lost_its_weights(
    policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    async with FakeVLLM(renderer, shapes) as server:
        engine = engine_of(policy, renderer, tmp_path, server)
        await asyncio.to_thread(engine.update_weights, policy.named_parameters(), 1)
        server.version = "default"
        with pytest.raises(RolloutLost, match="has started anew"):
            await one_turn(engine)
        await asyncio.to_thread(engine.update_weights, policy.named_parameters(), 2)
        assert (await one_turn(engine)).weight_versions == [2, 2, 2]
        await engine.aclose()


async def test_ranks_that_write_nothing_refuse_a_server_that_kept_old_weights(
    policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeVLLM(renderer, shapes) as good, FakeVLLM(renderer, shapes) as bad:
        writer, other = (engine_of(policy, renderer, tmp_path, bad, good) for _ in range(2))
        monkeypatch.setattr(other._writers, "this_rank", lambda: False)

        async def update(version: int) -> None:
            for engine in (writer, other):
                await asyncio.to_thread(engine.update_weights, policy.named_parameters(), version)

        await update(1)
        bad.break_with["load_weight_file"] = [web.json_response({"error": "no room"}, status=500)]
        await update(2)
        turns = await asyncio.gather(*(one_turn(other, task) for task in "ab"), return_exceptions=True)
        (lost,) = [turn for turn in turns if isinstance(turn, RolloutLost)]
        assert f"{bad.url} has started anew or could not take the last weights" in str(lost)
        await asyncio.gather(*(one_turn(other, task) for task in "ab"))
        assert len(bad.requests) == 1
        await update(3)
        turns = await asyncio.gather(*(one_turn(other, task) for task in "ab"))
        assert [turn.weight_versions for turn in turns] == [[3, 3, 3]] * 2
        assert len(bad.requests) == 2
        await asyncio.gather(writer.aclose(), other.aclose())


async def test_a_prefix_cache_that_stays_fails_the_update(
    policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    async with FakeVLLM(renderer, shapes) as server:
        server.break_with["/reset_prefix_cache"] = [{"success": False}]
        engine = engine_of(policy, renderer, tmp_path, server)
        with pytest.raises(RolloutLost, match="could not drop its prefix cache"):
            await asyncio.to_thread(engine.update_weights, policy.named_parameters(), 1)
        await engine.aclose()


async def test_one_engine_serves_loop_after_loop(
    policy: Any, renderer: ChatRenderer, shapes: Any, tmp_path: Path
) -> None:
    async with FakeVLLM(renderer, shapes) as server:
        engine = engine_of(policy, renderer, tmp_path, server)
        for _ in range(2):
            generation = await asyncio.to_thread(lambda: asyncio.run(one_turn(engine)))
            assert generation.finish is FinishReason.STOP
        await engine.aclose()
    assert len(server.requests) == 2


def test_pictures_are_sent_as_the_policy_sees_them() -> None:
    def file(image: Image.Image, kind: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        return buffer.getvalue()

    exif = Image.Exif()
    exif[0x0112] = 6
    files = {
        "plain": file(picture(0), "JPEG"),
        "turned": file(picture(0), "JPEG", exif=exif),
        "transparent": file(picture(0).convert("RGBA").rotate(20), "PNG"),
        "grey": file(Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16), "PNG"),
    }
    assert decoded(data_url(files["plain"])) == files["plain"]
    for name in ("turned", "transparent", "grey"):
        with Image.open(io.BytesIO(decoded(data_url(files[name])))) as sent:
            assert (sent.format, sent.mode, dict(sent.getexif())) == ("PNG", "RGB", {})
            assert (np.asarray(sent) == np.asarray(read_picture(files[name]))).all()
    with pytest.raises(DataError):
        data_url(b"no picture")


def test_experts_are_written_as_checkpoints_hold_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    weight = torch.arange(24.0).reshape(2, 3, 4)
    options: Any = {"folder": tmp_path, "dtype": torch.bfloat16, "max_file_bytes": 10}
    with weight_files([(name, weight)], {name: (2, 4, 3)}, **options) as files:
        (loaded,) = [load_file(file)[name] for file in files]
    assert torch.equal(loaded, weight.transpose(1, 2).bfloat16())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    read: list[int] = []
    weights = (read.append(i) or (str(i), torch.zeros(1)) for i in range(3))  # type: ignore[func-returns-value]
    options: Any = {"folder": missing, "dtype": torch.float32, "max_file_bytes": 10}
    with (
        pytest.raises(ConfigurationError, match=f"weight_folder {missing} cannot be written"),
        weight_files(weights, {str(i): (1,) for i in range(3)}, **options),
    ):
        pass
    assert read == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"servers": "http://a"}, "give a list of addresses"),
        ({"servers": []}, "give a list of addresses"),
        ({"servers": ["a:8000"]}, "'a:8000'; set an address such as http"),
        ({"servers": ["http://a"], "writer": "all"}, '\'all\'; set "host" or "run"'),
        ({"servers": ["http://a"], "max_file_bytes": 0}, "set each above 0"),
    ],
)
def test_settings_that_cannot_work(settings: Any, message: str, policy: Any, renderer: ChatRenderer) -> None:
    with pytest.raises(ConfigurationError, match=message):
        VLLMServerEngine(policy, renderer, **settings)


def _rank(rank: int, file: str, results: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    writers = [Writers(per_host=per_host).this_rank() for per_host in (True, False)]
    Writers.agree(None)
    try:
        Writers.agree(ConfigurationError("of rank 1") if rank == 1 else None)
    except ConfigurationError as error:
        results[rank] = (writers, str(error))
    torch.distributed.destroy_process_group()


def test_one_rank_of_a_host_writes_and_a_failure_is_that_of_all(tmp_path: Path) -> None:
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        arguments = (str(tmp_path / "rendezvous"), results)
        # fork: the imports of this module are many
        torch.multiprocessing.start_processes(_rank, args=arguments, nprocs=2, start_method="fork")
        assert dict(results) == {0: ([True, True], "of rank 1"), 1: ([False, False], "of rank 1")}
