import logging
import threading
from types import SimpleNamespace

import cv2
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools import ToolExecutor, offline_tools
from opensearch_lightning.tools.edsr import EDSR
from opensearch_lightning.tools.tensorflow_file import depth_to_space, without_shuffle
from opensearch_lightning.types import ErrorKind
from tests.tools.fakes import KEY, book, call

MEAN_RGB = np.array([114.35629928, 111.561547, 103.1545782])
FLOAT = 1


def noise(width=40, height=30, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def kernels(scale, seed=1):
    """Weights ``[3, 3, 3, 3*scale*scale]`` (row, column, input, output): a pixel repeated, and some of the others."""
    weights = np.random.default_rng(seed).normal(0, 0.05, (3, 3, 3, 3 * scale * scale)).astype(np.float32)
    for place in range(3 * scale * scale):
        weights[1, 1, place % 3, place] += 1
    return weights


def write_onnx(path, *layers, scale=2, shape=("h", "w"), block=None):
    """Convolutions of 3 channels, then one of ``3*scale*scale`` channels whose channels become pixels."""
    nodes, values, name = [], [], "x"
    for number, weights in enumerate([*layers, kernels(scale)]):
        values.append(numpy_helper.from_array(weights.transpose(3, 2, 0, 1).copy(), f"w{number}"))
        nodes.append(helper.make_node("Conv", [name, f"w{number}"], [f"c{number}"], pads=[1, 1, 1, 1]))
        name = f"c{number}"
    nodes.append(helper.make_node("DepthToSpace", [name], ["y"], blocksize=block or scale))
    graph = helper.make_graph(
        nodes,
        "edsr",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, None, None, None])],
        values,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def expected(image, scale):
    """What the network of :func:`write_onnx` makes of ``image``, in plain NumPy."""
    pixels = np.pad(np.asarray(image)[:, :, ::-1] - MEAN_RGB[::-1], ((1, 1), (1, 1), (0, 0)))
    height, width = image.height, image.width
    weights = kernels(scale).astype(np.float64)
    mixed = sum(pixels[y : y + height, x : x + width] @ weights[y, x] for y in range(3) for x in range(3))
    blocks = mixed.reshape(height, width, scale, scale, 3).transpose(0, 2, 1, 3, 4)
    large = blocks.reshape(height * scale, width * scale, 3)[:, :, ::-1] + MEAN_RGB
    return np.clip(large, 0, 255)


def varint(value):
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    encoded = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(encoded)) + encoded


def node(name, operation, *inputs, **attributes):
    body = field(1, name) + field(2, operation) + b"".join(field(3, given) for given in inputs)
    return field(1, body + b"".join(field(5, field(1, key) + field(2, value)) for key, value in attributes.items()))


def tensorflow_graph(scale=2):
    """The bytes of a frozen graph as OpenCV's zoo holds them: a convolution, and its channels become pixels."""
    number = field(6, FLOAT)
    weights = kernels(scale)
    shape = b"".join(field(2, field(1, side)) for side in weights.shape)
    value = field(8, field(1, FLOAT) + field(2, shape) + field(4, weights.tobytes()))
    strides = field(1, field(3, bytes([1, 1, 1, 1])))
    layout = field(2, "NHWC")
    return (
        node("IteratorGetNext", "Placeholder", dtype=number)
        + node("weights", "Const", dtype=number, value=value)
        + node(
            "mixed", "Conv2D", "IteratorGetNext", "weights",
            T=number, strides=strides, padding=field(2, "SAME"), data_format=layout,
        )
        + node("NHWC_output", "DepthToSpace", "mixed", T=number, block_size=field(3, scale), data_format=layout)
    )  # fmt: skip


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("size", [(40, 30), (1, 1), (1, 57), (64, 3)])
def test_pixels_are_those_of_the_network(tmp_path, scale, size):
    edsr = EDSR(write_onnx(tmp_path / "x.onnx", scale=scale))
    assert edsr.scale == scale
    output = edsr.enlarge(noise(*size), scale)
    assert output.image.size == (size[0] * scale, size[1] * scale)
    assert np.abs(np.asarray(output.image) - expected(noise(*size), scale)).max() <= 0.51
    assert (output.text, output.note) == (f"Enlarged {scale}x by EDSR.", None)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_a_file_of_opencvs_zoo_gives_the_same(tmp_path, scale):
    (tmp_path / "x.pb").write_bytes(tensorflow_graph(scale))
    edsr = EDSR(tmp_path / "x.pb")
    assert edsr.scale == scale
    output = edsr.enlarge(noise(), scale)
    assert np.abs(np.asarray(output.image) - expected(noise(), scale)).max() <= 0.51


