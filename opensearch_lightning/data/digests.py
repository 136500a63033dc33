"""Digests that tell contents apart, the same on every machine and in every process."""

import hashlib
import json
from typing import Any


def content_digest(*parts: str | bytes) -> bytes:
    """SHA-256 of texts and files, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()


def json_digest(value: Any) -> str:
    """SHA-256 in hex of a value as JSON, with the keys of mappings in one order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
