"""Draws plots as inline SVG: lines, points and stacked bars on linear or logarithmic axes. No scripts.

Colours are classes (`s0`, `s1`, …) that the page's style defines, so plots follow light and dark mode.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 44
COLOURS = 8
_LEAST = 1e-9  # smallest value on a logarithmic axis
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int  # index into the colours, modulo `COLOURS`
    kind: Literal["line", "dashed", "points"] = "line"


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    log: bool = False
    from_zero: bool = True
    most: float | None = None  # where the axis ends, whatever the values are
    tight: bool = False  # end at the largest value, not at a round number


def lines(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Draw lines or points. Values that are not finite are left out, and on a logarithmic axis those not above 0."""
    drawn = [_drawable(each, x, y) for each in series]
    everything = [point for each in drawn for point in each.points]
    if not everything:
        return _empty(title)
    across = _Scale([p[0] for p in everything], x, _LEFT, WIDTH - _RIGHT)
    up = _Scale([p[1] for p in everything], y, HEIGHT - _BOTTOM, _TOP)
    body = [_grid(across, up, x, y)]
    for each in drawn:
        name = f"s{each.colour % COLOURS}"
        places = [(across(px), up(py)) for px, py in each.points]
        if each.kind == "points":
            dots = "".join(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="1.8"/>' for px, py in places)
            body.append(f'<g class="dots {name}">{dots}</g>')
            continue
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        dash = " dashed" if each.kind == "dashed" else ""
        body.append(
            f'<polyline class="line {name}{dash}" points="{path}"><title>{escape(each.name)}</title></polyline>'
        )
        if len(places) <= 40 and not x.log:
            body += [
                f'<circle class="dot {name}" cx="{px:.1f}" cy="{py:.1f}" r="2.6"><title>{escape(each.name)}: '
                f"{escape(x.label)} {value(a)}, {escape(y.label)} {value(b)}</title></circle>"
                for (px, py), (a, b) in zip(places, each.points, strict=True)
            ]
    return _frame(title, body) + legend([(each.name, each.colour, each.kind == "dashed") for each in series])


def stacked(title: str, x: Axis, y: Axis, names: Sequence[str], bars: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Draw stacked bars. bars: a label and one part per name."""
    if not bars:
        return _empty(title)
    up = _Scale([sum(parts) for _, parts in bars], y, HEIGHT - _BOTTOM, _TOP)
    step = (WIDTH - _RIGHT - _LEFT) / len(bars)
    width = min(44.0, step * 0.8)
    body = [_grid(None, up, x, y)]
    every = math.ceil(len(bars) / 16)
    for place, (label, parts) in enumerate(bars):
        left, below = _LEFT + step * (place + 0.5) - width / 2, 0.0
        for part, (name, size) in enumerate(zip(names, parts, strict=True)):
            top, bottom = up(below + size), up(below)
            below += size
            if size > 0:
                body.append(
                    f'<rect class="bar s{part % COLOURS}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
                    f'height="{bottom - top:.1f}"><title>{escape(label)}: {escape(name)} {value(size)}</title></rect>'
                )
        if place % every == 0:
            middle = left + width / 2
            body.append(
                f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{escape(label)}</text>'
            )
    return _frame(title, body) + legend([(name, part, False) for part, name in enumerate(names)])


def legend(entries: Sequence[tuple[str, int, bool]]) -> str:
    if len(entries) < 2:
        return ""
    items = "".join(
        f'<li><svg width="18" height="8" aria-hidden="true"><line class="line s{colour % COLOURS}'
        f'{" dashed" if dashed else ""}" x1="0" y1="4" x2="18" y2="4"/></svg>{escape(name)}</li>'
        for name, colour, dashed in entries
    )
    return f'<ul class="legend">{items}</ul>'


def value(number: float) -> str:
    """Format a number briefly, for a tick or a tooltip."""
    size = abs(number)
    if size >= 1e6:
        return f"{number / 1e6:.3g}M"
    if size >= 1e4:
        return f"{number / 1e3:.3g}k"
    return f"{number:.4g}"


class _Scale:
    """Maps values to positions in the picture."""

    def __init__(self, values: Sequence[float], axis: Axis, start: float, stop: float) -> None:
        low, high = min(values), max(values)
        if axis.most is not None:
            high = axis.most
        self._map: Callable[[float], float] = math.log10 if axis.log else float
        if axis.log:
            self.ticks = log_ticks(low, high)
            low, high = min(low, self.ticks[0]), max(high, self.ticks[-1])
        else:
            if axis.from_zero:
                low = min(0.0, low)
            self.ticks = linear_ticks(low, high)
            low = low if axis.tight and low < high else min(low, self.ticks[0])
            # a single value gives the axis no width of its own
            if axis.most is None and (not axis.tight or high <= low):
                high = max(high, self.ticks[-1])
        self._low, self._width = self._map(low), self._map(high) - self._map(low)
        self._start, self._length = start, stop - start

    def __call__(self, number: float) -> float:
        return self._start + (self._map(number) - self._low) / self._width * self._length


def linear_ticks(low: float, high: float) -> list[float]:
    """Return about five round values that enclose `low` to `high`."""
    # almost equal values still need an axis of some width
    span = max(high - low, 1e-6 * max(abs(low), abs(high)), _LEAST)
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * place, 12) for place in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten that enclose `low` to `high`; powers alone if those are too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) + 1e-12)
    fine = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    below = max((tick for tick in fine if tick <= low * (1 + 1e-9)), default=fine[0])
    above = min((tick for tick in fine if tick >= high * (1 - 1e-9)), default=fine[-1])
    if above <= below:
        above = min(tick for tick in fine if tick > below)
    chosen = [tick for tick in fine if below <= tick <= above]
    if len(chosen) <= 9:
        return chosen
    return [
        10.0**power for power in range(math.floor(math.log10(below) + 1e-9), math.ceil(math.log10(above) - 1e-9) + 1)
    ]


def _drawable(series: Series, x: Axis, y: Axis) -> Series:
    def fits(number: float, axis: Axis) -> bool:
        return math.isfinite(number) and (number > _LEAST or not axis.log)

    points = [point for point in series.points if None not in point and fits(point[0], x) and fits(point[1], y)]
    return Series(series.name, points, series.colour, series.kind)


def _grid(across: _Scale | None, up: _Scale, x: Axis, y: Axis) -> str:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for tick in up.ticks:
        at = up(tick)
        if at < _TOP - 1:
            continue
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{value(tick)}</text>')
    for tick in across.ticks if across else ():
        at = across(tick) if across else 0.0
        if not _LEFT - 1 < at < right + 1:
            continue
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{value(tick)}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>')
    half = (_TOP + bottom) / 2
    parts.append(
        f'<text class="label" x="14" y="{half}" text-anchor="middle" transform="rotate(-90 14 {half})">'
        f"{escape(y.label)}</text>"
    )
    return "".join(parts)


def _frame(title: str, body: Sequence[str]) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(body)}</svg>"
    )


def _empty(title: str) -> str:
    words = f'<text class="label" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">nothing to draw</text>'
    return _frame(title, [words])
