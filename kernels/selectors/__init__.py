"""Lists the selectors of KV by name. A selector chooses the rows of a long context that a decoding sequence attends to.

Listing them loads nothing; `none` selects nothing and costs nothing. tests/kernels/selectors/ compares each with the
naive attention with a mask.
"""

from collections.abc import Callable

from reprise.kernels.attention.selection import KvSelector, SelectorInputs


def _pairs(inputs: SelectorInputs) -> KvSelector:
    from reprise.kernels.selectors.pairs import PairSelector

    return PairSelector(inputs)


def _infinigen(inputs: SelectorInputs) -> KvSelector:
    from reprise.kernels.selectors.infinigen import InfinigenSelector

    return InfinigenSelector(inputs)


SELECTORS: dict[str, Callable[[SelectorInputs], KvSelector] | None] = {
    "none": None,
    "pairs": _pairs,
    "infinigen": _infinigen,
}
