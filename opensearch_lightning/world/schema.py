"""What kinds of things MiniWiki describes, which relations join them, and which facts they carry.

A relation's or attribute's name is the infobox row's name, the word in questions and the word to search for. All
are functional: an entity has one value for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Whole numbers from ``low`` to ``high`` in steps, with a unit; ``unit_aliases`` are other ways to write it."""

    low: int
    high: int
    step: int = 1
    unit: str = ""
    unit_aliases: tuple[str, ...] = ()

    def draw(self, rng: np.random.Generator) -> str:
        """One value as text."""
        number = self.low + self.step * int(rng.integers((self.high - self.low) // self.step + 1))
        return f"{number} {self.unit}".strip()

    def aliases(self, value: str) -> tuple[str, ...]:
        """Other spellings of a drawn value: other names of the unit, and none."""
        number = value.split()[0]
        return (*(f"{number} {unit}" for unit in self.unit_aliases), number) if self.unit else ()


@dataclass(frozen=True, kw_only=True)
class Words:
    """One of a closed list of words."""

    choices: tuple[str, ...]

    def draw(self, rng: np.random.Generator) -> str:
        """One value."""
        return self.choices[int(rng.integers(len(self.choices)))]

    def aliases(self, value: str) -> tuple[str, ...]:
        """None: a word is spelt one way."""
        return ()


@dataclass(frozen=True, kw_only=True)
class EntityType:
    """One kind of entity: relations (row → type of its value), attributes, and how names are made.

    ``suffixes`` follow the stem of a name (``""``: the stem alone); ``alias`` makes another name, from ``{name}`` and
    ``{stem}``.
    """

    name: str
    plural: str
    relations: Mapping[str, str]
    attributes: Mapping[str, Numbers | Words]
    suffixes: tuple[str, ...]
    alias: str
    weight: float = 1.0


_BIRTH_YEARS = Numbers(low=1800, high=1899)
_YEARS = Numbers(low=1900, high=1999)
_COLOURS = Words(
    choices=(
        "red", "blue", "green", "yellow", "black", "white", "orange", "purple", "brown", "grey", "pink", "golden",
        "silver", "scarlet", "violet", "turquoise",
    )
)  # fmt: skip
_MATERIALS = Words(
    choices=(
        "oak", "marble", "brick", "granite", "bronze", "glass", "iron", "clay", "ivory", "copper", "slate", "limestone",
        "cedar", "steel", "silk", "amber",
    )
)  # fmt: skip
_METRES = ("metres", "meters")

TYPES: Mapping[str, EntityType] = {
    kind.name: kind
    for kind in (
        EntityType(
            name="person",
            plural="people",
            relations={"birthplace": "place", "employer": "company", "teacher": "person", "spouse": "person"},
            attributes={
                "birth year": _BIRTH_YEARS,
                "profession": Words(
                    choices=(
                        "painter",
                        "chemist",
                        "lawyer",
                        "sailor",
                        "baker",
                        "surgeon",
                        "printer",
                        "poet",
                        "engineer",
                        "farmer",
                        "pilot",
                        "dancer",
                        "judge",
                        "miner",
                        "tailor",
                        "botanist",
                    )
                ),
                "instrument": Words(
                    choices=(
                        "violin",
                        "piano",
                        "flute",
                        "harp",
                        "cello",
                        "trumpet",
                        "drum",
                        "guitar",
                        "organ",
                        "oboe",
                        "lute",
                        "horn",
                        "banjo",
                        "zither",
                        "viola",
                        "bagpipe",
                    )
                ),
            },
            suffixes=("",),
            alias="{initial}. {stem}",
            weight=1.6,
        ),
        EntityType(
            name="place",
            plural="places",
            relations={"mayor": "person", "landmark": "building", "mascot": "organism", "twin": "place"},
            attributes={
                "population": Numbers(low=200, high=9900, step=100),
                "elevation": Numbers(low=10, high=990, step=10, unit="m", unit_aliases=_METRES),
                "flag": _COLOURS,
            },
            suffixes=("",),
            alias="Old {name}",
        ),
        EntityType(
            name="company",
            plural="companies",
            relations={"founder": "person", "seat": "place", "product": "artifact", "rival": "company"},
            attributes={
                "founding year": _YEARS,
                "industry": Words(
                    choices=(
                        "shipping",
                        "mining",
                        "brewing",
                        "weaving",
                        "banking",
                        "printing",
                        "farming",
                        "fishing",
                        "baking",
                        "dyeing",
                        "forestry",
                        "tanning",
                        "milling",
                        "smelting",
                        "pottery",
                        "rail",
                    )
                ),
                "staff": Numbers(low=20, high=980, step=20),
            },
            suffixes=("Works", "Motors", "Labs", "Press", "Foods", "Lines"),
            alias="{stem} Group",
        ),
        EntityType(
            name="building",
            plural="buildings",
            relations={"architect": "person", "town": "place", "owner": "company", "tenant": "company"},
            attributes={
                "opening year": _YEARS,
                "height": Numbers(low=8, high=198, step=2, unit="m", unit_aliases=_METRES),
                "facade": _MATERIALS,
            },
            suffixes=("Hall", "Tower", "Bridge", "Castle", "Mill", "Gate"),
            alias="Great {name}",
        ),
        EntityType(
            name="artifact",
            plural="artifacts",
            relations={"inventor": "person", "maker": "company", "museum": "building", "ornament": "organism"},
            attributes={
                "invention year": _YEARS,
                "material": _MATERIALS,
                "weight": Numbers(low=2, high=98, step=2, unit="kg", unit_aliases=("kilograms",)),
            },
            suffixes=("Clock", "Vase", "Lens", "Loom", "Lamp", "Crown"),
            alias="{stem} Relic",
        ),
        EntityType(
            name="organism",
            plural="organisms",
            relations={"discoverer": "person", "habitat": "place", "prey": "organism", "predator": "organism"},
            attributes={
                "discovery year": _YEARS,
                "diet": Words(
                    choices=(
                        "moss",
                        "seeds",
                        "nectar",
                        "algae",
                        "insects",
                        "roots",
                        "bark",
                        "berries",
                        "fish",
                        "worms",
                        "leaves",
                        "pollen",
                        "fungi",
                        "snails",
                        "grass",
                        "plankton",
                    )
                ),
                "colour": _COLOURS,
            },
            suffixes=("Moth", "Otter", "Heron", "Newt", "Beetle", "Carp"),
            alias="Common {name}",
        ),
    )
}

COUNTRY = "country"
"""Row and type of the hubs: every entity links its country, so that no walk may pass through one."""
