import pytest

from opensearch_lightning.models import Lora, add_lora, frozen_parts
from opensearch_lightning.models.shape import PARTS
from tests.models.test_router import moe
from tests.models.tiny import tiny_policy


def test_frozen_parts_are_found() -> None:
    plain, vision = tiny_policy(), {"vision_tower", "projector"}
    every = set(PARTS) - {"experts", "router"}
    assert frozen_parts(plain) == set()
    assert frozen_parts(tiny_policy(train_vision=False)) == vision
    assert frozen_parts(tiny_policy(train_vision=False, train_projector=True)) == {"vision_tower"}
    assert frozen_parts(tiny_policy(train_language=False)) == every - vision
    mixture = moe()
    assert frozen_parts(mixture) == set()
    assert frozen_parts(mixture.requires_grad_(False)) == set(PARTS)
    pytest.importorskip("peft", reason="the extra lora is not installed")
    add_lora(plain, Lora(r=2))
    assert frozen_parts(plain) == every
