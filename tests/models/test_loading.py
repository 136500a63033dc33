import pytest
import torch

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import load_policy, load_processor
from tests.models.tiny import tiny_policy, tiny_processor


@pytest.mark.parametrize("load", [load_policy, load_processor])
def test_a_missing_checkpoint_is_named_with_the_remedy(load, tmp_path):
    with pytest.raises(ConfigurationError, match=r"nowhere \(no such folder\).*build_tiny_checkpoint"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"no config.json in it"):
        load(tmp_path)


def test_the_vision_tower_is_trained_unless_frozen():
    assert all(parameter.requires_grad for parameter in tiny_policy().parameters())
    frozen = tiny_policy(train_vision=False)
    names = {name for name, parameter in frozen.named_parameters() if not parameter.requires_grad}
    assert names == {name for name, _ in frozen.named_parameters() if ".visual." in name}
    assert names


def test_weights_come_in_the_type_asked_for():
    assert {parameter.dtype for parameter in tiny_policy().parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in tiny_policy(dtype="bfloat16").parameters()} == {torch.bfloat16}


def test_the_processor_survives_saving(tmp_path):
    tiny_processor().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    again = load_processor(tmp_path)
    assert again.chat_template == tiny_processor().chat_template
    assert again.image_processor.size == tiny_processor().image_processor.size
    assert again.tokenizer.get_vocab() == tiny_processor().tokenizer.get_vocab()
