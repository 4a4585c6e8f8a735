"""Made-up text: as many words as there are tokens, and the same ones for the same name."""

import random
from collections.abc import Sequence
from functools import lru_cache

# Common words, each one token behind a space in the vocabularies we know, also in small ones.
_COMMON = """
time year people way thing life world hand part place case week the of and to in is that it was for on are as
with his they at be this from have or by one had not but what all were when we there can an your which their
said if do will each about how up out them then she many some so these would other into has more her two like
him see could no make than first been its who now my made over did down only find use may water long little very
after words called just where most know get through back much before go good new write our used me man too any
day same right look think also around another came come work three word must because does even well such here
take why things help put years different away again off went old number great tell men say small every found
still between name should home big give air line set own under read last never us left end along while might
next sound below saw something thought both few those always looked show large often together asked house
"""
WORDS = tuple(_COMMON.split())


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


@lru_cache(maxsize=8192)
def block(seed: int, name: int, count: int) -> str:
    """The words of a named block of a trace: equal names are equal text."""
    return words(random.Random(f"{seed} block {name}"), count)


def blocks(seed: int, names: Sequence[int], size: int, count: int) -> str:
    """`count` words in blocks of `size`; what no block is named for is text of its own behind the last."""
    whole = [
        block(seed, name, min(size, count - start)) for name, start in zip(names, range(0, count, size), strict=False)
    ]
    rest = count - size * len(whole)
    if rest > 0:
        whole.append(words(random.Random(f"{seed} behind {names[-1] if names else None}"), rest))
    return " ".join(whole)
