"""``opensearch shard``: sources to shards in parallel, the same files whatever interrupts it, with a data card."""

from opensearch_lightning.data.sharding.job import ShardJob, shard
from opensearch_lightning.data.sharding.settings import ShardSettings

__all__ = ["ShardJob", "ShardSettings", "shard"]
