"""Random packed weights, for tests."""

from typing import NamedTuple

import torch
from torch import Tensor

from reprise.kernels.packed import TABLES, ZERO, Codes, Table


class Form(NamedTuple):
    bits: int
    group: int  # inputs that share a scale
    has_lows: bool
    table: Table | None = None


FORMS = [Form(4, 32, False), Form(4, 32, True), Form(8, 32, False), Form(8, 32, True), Form(8, 16, False)]
TABLE_FORMS = [Form(4, 32, False, "e2m1"), Form(4, 16, False, "e2m1")]
ALL_FORMS = [*FORMS, *TABLE_FORMS]


def random_codes(form: Form, outputs: int, inputs: int, seed: int) -> Codes:
    """A weight whose scales and lows are numbers of fp16."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 16) if form.bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (outputs, inputs), generator=generator).to(torch.int8)
    scales, lows = (torch.randn(outputs, inputs // form.group, generator=generator).half().float() for _ in range(2))
    return Codes(codes, scales * 0.05, lows if form.has_lows else None, 4 if form.bits == 4 else 8, form.table)


def truth(codes: Codes) -> Tensor:
    """Return what a weight stands for, fp32 [outputs, inputs]."""
    if codes.table is not None:
        wide = torch.tensor([[TABLES[codes.table][code] for code in row] for row in codes.codes.tolist()])
    else:
        wide = codes.codes.float() - (ZERO if codes.bits == 4 and codes.lows is None else 0)
    groups = wide.unflatten(1, (-1, codes.group)) * codes.scales.half().float()[..., None]
    return (groups if codes.lows is None else groups + codes.lows.half().float()[..., None]).flatten(1)
