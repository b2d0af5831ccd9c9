# SPDX-License-Identifier: MIT OR Apache-2.0
"""Charts are well-formed SVG, every point is inside the plot, ticks are round and readable."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrodist.launch.chart import COLOURS, fit_axis, line_chart

NUMBER = re.compile(r"-?\d+\.?\d*")


@dataclass(frozen=True)
class Chart:
    """A picture taken apart."""

    root: ElementTree.Element

    def all(self, tag: str, kind: str | None = None) -> list[ElementTree.Element]:
        found = self.root.iter(f"{{http://www.w3.org/2000/svg}}{tag}")
        return [one for one in found if kind is None or one.get("class") == kind]

    @property
    def texts(self) -> list[str]:
        return [one.text or "" for one in self.all("text")]

    @property
    def plot(self) -> tuple[float, float, float, float]:
        """Left, right, top and bottom: the ends of the grid lines."""
        paths = [one.get("d") or "" for one in self.all("path", "grid")]
        left, _, right = numbers(next(path for path in paths if "H" in path))
        _, top, bottom = numbers(next(path for path in paths if "V" in path))
        return left, right, top, bottom

    @property
    def lines(self) -> list[list[tuple[float, float]]]:
        """The corners of every line of a series; those of the legend have an H."""
        paths = [one.get("d") or "" for one in self.all("path", "line")]
        values = [numbers(path) for path in paths if "H" not in path]
        return [list(zip(one[::2], one[1::2], strict=True)) for one in values]

    @property
    def dots(self) -> list[tuple[float, float]]:
        return [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in self.all("circle")]


def numbers(path: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(path)]


def draw(series: Any, **options: Any) -> Chart:
    words = {"title": "title", "x_label": "across", "y_label": "up", **options}
    return Chart(ElementTree.fromstring(line_chart(series, **words)))


def check_points_are_inside(chart: Chart) -> None:
    left, right, top, bottom = chart.plot
    for x, y in [*chart.dots, *(point for line in chart.lines for point in line)]:
        assert left - 0.1 <= x <= right + 0.1
        assert top - 0.1 <= y <= bottom + 0.1


def test_points_lie_where_the_axes_say() -> None:
    chart = draw({"a": [(0, 0), (5, 10), (10, 20)]})
    left, right, top, bottom = chart.plot
    middle = ((left + right) / 2, (top + bottom) / 2)
    assert chart.lines == [[(left, bottom), pytest.approx(middle, abs=0.2), (right, top)]]
    assert chart.dots == chart.lines[0]
    assert {"title", "across", "up", "a", "0", "5", "10", "15", "20"} <= set(chart.texts)


def test_logarithmic_axes_space_powers_evenly() -> None:
    chart = draw({"a": [(1, 1e-3), (100, 1), (1e4, 1e3)]}, log_x=True, log_y=True)
    (line,) = chart.lines
    check_points_are_inside(chart)
    assert line[1] == pytest.approx(
        ((line[0][0] + line[2][0]) / 2, (line[0][1] + line[2][1]) / 2), abs=0.2
    )
    assert {"1", "10", "100", "1k", "10k", "0.001", "0.1"} <= set(chart.texts)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("series", [{}, {"a": []}, {"a": [(math.nan, 1), (1, math.inf)]}])
def test_nothing_to_draw_says_so(series: Any, log: bool) -> None:
    chart = draw(series, log_x=log, log_y=log)
    assert "no data" in chart.texts
    assert chart.dots == []


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-12, 1e200, 1e-300])
def test_one_point_is_a_dot_amid_the_plot(value: float) -> None:
    chart = draw({"a": [(value, value)]})
    check_points_are_inside(chart)
    assert len(chart.dots) == 1


@pytest.mark.parametrize("log", [False, True])
def test_constant_series_is_a_level_line_off_the_edges(log: bool) -> None:
    chart = draw({"a": [(x, 7.0) for x in range(1, 60)]}, log_y=log)
    _, _, top, bottom = chart.plot
    (line,) = chart.lines
    (level,) = {y for _, y in line}
    assert top < level < bottom


def test_points_without_a_place_leave_gaps() -> None:
    points = [(1, 1), (2, 2), (3, math.nan), (4, 4), (5, 5), (6, -math.inf), (7, 7)]
    chart = draw({"a": points})
    assert [len(line) for line in chart.lines] == [2, 2, 1]
    assert len(chart.dots) == 5
    assert len(draw({"a": [(0, 1), (1, 0), (2, 3)]}, log_x=True, log_y=True).dots) == 1


def test_many_points_are_drawn_without_dots() -> None:
    assert draw({"a": [(x, x) for x in range(500)]}).dots == []


def test_text_is_escaped_and_cleaned() -> None:
    nasty = "<b> & \"x\" 'y' \x00 \x1b \ud800 ]]>"
    chart = draw({nasty: [(1, 1)]}, title=nasty, x_label=nasty, y_label=nasty)
    expected = "<b> & \"x\" 'y' \ufffd \ufffd \ufffd ]]>"
    assert chart.texts.count(expected) == 4
    assert chart.all("title")[0].text == expected


def test_long_words_are_shortened_and_the_legend_wraps_inside_the_picture() -> None:
    chart = draw({f"{n} {'w' * 300}": [(n, n)] for n in range(9)}, title="t" * 300)
    assert max(map(len, chart.texts)) <= 80
    rows = {one.get("y") for one in chart.all("text") if (one.text or "").endswith("w…")}
    assert len(rows) == 9
    check_points_are_inside(chart)


def test_series_differ_in_colour_and_beyond_that_in_dashes() -> None:
    chart = draw({f"series {n}": [(0, n), (1, n)] for n in range(3 * len(COLOURS))})
    looks = {
        (one.get("stroke"), one.get("stroke-dasharray"))
        for one in chart.all("path", "line")
        if "H" not in (one.get("d") or "")
    }
    assert len(looks) == 3 * len(COLOURS)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 1.03], ["0", "0.2", "0.4", "0.6", "0.8", "1.0", "1.2"]),
        ([0.1, 0.3], ["0.10", "0.15", "0.20", "0.25", "0.30"]),
        ([-1, 1], ["-1.0", "-0.5", "0", "0.5", "1.0"]),
        ([0, 7000], ["0", "1000", "2000", "3000", "4000", "5000", "6000", "7000"]),
        ([0, 30000], ["0", "5k", "10k", "15k", "20k", "25k", "30k"]),
        ([0, 2.5e6], ["0", "0.5M", "1.0M", "1.5M", "2.0M", "2.5M"]),
        ([0, 3e-5], ["0", "5e-6", "1e-5", "1.5e-5", "2e-5", "2.5e-5", "3e-5"]),
        ([1e20, 3e20], ["1e20", "1.5e20", "2e20", "2.5e20", "3e20"]),
    ],
)
def test_linear_ticks_are_round_and_tell_apart(values: list[float], labels: list[str]) -> None:
    assert list(fit_axis(values, is_log=False, most_steps=7).labels) == labels


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1, 1000], ["1", "2", "5", "10", "20", "50", "100", "200", "500", "1k"]),
        ([3, 8], ["2", "5", "10"]),
        ([4, 6e7], ["10", "100", "1k", "10k", "100k", "1M", "10M", "100M"]),
        ([1e-6, 1], ["1e-6", "1e-5", "0.0001", "0.001", "0.01", "0.1", "1"]),
        ([1e-20, 1e20], ["1e-20", "1e-15", "1e-10", "1e-5", "1", "100k", "10G", "1e15", "1e20"]),
    ],
)
def test_logarithmic_ticks_are_round(values: list[float], labels: list[str]) -> None:
    assert list(fit_axis(values, is_log=True, most_steps=9).labels) == labels


anything = st.floats() | st.integers(-5, 5) | st.floats(1, 1 + 1e-12)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.dictionaries(st.text(max_size=5), st.lists(st.tuples(anything, anything), max_size=6)),
    st.booleans(),
    st.booleans(),
)
def test_any_numbers_make_a_chart_with_all_points_inside(
    series: dict[str, list[tuple[float, float]]], log_x: bool, log_y: bool
) -> None:
    chart = draw(series, log_x=log_x, log_y=log_y)
    check_points_are_inside(chart)
    assert 0 < len(chart.all("path", "grid")) < 40
    assert all(one.get("d") and "nan" not in one.attrib["d"] for one in chart.all("path"))
