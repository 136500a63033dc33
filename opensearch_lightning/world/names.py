"""Pronounceable made-up names: short, distinct from each other and from every word that questions use."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

_ONSETS = ("b", "br", "d", "dr", "f", "g", "gr", "h", "k", "kr", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
_VOWELS = ("a", "e", "i", "o", "u")
_MIDDLES = ("b", "d", "g", "k", "l", "lm", "m", "n", "nd", "r", "rv", "rn", "s", "st", "t", "v", "z")
_MAX_MISSES = 50
_ENDS = ("", "d", "k", "l", "m", "n", "r", "s", "t", "x")


def given_names(rng: np.random.Generator, count: int) -> list[str]:
    """``count`` short first names, which many people share."""
    names: dict[str, None] = {}
    while len(names) < count:
        names[(_pick(rng, _ONSETS) + _pick(rng, _VOWELS) + _pick(rng, "dlmnrst") + _pick(rng, "aeio")).title()] = None
    return list(names)


def stems(rng: np.random.Generator, reserved: Collection[str]) -> Iterator[str]:
    """Endless distinct stems, the first few thousand of four to eight letters.

    No two are one letter apart (a name read off a blurred sign must not be another's), and none is in ``reserved``
    (lower case).
    """
    seen = set(reserved)
    patterns: set[str] = set()
    syllables, misses = 1, 0
    while True:
        # Short words run out in a large world: then the names grow by a syllable.
        syllables, misses = (syllables + 1, 0) if misses > _MAX_MISSES else (syllables, misses + 1)
        middle = "".join(_pick(rng, _MIDDLES) + _pick(rng, _VOWELS) for _ in range(syllables))
        word = _pick(rng, _ONSETS) + _pick(rng, _VOWELS) + middle + _pick(rng, _ENDS)
        near = _neighbourhood(word)
        if word in seen or len(word) < 4 or not patterns.isdisjoint(near):
            continue
        misses = 0
        seen.add(word)
        patterns.update(near)
        yield word.capitalize()


def _neighbourhood(word: str) -> set[str]:
    """Patterns that a word shares with each word one substitution, insertion or deletion away."""
    holes = {word[:i] + "?" + word[i + 1 :] for i in range(len(word))}
    gaps = {word[:i] + "?" + word[i:] for i in range(len(word) + 1)}
    return holes | gaps


def _pick(rng: np.random.Generator, choices: str | tuple[str, ...]) -> str:
    return choices[int(rng.integers(len(choices)))]
