import numpy as np

from reprise.cache.storage.slab import Segments


def is_intact(slots: Segments, layer: int, slot: int) -> bool:
    """Whether a slot is sealed, and its segment of a layer is what it was then."""
    return slots.is_sealed(slot) and bool(slots.sums_now(layer, np.array([slot])) == slots.sums([slot])[layer])
