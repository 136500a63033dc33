import pytest
import torch
from PIL import Image

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.models import load_policy, load_processor
from tests.models.test_router import moe
from tests.models.tiny import tiny_checkpoint, tiny_policy, tiny_processor


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


def test_the_output_layer_computes_in_the_type_asked_for(tmp_path):
    plain, precise = tiny_policy(dtype="bfloat16"), tiny_policy(dtype="bfloat16", head_dtype="float32")
    hidden = torch.randn(3, plain.lm_head.in_features, dtype=torch.bfloat16)
    logits = precise.lm_head(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ plain.lm_head.weight.float().T)
    assert not torch.equal(logits, plain.lm_head(hidden).float())
    logits.sum().backward()
    assert precise.lm_head.weight.grad.dtype == torch.bfloat16
    precise.save_pretrained(tmp_path)
    again = load_policy(tmp_path, dtype="bfloat16").state_dict()
    assert again.keys() == plain.state_dict().keys()
    assert all(torch.equal(again[name], weight) for name, weight in plain.state_dict().items())


def test_an_output_layer_in_another_type_is_refused():
    with pytest.raises(ConfigurationError, match="head_dtype is 'bfloat16'; set one of float32, float64, or null"):
        tiny_policy(head_dtype="bfloat16")


def test_the_processor_survives_saving(tmp_path):
    tiny_processor().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    again = load_processor(tmp_path)
    assert again.chat_template == tiny_processor().chat_template
    assert again.image_processor.size == tiny_processor().image_processor.size
    assert again.tokenizer.get_vocab() == tiny_processor().tokenizer.get_vocab()


def test_gradient_checkpointing_is_of_the_kind_that_keeps_gradients_behind_a_frozen_tower():
    policy = tiny_policy(gradient_checkpointing=True, train_vision=False).train()
    layers = [module for module in policy.modules() if getattr(module, "gradient_checkpointing", False)]
    assert layers
    assert all(layer._gradient_checkpointing_func.keywords == {"use_reentrant": False} for layer in layers)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in tiny_policy().modules())


def test_routers_in_float32_need_routers(tmp_path):
    with pytest.raises(ConfigurationError, match="has no router"):
        tiny_policy(float32_router=True)
    moe(dtype=torch.bfloat16).save_pretrained(tmp_path)
    seen = []
    policy = load_policy(tmp_path, dtype="bfloat16", float32_router=True)
    for module in policy.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _module, _inputs, outputs: seen.append(outputs[0].dtype))
    policy(input_ids=torch.arange(20, 30)[None])
    assert seen
    assert set(seen) == {torch.float32}


def frozen_parts(**options):
    """Parts of a policy without a trained parameter; the others are trained whole."""
    policy = tiny_policy(**options)
    visual = policy.model.visual
    projector = [*visual.merger.parameters(), *visual.deepstack_merger_list.parameters()]
    known = {id(parameter) for parameter in projector}
    parts = {
        "projector": projector,
        "vision": [parameter for parameter in visual.parameters() if id(parameter) not in known],
        "language": [*policy.model.language_model.parameters(), *policy.lm_head.parameters()],
    }
    states = {name: {parameter.requires_grad for parameter in part} for name, part in parts.items()}
    assert all(len(state) == 1 for state in states.values())
    return {name for name, state in states.items() if state == {False}}


def test_parts_are_frozen_apart():
    assert frozen_parts() == set()
    assert frozen_parts(train_vision=False) == {"vision", "projector"}
    assert frozen_parts(train_vision=False, train_projector=True) == {"vision"}
    assert frozen_parts(train_projector=False) == {"projector"}
    assert frozen_parts(train_language=False) == {"language"}
    with pytest.raises(ConfigurationError, match="are all false, and nothing is left to train: set one"):
        tiny_policy(train_vision=False, train_language=False)


def test_pixels_are_limited_and_the_limit_is_saved(tmp_path):
    picture = Image.new("RGB", (640, 480))

    def tokens(processor):
        return int(processor.image_processor([picture], return_tensors="pt")["image_grid_thw"].prod()) // 4

    free, limited = tiny_processor(), load_processor(tiny_checkpoint(), max_pixels=5 * 1024, video_max_pixels=2048)
    # 640 by 480 scaled to 82 by 62, and down to multiples of 32; the tiny checkpoint's own limit is 16,384
    assert (tokens(free), tokens(limited)) == (12, 2)
    limited.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    again = load_processor(tmp_path)
    assert tokens(again) == 2
    assert again.video_processor.size["longest_edge"] == 2048
    assert again.image_processor.size["shortest_edge"] == free.image_processor.size["shortest_edge"] == 1024


def test_a_limit_below_the_smallest_picture_lowers_that_too():
    checkpoint = tiny_checkpoint()
    size = load_processor(checkpoint, video_max_pixels=1024).video_processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (1024, 1024)
    with pytest.raises(ConfigurationError, match="max_pixels is 1023; set at least the 1024 pixels of one token"):
        load_processor(checkpoint, max_pixels=1023)
