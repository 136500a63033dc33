"""A server on loopback that answers as vLLM 0.32 was seen to, with a script in place of a model."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor

from opensearch_lightning.chat import ChatRenderer
from tests.tools.loopback import LoopbackServer


class FakeVLLM(LoopbackServer):
    """Says ``says``, cut at ``max_tokens``; ``break_with`` makes the next answers of a path go wrong."""

    def __init__(self, renderer: ChatRenderer, shapes: dict[str, list[int]], *, max_length: int = 1024) -> None:
        self.renderer, self.shapes, self.max_length = renderer, shapes, max_length
        self.says = [100, 101, renderer.end_of_turn_id]
        self.logprobs_mode = "processed_logprobs"
        self.extension: str | None = "opensearch_lightning.vllm_worker.WeightFiles"
        self.dev_mode = True
        self.version = "default"
        self.extra_prompt_tokens = 0
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.weights: dict[str, Tensor] = {}
        self.files: list[Path] = []
        self.break_with: dict[str, list[Any]] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = "/" + request.match_info["path"]
        body = await request.json() if request.can_read_body else {}
        name = body["method"] if path == "/collective_rpc" else request.path_qs
        if path != "/health":
            self.calls.append(name)
        broken = self.break_with.get(path) or self.break_with.get(name)
        if broken:
            answer = broken.pop(0)
            if answer is None:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return answer if isinstance(answer, web.Response) else web.json_response(answer)
        return web.json_response(self._answer(path, name, body))

    def _answer(self, path: str, name: str, body: dict[str, Any]) -> Any:
        if path == "/server_info" and not self.dev_mode:
            raise web.HTTPNotFound
        if path == "/server_info":
            model = {"logprobs_mode": self.logprobs_mode, "max_model_len": self.max_length, "dtype": "torch.float32"}
            return {
                "vllm_config": {
                    "model_config": {**model, "model": "/models/policy"},
                    "parallel_config": {"worker_extension_cls": self.extension},
                }
            }
        if path == "/inference/v1/generate":
            return self._generate(body)
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {"success": True, "new_version": self.version}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if name == "load_weight_file":
            self.files.append(Path(body["args"][0]))
            self.weights |= load_file(self.files[-1])
        return {"results": [self.shapes if name == "checkpoint_weights" else None]}

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        prompt = len(body["token_ids"]) + self.extra_prompt_tokens
        for part in body.get("content_parts", ()):
            t, h, w = self.renderer.encode_image(base64.b64decode(part["url"].partition(",")[2]), "img").grid_thw
            prompt += t * h * w // self.renderer.merge_size**2 - 1
        ids = self.says[: min(body["sampling_params"]["max_tokens"], self.max_length - prompt)]
        stopped = ids[-1] in body["sampling_params"]["stop_token_ids"]
        return answer(ids, finish="stop" if stopped else "length", prompt_tokens=prompt, version=self.version)


def answer(ids: list[int], *, finish: str, prompt_tokens: int, version: str = "default") -> dict[str, Any]:
    """An answer of ``/inference/v1/generate``."""
    content = [{"token_id": i, "logprob": -0.25, "rank": 1, "top_logprobs": []} for i in ids]
    choice = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": ids[-1] if finish == "stop" else None,
        "token_ids": ids,
        "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
        "logprobs": {"content": content},
    }
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids), "total_tokens": prompt_tokens + len(ids)}
    return {"request_id": "r", "model": "policy", "usage": usage, "output_mode": "tokens", "choices": [choice]}
