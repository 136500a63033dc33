"""What a vLLM server needs of this package: a worker that takes its weights from files.

Start the server with ``--worker-extension-cls opensearch_lightning.vllm_worker.WeightFiles``. This module stands alone,
so that vLLM may have an environment of its own: there the package must be found (``PYTHONPATH``), but none of its
dependencies need be installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open

EMBEDDING = "model.language_model.embed_tokens.weight"
HEAD = "lm_head.weight"


class WeightFiles:
    """Mixed into vLLM's worker; its methods are called by ``POST /collective_rpc``, which passes on strings only."""

    model_config: Any
    model_runner: Any
    vllm_config: Any

    def checkpoint_weights(self) -> dict[str, list[int]]:
        """Names and shapes of the weights in the checkpoint that the server was started from.

        A head that is tied to the embedding is not among them. Empty when the checkpoint is no folder of safetensors
        files here.
        """
        shapes: dict[str, list[int]] = {}
        for path in sorted(Path(self.model_config.model).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                shapes |= {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if self._head_is_tied():
            shapes.pop(HEAD, None)
        return shapes

    def start_weight_files(self) -> None:
        """Make the layers ready for weights in the checkpoint's layout; nothing may run until they are finished."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def load_weight_file(self, path: str) -> None:
        """Load one safetensors file of weights under the checkpoint's names.

        Raises:
            OSError: the file cannot be read here.
            ValueError: a name in it is not the model's.
        """
        from vllm.config import set_current_vllm_config

        with safe_open(path, "pt") as file:
            weights = [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118
        if self._head_is_tied():
            # the head may hold the matrix once more, packed for its kernel, where sharing does not reach it
            weights += [(HEAD, weight) for name, weight in weights if name == EMBEDDING]
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(weights)

    def finish_weight_files(self) -> None:
        """Pack what was loaded for the kernels."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)

    def _head_is_tied(self) -> bool:
        return bool(self.model_config.hf_config.get_text_config().tie_word_embeddings)