def test_tiles_join_to_the_whole(tmp_path):
    # Three convolutions reach 3 pixels.
    path = write_onnx(tmp_path / "x.onnx", *(kernels(1, seed) for seed in (5, 6)))
    image = noise(150, 70)
    whole = np.asarray(EDSR(path, tile=256).enlarge(image, 2).image).astype(int)
    for tile, overlap in ((16, 3), (32, 8), (150, 3), (9, 72)):
        tiled = np.asarray(EDSR(path, tile=tile, overlap=overlap).enlarge(image, 2).image)
        assert tiled.shape == whole.shape
        assert np.abs(tiled - whole).max() <= 1  # floats are added up in another order
        assert (tiled != whole).mean() < 1e-3
    seams = np.asarray(EDSR(path, tile=16, overlap=0).enlarge(image, 2).image)
    assert (np.abs(seams - whole) > 1).mean() > 0.01  # without surroundings they show


def test_tiles_are_bounded(tmp_path, monkeypatch):
    edsr = EDSR(write_onnx(tmp_path / "x.onnx"), tile=20, overlap=4)
    with edsr._networks.engine() as network:
        seen, enlarge = [], network.enlarge
    monkeypatch.setattr(network, "enlarge", lambda pixels, scale: seen.append(pixels.shape) or enlarge(pixels, scale))
    edsr.enlarge(noise(100, 25), 2)
    assert {shape[:2] for shape in seen} == {(25, 28)}
    assert len(seen) == 5


def test_another_scale_is_made_of_what_the_network_gives(tmp_path):
    edsr = EDSR(write_onnx(tmp_path / "x.onnx", scale=2))
    for scale in (3, 4):
        output = edsr.enlarge(noise(), scale)
        assert output.image.size == (40 * scale, 30 * scale)
        assert output.note == f"The model enlarges 2x; its result was resized to {scale}x."
    smaller = EDSR(write_onnx(tmp_path / "y.onnx", scale=4)).enlarge(noise(), 2)
    assert smaller.image.size == (80, 60)
    assert smaller.note == "The model enlarges 4x; its result was resized to 2x."


def test_results_are_limited(tmp_path):
    edsr = EDSR(write_onnx(tmp_path / "x.onnx", scale=4), max_pixels=40 * 30 * 16)
    edsr.enlarge(noise(), 4)
    for scale in (2, 4):  # the network makes four times as much of either
        with pytest.raises(ToolError, match=f"41x30 pixels is too large for scale {scale}; crop it first") as caught:
            edsr.enlarge(noise(41, 30), scale)
        assert caught.value.kind is ErrorKind.INVALID_ARGUMENT


def test_without_weights_the_picture_is_unchanged_and_the_text_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        edsr = EDSR(tmp_path / "EDSR_x4.pb")
        image = noise()
        outputs = [edsr.enlarge(image, scale) for scale in (2, 4)]
    assert all(output.image is image for output in outputs)
    assert {(output.text, output.note) for output in outputs} == {
        ("", "The super-resolution model is not there: the image is unchanged.")
    }
    assert len(caplog.records) == 1
    assert f"There is no file {tmp_path / 'EDSR_x4.pb'}" in caplog.text
    assert edsr.scale is None


@pytest.mark.parametrize(
    ("name", "encoded", "reason"),
    [
        ("x.onnx", b"hello" * 50, "Failed to parse"),
        ("x.onnx", b"", "has_graph"),
        ("x.pb", b"hello" * 50, "no protocol buffer"),
        ("x.pb", b"", "with one DepthToSpace, but with 0"),
        ("x.pb", tensorflow_graph()[:-40], "cut short"),
        ("x.pb", tensorflow_graph() + node("again", "DepthToSpace", "NHWC_output"), "but with 2"),
        ("x.pb", field(1, 7), "no frozen TensorFlow graph"),
        ("x.pb", field(1, field(1, "node without an operation")), "no frozen TensorFlow graph"),
    ],
)
def test_broken_weights_are_named(tmp_path, name, encoded, reason):
    (tmp_path / name).write_bytes(encoded)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        EDSR(tmp_path / name)
    assert str(caught.value).startswith(f"The EDSR weights {tmp_path / name} cannot be used (")
    assert "give an ONNX file" in str(caught.value)


