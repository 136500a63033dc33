"""Drawing and degrading, without tools."""

from __future__ import annotations

import numpy as np
import pytest

from opensearch_lightning.world.pictures import (
    EMBLEM_SIDE,
    SCENE_SIDE,
    SIGN_SIZE,
    blur,
    draw_emblem,
    draw_scene,
    draw_sign,
    shrink,
    skew,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_same_numbers_draw_the_same_emblem():
    assert draw_emblem(rng(3)).tobytes() == draw_emblem(rng(3)).tobytes()
    assert draw_emblem(rng(3)).tobytes() != draw_emblem(rng(4)).tobytes()
    assert draw_emblem(rng()).size == (EMBLEM_SIDE, EMBLEM_SIDE)


@pytest.mark.parametrize("name", ["Li", "Velmar Works", "Stongrund Relic Castle"])
def test_a_name_stays_on_its_board(name):
    sign = np.asarray(draw_sign(rng(), name).convert("L"))
    assert sign.shape == SIGN_SIZE[::-1]
    board = sign[10:-10, 8:-8]
    ink = np.flatnonzero((board < 128).any(axis=0))
    assert ink.size > 0
    assert ink.min() >= 2
    assert ink.max() <= board.shape[1] - 3


def test_a_scene_holds_the_emblem_in_its_box():
    emblem = draw_emblem(rng())
    boxes = set()
    for seed in range(24):
        scene, (x, y, width, height) = draw_scene(rng(seed), emblem)
        boxes.add((x, y))
        assert scene.size == (SCENE_SIDE, SCENE_SIDE)
        inside = np.asarray(scene.crop((x, y, x + width, y + height)), float)
        assert np.abs(inside - np.asarray(emblem.resize((width, height)), float)).mean() < 12
    assert boxes == {(0, 0), (0, 64), (64, 0), (64, 64)}


def test_degradations():
    emblem = draw_emblem(rng())
    assert shrink(emblem, 3).size == (32, 32)
    detail = [float(np.asarray(blur(emblem, sigma), float).std()) for sigma in (0.5, 2, 8)]
    assert detail[0] > detail[1] > detail[2]


def test_a_poster_is_seen_whole_on_a_quarter_of_the_wall():
    emblem = draw_emblem(rng())
    for seed in range(10):
        wall = np.asarray(skew(rng(seed), emblem, 0.3))
        assert wall.shape == (SCENE_SIDE, SCENE_SIDE, 3)
        poster = (wall != 225).any(axis=2)
        assert poster.mean() == pytest.approx(0.25, abs=0.03)
        edge = np.concatenate([poster[0], poster[-1], poster[:, 0], poster[:, -1]])
        assert not edge.any()
