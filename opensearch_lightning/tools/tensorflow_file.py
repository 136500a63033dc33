"""Frozen TensorFlow graphs of super-resolution networks, read by OpenCV.

Two things in OpenCV's importer stand in the way: it can crash on bytes that are no graph, and it loses the block size
of the layer ``DepthToSpace`` that these networks end with. So the file is checked first and that layer taken out;
:func:`depth_to_space` does its work on what the network gives.

A ``.pb`` file is a protocol buffer, ``GraphDef``: its field 1, repeated, holds the nodes; in a node field 1 is the
name, field 2 the operation, field 3, repeated, the inputs, and field 5, repeated, the attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NODE, _OPERATION, _ATTRIBUTE = 1, 2, 5
_SHUFFLE = b"DepthToSpace"
_NOTHING = b"Identity"


def read_network(encoded: bytes) -> Any:
    """The network of a frozen graph, without its ``DepthToSpace``.

    Raises:
        ValueError: the bytes are no whole graph with one ``DepthToSpace``, or this OpenCV reads no TensorFlow files.
        cv2.error: a graph that OpenCV cannot run.
    """
    graph = without_shuffle(encoded)
    read = getattr(cv2.dnn, "readNetFromTensorflow", None)
    if read is None:
        raise ValueError(f"OpenCV {cv2.__version__} reads no TensorFlow files: convert this one to ONNX")
    # The importer crashes on some graphs when it builds for the new engine of OpenCV 5.
    classic = getattr(cv2.dnn, "ENGINE_CLASSIC", None)
    return read(np.frombuffer(graph, np.uint8), **({} if classic is None else {"engine": classic}))


def depth_to_space(values: NDArray[Any]) -> NDArray[Any]:
    """``[1, 3*b*b, H, W]`` to ``[1, 3, b*H, b*W]``, as TensorFlow's ``depth_to_space`` orders the channels.

    Raises:
        ValueError: the number of channels is not three times a square.
    """
    _, channels, height, width = values.shape
    block = math.isqrt(channels // 3)
    if channels != 3 * block * block:
        raise ValueError(f"{channels} channels do not make pixels of three colours")
    blocks = values.reshape(block, block, 3, height, width)
    return blocks.transpose(2, 3, 0, 4, 1).reshape(1, 3, block * height, block * width)


def without_shuffle(encoded: bytes) -> bytes:
    """The graph with its ``DepthToSpace`` replaced by an operation that changes nothing.

    Raises:
        ValueError: the bytes are no whole graph, or not exactly one such operation is in it.
    """
    parts, shuffles = [], 0
    for number, kind, start, body, end in _fields(encoded):
        part = encoded[start:end]
        if number == _NODE:
            if kind != _BYTES:
                raise ValueError("it is no frozen TensorFlow graph")
            node = encoded[body:end]
            if _operation(node) == _SHUFFLE:
                shuffles += 1
                part = _message(_NODE, _replaced(node))
        parts.append(part)
    if shuffles != 1:
        raise ValueError(f"it is no frozen graph with one DepthToSpace, but with {shuffles}")
    return b"".join(parts)


def _operation(node: bytes) -> bytes:
    found = [node[body:end] for number, _, _, body, end in _fields(node) if number == _OPERATION]
    if len(found) != 1:
        raise ValueError("it is no frozen TensorFlow graph")
    return found[0]


def _replaced(node: bytes) -> bytes:
    parts = []
    for number, _, start, _, end in _fields(node):
        if number == _OPERATION:
            parts.append(_message(_OPERATION, _NOTHING))
        elif number != _ATTRIBUTE:
            parts.append(node[start:end])
    return b"".join(parts)


def _message(number: int, body: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _written(len(body)) + body


def _written(value: int) -> bytes:
    digits = bytearray()
    while value >= 128:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def _fields(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """``(number, kind, start, start of the value, end)`` of each field, up to the end of ``data``."""
    place = 0
    while place < len(data):
        start = place
        tag, place = _varint(data, place)
        kind = tag & 7
        if kind == _VARINT:
            _, end = _varint(data, place)
        elif kind == _BYTES:
            length, place = _varint(data, place)
            end = place + length
        elif kind in (_FIXED64, _FIXED32):
            end = place + (8 if kind == _FIXED64 else 4)
        else:
            raise ValueError("it is no protocol buffer")
        if end > len(data):
            raise ValueError("the file is cut short, or no protocol buffer")
        yield tag >> 3, kind, start, place, end
        place = end


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise ValueError("the file is cut short, or no protocol buffer")
        value |= (data[place] & 127) << shift
        place += 1
        if data[place - 1] < 128:
            return value, place
    raise ValueError("it is no protocol buffer")
