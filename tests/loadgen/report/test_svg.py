import math
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis.strategies import floats, lists, sampled_from, text, tuples

from reprise.loadgen.report.svg import HEIGHT, WIDTH, Axis, Series, linear_ticks, lines, log_ticks, stacked, value

NUMBERS = floats(-1e6, 1e6, allow_nan=False)
POINTS = lists(tuples(NUMBERS, NUMBERS), max_size=20)


def parse(markup: str) -> ET.Element:
    return ET.fromstring(f"<div>{markup}</div>")


@given(points=POINTS, kind=sampled_from(["line", "dashed", "points"]), name=text(
    alphabet="ab<>&\"' é", max_size=8), log=sampled_from([True, False]))  # fmt: skip
def test_every_plot_is_well_formed_and_stays_inside(points, kind, name, log):
    x, y = Axis(name, log=log, from_zero=False), Axis("y", log=log)
    root = parse(lines(name, x, y, [Series(name, points, 0, kind), Series("b", points, 9, kind)]))
    for circle in root.iter("circle"):
        assert -0.1 <= float(circle.get("cx", "nan")) <= WIDTH + 0.1
        assert -0.1 <= float(circle.get("cy", "nan")) <= HEIGHT + 0.1
    drawn = [p for line in root.iter("polyline") for p in line.get("points", "").split()]
    assert all(0 <= float(n) <= WIDTH for p in drawn for n in p.split(","))


def test_points_lie_where_they_belong():
    root = parse(lines("t", Axis("x"), Axis("y"), [Series("a", [(0, 0), (5, 5), (10, 10)], 0)]))
    places = [tuple(map(float, p.split(","))) for p in root.find(".//polyline").get("points").split()]
    assert places == [(64, 256), (305, 134), (546, 12)]  # margins 64, 14, 12 and 44
    root = parse(lines("t", Axis("x", log=True), Axis("y"), [Series("a", [(1, 0), (10, 1), (100, 2)], 0)]))
    places = [tuple(map(float, p.split(","))) for p in root.find(".//polyline").get("points").split()]
    assert [x for x, _ in places] == [64, 305, 546]


def test_bars_stand_on_each_other():
    root = parse(stacked("t", Axis("x"), Axis("share", most=1.0), ["a", "b"], [("1", [0.25, 0.5]), ("2", [1.0, 0.0])]))
    bars = [(float(r.get("y")), float(r.get("height"))) for r in root.iter("rect")]
    assert bars == [(195, 61), (73, 122), (12, 244)]  # heights within 244
    assert [item.text or (item[0].tail or "") for item in root.iter("li")] == ["a", "b"]


def test_nothing_to_draw_is_said():
    assert "nothing to draw" in lines("t", Axis("x"), Axis("y"), [Series("a", [], 0)])
    assert "nothing to draw" in lines("t", Axis("x", log=True), Axis("y"), [Series("a", [(0, 1), (math.nan, 1)], 0)])
    assert "nothing to draw" in stacked("t", Axis("x"), Axis("y"), [], [])


@given(values=tuples(NUMBERS, NUMBERS))
def test_linear_ticks_surround_the_values(values):
    low, high = sorted(values)
    ticks = linear_ticks(low, high)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 9
    assert ticks == sorted(set(ticks))


@given(values=tuples(floats(1e-3, 1e6), floats(1e-3, 1e6)))
def test_logarithmic_ticks_surround_the_values(values):
    low, high = sorted(values)
    ticks = log_ticks(low, high)
    assert ticks[0] <= low * 1.000001
    assert ticks[-1] >= high * 0.999999
    assert 2 <= len(ticks) <= 11
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0"), (0.25, "0.25"), (1500, "1500"), (25_000, "25k"), (3.2e6, "3.2M")]
)
def test_short_numbers(number, shown):
    assert value(number) == shown
