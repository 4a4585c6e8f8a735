"""Tests how alike the keys of blocks are."""

import torch

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.storage.key_likeness import KeyLikeness
from reprise.cache.storage.slab import LayerShape, Slab

SLOTS, HEADS, DIM, LAYERS = 6, 2, 8, 4


def make_slab():
    shapes = [LayerShape(HEADS, DIM, DIM)] * LAYERS
    slab = Slab(shapes=shapes, dtype=torch.float32, num_slots=SLOTS, pinned=False)
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        slab.k(layer)[:] = torch.randn(HEADS, DIM, generator=generator) + 0.3 * torch.randn(
            SLOTS, BLOCK_TOKENS, HEADS, DIM, generator=generator
        )
        slab.v(layer)[:] = float("nan")  # values are not looked at
    return slab


def test_it_is_the_mean_cosine_of_rows_and_the_mean_key():
    slab, slots = make_slab(), [5, 0, 3]
    found = KeyLikeness(slab).of(slots)
    wanted = torch.zeros(3)
    for layer in (1, 2, 3):
        for head in range(HEADS):
            keys = slab.k(layer)[slots][:, :, head]
            keys = keys / keys.norm(dim=-1, keepdim=True)
            mean = keys.reshape(-1, DIM).mean(0)
            for place in range(3):
                wanted[place] += sum(torch.cosine_similarity(key, mean, dim=0) for key in keys[place]) / BLOCK_TOKENS
    torch.testing.assert_close(torch.tensor(found), wanted / 3 / HEADS)


def test_a_block_with_other_keys_is_the_least_alike():
    slab = make_slab()
    for layer in range(LAYERS):
        slab.k(layer)[2] *= -1
    found = KeyLikeness(slab).of(range(SLOTS))
    assert min(range(SLOTS), key=found.__getitem__) == 2
    assert found[2] < 0 < min(value for slot, value in enumerate(found) if slot != 2)


def test_no_blocks_are_alike_to_nothing():
    assert KeyLikeness(make_slab()).of([]) == []
