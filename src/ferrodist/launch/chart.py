# SPDX-License-Identifier: MIT OR Apache-2.0
"""Draw line charts as SVG: one function, no plotting library, shared by all commands.

The picture is self-contained and follows the reader's light or dark mode.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from ferrodist.launch.axis import Axis, fit_axis, has_place

Point = tuple[float, float]

_WIDTH, _PLOT_HEIGHT = 720, 300
_RIGHT, _BOTTOM, _TITLE = 28, 54, 46  # room beside, below and above the plot
_LETTER = 6.8  # about the width of a letter of the labels
_ROW = 20  # height of a row of the legend
_SAMPLE = 22  # length of a line in the legend
_MOST_DOTS = 40  # a series with more points than this is drawn without dots

# Mid tones, at least 3:1 against white and against the dark paper.
COLOURS = ("#2b7bd4", "#d9662b", "#17916b", "#a35bd1", "#d6405d", "#148c9c", "#a57c1b", "#72808e")
_DASHES = ("none", "7 5", "2 5")  # tell series apart when the colours run out

_STYLE = """
.ferrodist-chart { font: 12px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif }
.ferrodist-chart text { fill: #52606d }
.ferrodist-chart .title { font-size: 15px; font-weight: 600; fill: #1f2933 }
.ferrodist-chart .paper { fill: #ffffff }
.ferrodist-chart .grid { stroke: #e6e9ed }
.ferrodist-chart .axis { stroke: #9aa5b1 }
.ferrodist-chart .line { fill: none; stroke-width: 2; stroke-linejoin: round }
@media (prefers-color-scheme: dark) {
  .ferrodist-chart text { fill: #9fb0bf }
  .ferrodist-chart .title { fill: #e6edf3 }
  .ferrodist-chart .paper { fill: #14181d }
  .ferrodist-chart .grid { stroke: #262d35 }
  .ferrodist-chart .axis { stroke: #5b6874 }
}
"""


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Return an SVG picture of the series, each a sequence of (x, y), joined in the order given.

    A point that has no place, such as NaN or zero on a logarithmic axis, leaves a gap in its line.
    """
    runs = [list(_runs(points, log_x, log_y)) for points in series.values()]
    drawn = [point for one in runs for run in one for point in run]
    x_axis = fit_axis([x for x, _ in drawn], is_log=log_x, most_steps=9)
    y_axis = fit_axis([y for _, y in drawn], is_log=log_y, most_steps=7)
    left = 44 + _LETTER * max(map(len, y_axis.labels))
    legend = _legend(series, left)
    num_rows = legend[-1].row + 1 if legend else 0
    plot = _Plot(x_axis, y_axis, left, _TITLE + _ROW * num_rows)
    parts = _frame(plot, title, x_label, y_label)
    for entry, one in zip(legend, runs, strict=True):
        parts += _legend_entry(entry)
        parts += [_line(plot, entry, run) for run in one]
        parts += _dots(plot, entry, one)
    if not drawn:
        parts.append(_text("no data", (plot.left + plot.right) / 2, plot.top + _PLOT_HEIGHT / 2))
    return _document(parts, title, plot.bottom + _BOTTOM)


@dataclass(frozen=True, slots=True)
class _Plot:
    """The area the lines are drawn in, in pixels from the upper left corner."""

    x_axis: Axis
    y_axis: Axis
    left: float
    top: float

    @property
    def right(self) -> float:
        return _WIDTH - _RIGHT

    @property
    def bottom(self) -> float:
        return self.top + _PLOT_HEIGHT

    def x(self, value: float) -> float:
        return self.left + self.x_axis.place(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self.y_axis.place(value) * _PLOT_HEIGHT


@dataclass(frozen=True, slots=True)
class _Entry:
    """A series in the legend: its name, where it stands, how its line looks."""

    name: str
    row: int
    left: float
    colour: str
    dash: str


def _runs(points: Sequence[Point], log_x: bool, log_y: bool) -> Iterator[list[Point]]:
    """Cut a series at the points that have no place."""

    def is_drawn(point: Point) -> bool:
        return has_place(point[0], is_log=log_x) and has_place(point[1], is_log=log_y)

    return (list(run) for drawn, run in itertools.groupby(points, is_drawn) if drawn)


def _legend(names: Iterable[str], left: float) -> list[_Entry]:
    """Give every series its look and a place above the plot, row by row."""
    entries: list[_Entry] = []
    row, x = 0, left
    for index, name in enumerate(names):
        text = _shortened(name, 80)
        width = _SAMPLE + 30 + _LETTER * len(text)
        if x > left and x + width > _WIDTH:
            row, x = row + 1, left
        dash = _DASHES[index // len(COLOURS) % len(_DASHES)]
        entries.append(_Entry(text, row, x, COLOURS[index % len(COLOURS)], dash))
        x += width
    return entries


def _legend_entry(entry: _Entry) -> list[str]:
    y = _TITLE + _ROW * entry.row
    end = entry.left + _SAMPLE
    return [
        f'<path class="line" {_stroke(entry)} d="M{entry.left:.1f} {y}H{end:.1f}"/>',
        _text(entry.name, end + 8, y + 4, "start"),
    ]


def _frame(plot: _Plot, title: str, x_label: str, y_label: str) -> list[str]:
    """Draw everything that is not a series: the words, the grid, the axes."""
    middle = (plot.top + plot.bottom) / 2
    upright = f'transform="rotate(-90 18 {middle:.1f})"'
    parts = [
        _text(_shortened(title, 80), plot.left, 26, "start", 'class="title"'),
        _text(_shortened(x_label, 90), (plot.left + plot.right) / 2, plot.bottom + 42),
        _text(_shortened(y_label, 45), 18, middle, "middle", upright),
    ]
    for tick, label in zip(plot.x_axis.ticks, plot.x_axis.labels, strict=True):
        x = plot.x(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {plot.top:.1f}V{plot.bottom:.1f}"/>')
        parts.append(_text(label, x, plot.bottom + 19))
    for tick, label in zip(plot.y_axis.ticks, plot.y_axis.labels, strict=True):
        y = plot.y(tick)
        parts.append(f'<path class="grid" d="M{plot.left:.1f} {y:.1f}H{plot.right:.1f}"/>')
        parts.append(_text(label, plot.left - 8, y + 4, "end"))
    parts.append(f'<path class="axis" d="M{plot.left:.1f} {plot.bottom:.1f}H{plot.right:.1f}"/>')
    return parts


def _line(plot: _Plot, entry: _Entry, run: list[Point]) -> str:
    path = "L".join(f"{plot.x(x):.1f} {plot.y(y):.1f}" for x, y in run)
    return f'<path class="line" {_stroke(entry)} d="M{path}"/>'


def _dots(plot: _Plot, entry: _Entry, runs: list[list[Point]]) -> list[str]:
    """Mark the points where they are few, and those that no line goes through."""
    is_sparse = sum(map(len, runs)) <= _MOST_DOTS
    return [
        f'<circle cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="3" fill="{entry.colour}"/>'
        for run in runs
        if is_sparse or len(run) == 1
        for x, y in run
    ]


def _stroke(entry: _Entry) -> str:
    return f'stroke="{entry.colour}" stroke-dasharray="{entry.dash}"'


def _text(text: str, x: float, y: float, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{_escaped(text)}</text>'


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _escaped(text: str) -> str:
    """Make text safe inside XML, which forbids control characters even in escaped form."""
    return escape(re.sub(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))


def _document(parts: list[str], title: str, height: float) -> str:
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" class="ferrodist-chart" role="img" \
width="{_WIDTH}" height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}">
<title>{_escaped(title)}</title>
<style>{_STYLE}</style>
<rect class="paper" width="100%" height="100%" rx="6"/>
{body}
</svg>
"""
