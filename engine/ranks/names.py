"""Names the directories and fingerprints of a rank's KV on disk."""

import hashlib
from pathlib import Path

from reprise.cache.blocks.keys import typed_fields


def rank_fingerprint(model: bytes, rank: int, num_ranks: int) -> bytes:
    """Return the fingerprint under which a rank stores its part of the KV. model: fingerprint of the whole model."""
    if num_ranks == 1:
        return model
    return hashlib.blake2b(typed_fields("reprise-rank", model, rank, num_ranks), digest_size=16).digest()


def rank_directory(directory: str, rank: int) -> str:
    """Return the directory in which a rank stores its KV. Rank 0 uses `directory` itself, so that its lock keeps any
    other server away from the directories of all ranks."""
    return directory if rank == 0 else str(Path(directory) / f"rank{rank}")