def test_an_onnx_file_cut_short_is_named(tmp_path):
    path = write_onnx(tmp_path / "x.onnx")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match="cannot be used"):
        EDSR(path)


def test_networks_that_do_something_else_are_refused(tmp_path):
    same = write_onnx(tmp_path / "same.onnx", scale=1)
    with pytest.raises(
        ConfigurationError, match=r"does not enlarge by one of \[2, 3, 4\]: of \[1, 3, 8, 12\] it makes"
    ):
        EDSR(same)
    grey = write_onnx(tmp_path / "grey.onnx", scale=2, block=1)
    with pytest.raises(ConfigurationError, match=r"it makes \[1, 12, 8, 12\]"):
        EDSR(grey)
    with pytest.raises(ConfigurationError, match=r"scale is 4, and the network of .* enlarges 2x"):
        EDSR(write_onnx(tmp_path / "x.onnx", scale=2), scale=4)


def test_an_opencv_without_tensorflow_is_named(tmp_path, monkeypatch):
    (tmp_path / "x.pb").write_bytes(tensorflow_graph())
    monkeypatch.delattr(cv2.dnn, "readNetFromTensorflow")
    with pytest.raises(ConfigurationError, match="reads no TensorFlow files: convert this one to ONNX"):
        EDSR(tmp_path / "x.pb")


@pytest.mark.parametrize("options", [{"scale": 5}, {"tile": 7}, {"overlap": -1}, {"workers": 0}, {"max_pixels": 0}])
def test_values_out_of_range(tmp_path, options):
    (name,) = options
    with pytest.raises(ConfigurationError, match=f"{name} is"):
        EDSR(tmp_path / "x.onnx", **options)


def test_channels_become_pixels_as_in_tensorflow():
    values = np.arange(12).reshape(1, 12, 1, 1)
    assert depth_to_space(values)[0, 0].tolist() == [[0, 3], [6, 9]]
    with pytest.raises(ValueError, match="13 channels"):
        depth_to_space(np.zeros((1, 13, 1, 1)))


def test_only_the_shuffle_is_replaced():
    graph = tensorflow_graph()
    changed = without_shuffle(graph)
    start = graph.index(b"NHWC_output")
    assert changed[: start - 4] == graph[: start - 4]
    assert b"DepthToSpace" not in changed
    assert b"Identity" in changed


@pytest.mark.parametrize("workers", [1, 3])
def test_many_threads_share_it(tmp_path, workers):
    edsr = EDSR(write_onnx(tmp_path / "x.onnx"), workers=workers)
    images = [noise(20 + seed, 31 - seed, seed) for seed in range(8)]
    alone = [np.asarray(edsr.enlarge(image, 2).image) for image in images]
    equal = []

    def work(number):
        made = [np.asarray(edsr.enlarge(images[number], 2).image) for _ in range(10)]
        equal.extend(np.array_equal(pixels, alone[number]) for pixels in made)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert equal == [True] * 80
    assert not any(thread.is_alive() for thread in threads)


async def test_among_the_offline_tools(tmp_path):
    world = SimpleNamespace(text_index=None, image_index=None)
    edsr = EDSR(write_onnx(tmp_path / "x.onnx", scale=3), workers=2)
    (tool,) = offline_tools(world, names=["super_resolution"], super_resolution=edsr)
    assert (tool.backend, tool.backend_limit) == ("super_resolution", 2)
    (missing,) = offline_tools(world, names=["super_resolution"], super_resolution=EDSR(tmp_path / "none.onnx"))
    texts = []
    for given in (tool, missing):
        executor = ToolExecutor([given])
        result = await executor.execute(call("super_resolution", image="img_1"), book(noise()), KEY)
        await executor.aclose()
        texts.append((result.text, result.note))
    assert texts == [
        ("img_2: 120x90 pixels. Enlarged 3x by EDSR.", None),
        (
            "img_2: 40x30 pixels. The super-resolution model is not there: the image is unchanged.",
            "The super-resolution model is not there: the image is unchanged.",
        ),
    ]
