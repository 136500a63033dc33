"""A frozen model beside the one that is trained."""

from __future__ import annotations

from typing import Any

from torch import nn


def attach_reference(module: nn.Module, reference: nn.Module, name: str = "reference") -> None:
    """Make ``reference`` a frozen submodule that checkpoints leave out.

    As a submodule it follows its module to devices and is sharded by strategies that shard. Its weights never change,
    so a checkpoint that held them would only be larger: saving drops them, loading takes those it has. DeepSpeed saves
    frozen weights by itself, apart from the module's state, and so these too.
    """

    def drop(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}{name}.")]:
            del state[key]

    def put_back(_module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
        state.update({f"{prefix}{name}.{key}": value for key, value in reference.state_dict().items()})

    module.register_state_dict_post_hook(drop)
    module.register_load_state_dict_pre_hook(put_back)
    setattr(module, name, reference.requires_grad_(False).eval())
