"""Random packed weights, for tests."""

import torch
from torch import Tensor

from reprise.kernels.packed import ZERO, Codes

Form = tuple[int, int, bool]
"""bits, inputs of a group, whether there are lows"""
FORMS: list[Form] = [(4, 32, False), (4, 32, True), (8, 32, False), (8, 32, True), (8, 16, False)]


def random_codes(form: Form, outputs: int, inputs: int, seed: int) -> Codes:
    """A weight whose scales and lows are numbers of fp16."""
    bits, group, has_lows = form
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (outputs, inputs), generator=generator).to(torch.int8)
    scales, lows = (torch.randn(outputs, inputs // group, generator=generator).half().float() for _ in range(2))
    return Codes(codes, scales * 0.05, lows if has_lows else None, 4 if bits == 4 else 8)


def truth(codes: Codes) -> Tensor:
    """Return what a weight stands for, fp32 [outputs, inputs]."""
    wide = codes.codes.float() - (ZERO if codes.bits == 4 and codes.lows is None else 0)
    groups = wide.unflatten(1, (-1, codes.group)) * codes.scales.half().float()[..., None]
    return (groups if codes.lows is None else groups + codes.lows.half().float()[..., None]).flatten(1)
