"""MiniWiki: a generated small encyclopedia with pictures, searched by the local tools; the embedded default world."""

from opensearch_lightning.world.build import build_world
from opensearch_lightning.world.entities import Entity
from opensearch_lightning.world.pictures import PictureKind
from opensearch_lightning.world.settings import WorldSettings
from opensearch_lightning.world.store import World

__all__ = ["Entity", "PictureKind", "World", "WorldSettings", "build_world"]
