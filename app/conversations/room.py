"""The bound of what is kept in memory for several tenants until it can be stored."""

from collections import Counter
from typing import Protocol, TypeVar


class _Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


Kept = TypeVar("Kept", bound=_Sized)


def make_room(kept: dict[tuple[str, str], Kept], max_bytes: int) -> int:
    """Remove entries until all together have at most `max_bytes`. Each time the oldest entry of the tenant with the
    most bytes goes. kept: by (tenant, id), the oldest first. Returns how many were removed."""
    sizes: Counter[str] = Counter()
    for (tenant, _), one in kept.items():
        sizes[tenant] += one.num_bytes
    before = len(kept)
    while sizes.total() > max_bytes:
        largest = sizes.most_common(1)[0][0]
        key = next(key for key in kept if key[0] == largest)
        sizes[largest] -= kept.pop(key).num_bytes
    return before - len(kept)
