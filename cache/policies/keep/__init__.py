"""Lists by name the scorers that choose which blocks are dropped from a full window. The engine, the simulator and the
property tests read this table. `cache.block_scorer` in app/settings/sections.py lists the names again, because the app
does not import the cache; a test compares the two."""

from collections.abc import Callable

from reprise.cache.policies.keep.attended import AttendedScorer
from reprise.cache.policies.keep.block_scorer import BlockScorer
from reprise.cache.policies.keep.oldest import OldestScorer

BLOCK_SCORERS: dict[str, Callable[[], BlockScorer]] = {
    "oldest": OldestScorer,
    "attended": AttendedScorer,
}
