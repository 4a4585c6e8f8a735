"""Generates filler text: one word per token, and the same words for the same name."""

import random
from collections.abc import Sequence
from functools import lru_cache

# Common words, each of which is a single token after a space in the vocabularies we know, even small ones.
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
    """Return the words of a named block of a trace; equal names give equal text."""
    return words(random.Random(f"{seed} block {name}"), count)


def blocks(seed: int, names: Sequence[int], size: int, count: int) -> str:
    """Return `count` words: the texts of the named blocks, each of `size` words, and if they are too few, further words
    that depend on the last name."""
    whole = [
        block(seed, name, min(size, count - start)) for name, start in zip(names, range(0, count, size), strict=False)
    ]
    rest = count - size * len(whole)
    if rest > 0:
        whole.append(words(random.Random(f"{seed} behind {names[-1] if names else None}"), rest))
    return " ".join(whole)
