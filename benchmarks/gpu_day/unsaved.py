"""The same engine where nothing is saved below HBM, beside which saving is to cost little."""

from collections.abc import Sequence
from functools import partial

from benchmarks.gpu_day.items import Asked, Item
from benchmarks.gpu_day.turns import Day, back_to_back, built, decode


class UnsavedDay(Day):
    mode = "prefix"


def open_section(asked: Asked) -> Day:
    return UnsavedDay(asked)


def items(asked: Asked) -> Sequence[Item]:
    streams = 32 if asked.on_gpu else 2
    return [
        Item("built", 5, built),
        Item("prompts back to back", 20, back_to_back),
        Item(f"decode {streams}", 20, partial(decode, streams)),
    ]
