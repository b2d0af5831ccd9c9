# SPDX-License-Identifier: MIT OR Apache-2.0
"""What commands draw: line charts as SVG and in the terminal, and how far they are.

There is no plotting library. The SVG is self-contained and follows the reader's light or dark mode.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Point = tuple[float, float]

_WIDTH, _PLOT_HEIGHT = 720, 300
_RIGHT, _BOTTOM, _TITLE = 28, 54, 46  # room beside, below and above the plot
_LETTER = 6.8  # about the width of a letter of the labels
_ROW = 20  # height of a row of the legend
_SAMPLE = 22  # length of a line in the legend
_MOST_DOTS = 40  # a series with more points than this is drawn without dots

_FEW_DECADES = 3  # so many leave room for ticks at 2 and 5
_FUZZ = 1e-9  # 0.3 / 0.1 must count as 3
_TINIEST, _LARGEST = 1e-290, 1e290  # beyond these, differences of numbers are no numbers any more
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

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

    def is_drawn(point: Point) -> bool:
        return has_place(point[0], is_log=log_x) and has_place(point[1], is_log=log_y)

    runs = [
        [list(run) for drawn, run in itertools.groupby(points, is_drawn) if drawn]
        for points in series.values()
    ]
    drawn = [point for one in runs for run in one for point in run]
    x_axis = fit_axis([x for x, _ in drawn], is_log=log_x, most_steps=9)
    y_axis = fit_axis([y for _, y in drawn], is_log=log_y, most_steps=7)
    left = 44 + _LETTER * max(map(len, y_axis.labels))
    legend = _legend(series, left)
    num_rows = legend[-1].row + 1 if legend else 0
    plot = _Plot(x_axis, y_axis, left, _TITLE + _ROW * num_rows)
    parts = _frame(plot, title, x_label, y_label)
    for entry, one in zip(legend, runs, strict=True):
        parts += _series(plot, entry, one)
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


def _legend(names: Iterable[str], left: float) -> list[_Entry]:
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


def _frame(plot: _Plot, title: str, x_label: str, y_label: str) -> list[str]:
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


def _series(plot: _Plot, entry: _Entry, runs: list[list[Point]]) -> list[str]:
    stroke = f'stroke="{entry.colour}" stroke-dasharray="{entry.dash}"'
    level, end = _TITLE + _ROW * entry.row, entry.left + _SAMPLE
    parts = [
        f'<path class="line" {stroke} d="M{entry.left:.1f} {level}H{end:.1f}"/>',
        _text(entry.name, end + 8, level + 4, "start"),
    ]
    is_sparse = sum(map(len, runs)) <= _MOST_DOTS
    for run in runs:
        places = [(f"{plot.x(x):.1f}", f"{plot.y(y):.1f}") for x, y in run]
        path = "L".join(f"{x} {y}" for x, y in places)
        parts.append(f'<path class="line" {stroke} d="M{path}"/>')
        for x, y in places if is_sparse or len(run) == 1 else ():
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{entry.colour}"/>')
    return parts


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


@dataclass(frozen=True, slots=True)
class Axis:
    """A range with its ticks; both ends are round numbers."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def place(self, value: float) -> float:
        numbers = (self.low, self.high, value)
        low, high, value = map(math.log10, numbers) if self.is_log else numbers
        return (value - low) / (high - low)


def has_place(value: float, *, is_log: bool) -> bool:
    return -_LARGEST < value < _LARGEST and (not is_log or value > _TINIEST)


def fit_axis(values: Sequence[float], *, is_log: bool, most_steps: int) -> Axis:
    """Return the smallest axis with round ends that holds all values, which all have a place.

    There are about ``most_steps`` steps from tick to tick, or fewer.
    """
    fit = _fit_log if is_log else _fit_linear
    return fit(values or [1.0, 10.0], most_steps)


def _fit_linear(values: Sequence[float], most_steps: int) -> Axis:
    low, high = min(values), max(values)
    if high - low <= max(_FUZZ * max(abs(low), abs(high)), _TINIEST):
        room = abs(low) / 2 if abs(low) > _TINIEST else 1.0
        low, high = low - room, high + room
    least = (high - low) / most_steps
    power: float = 10.0 ** math.floor(math.log10(least))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - _FUZZ))
    first, last = math.floor(low / step + _FUZZ), math.ceil(high / step - _FUZZ)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), False, ticks, _linear_labels(ticks, step))


def _fit_log(values: Sequence[float], most_steps: int) -> Axis:
    low, high = min(values), max(values)
    if high / low <= 1 + _FUZZ:
        low, high = low / 2, high * 2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    round_numbers = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    start = max(number for number in round_numbers if number <= low * (1 + _FUZZ))
    end = min(number for number in round_numbers if number >= high * (1 - _FUZZ))
    every = math.ceil((len(powers) - 1) / most_steps)
    decades = [float(f"1e{power}") for power in powers if power % every == 0]
    ticks = round_numbers if len(powers) - 1 <= _FEW_DECADES else decades
    kept = tuple(tick for tick in ticks if start <= tick <= end)
    return Axis(min(low, start), max(high, end), True, kept, tuple(map(_log_label, kept)))


def _linear_labels(ticks: Sequence[float], step: float) -> tuple[str, ...]:
    """Write ticks with one unit and as many digits as tell them apart."""
    largest = max(map(abs, ticks))
    if not 1e-3 <= largest < 1e15 or step < 1e-9 * largest:
        return tuple(_scientific(0.0 if abs(tick) < step / 2 else tick) for tick in ticks)
    unit, letter = _unit(largest) if largest >= 1e4 else (1.0, "")
    digits = max(0, -math.floor(math.log10(step / unit) + _FUZZ))
    return tuple(
        "0" if abs(tick) < step / 2 else f"{tick / unit:.{digits}f}{letter}" for tick in ticks
    )


def _log_label(tick: float) -> str:
    if not 1e-3 <= tick * (1 + _FUZZ) < 1e15:
        return _scientific(tick)
    unit, letter = _unit(tick * (1 + _FUZZ))
    return f"{tick / unit:.6g}{letter}"


def _unit(value: float) -> tuple[float, str]:
    return next((unit for unit in _UNITS if value >= unit[0]), (1.0, ""))


def _scientific(value: float) -> str:
    digits, _, power = f"{value:.6g}".partition("e")
    return f"{digits}e{int(power)}" if power else digits


# -- in the terminal ------------------------------------------------------------------------------

_EMPTY = 0x2800
# Braille: four rows of two dots to a character, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def sketch(values: Sequence[float], *, end: str, width: int = 60, height: int = 8) -> str:
    """Draw ``values`` from left to right, over an axis from 0 to ``end``; leave out NaN."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "nothing to draw"
    rows = _sketched_heights(values, 2 * width, 4 * height)
    cells = [[_EMPTY] * width for _ in range(height)]
    for column, row in enumerate(rows):
        before = rows[max(0, column - 1)]
        # The line runs on from the column before, so that steep parts have no gaps.
        for dot in range(min(row, before + 1), max(row, before - 1) + 1):
            cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
    lines = ["".join(map(chr, line)) for line in cells]
    return "\n".join(_with_axes(lines, f"{max(values):.3f}", f"{min(values):.3f}", end))


def _sketched_heights(values: Sequence[float], columns: int, rows: int) -> list[int]:
    low, high = min(values), max(values)
    scale = (rows - 1) / (high - low) if high > low else 0.0
    places = np.linspace(0, len(values) - 1, columns)
    spread = np.interp(places, range(len(values)), values)
    return [round((high - value) * scale) for value in spread.tolist()]


def _with_axes(lines: list[str], high: str, low: str, end: str) -> list[str]:
    margin, width = max(len(high), len(low)), len(lines[0])
    labels = [high, *[""] * (len(lines) - 2), low]
    return [
        *(f"{label:>{margin}} │{line}" for label, line in zip(labels, lines, strict=True)),
        f"{'':>{margin}} └{'─' * width}",
        f"{'':>{margin}}  0{end:>{width - 1}}",
    ]


# -- progress: a live bar on a terminal, a few plain lines in a log --------------------------------

ShowProgress = Callable[[int, float], None]
"""Called with the number of steps done and the loss of the last one."""

_LINES_IN_A_LOG = 5


def open_progress(console: Console, title: str, steps: int) -> AbstractContextManager[ShowProgress]:
    return (_live if is_live(console) else _plain)(console, title, steps)


def is_live(console: Console) -> bool:
    # Asked of the file, not of rich: FORCE_COLOR must not fill a log with frames of a bar.
    return console.file.isatty() and console.is_interactive


@contextmanager
def _live(console: Console, title: str, steps: int) -> Iterator[ShowProgress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("training loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=steps, loss="-")
        yield lambda step, loss: progress.update(task, completed=step, loss=f"{loss:.3f}")


@contextmanager
def _plain(console: Console, title: str, steps: int) -> Iterator[ShowProgress]:
    every = max(1, steps // _LINES_IN_A_LOG)

    def report(step: int, loss: float) -> None:
        if step % every == 0:
            console.print(f"{title}: step {step} of {steps}, training loss {loss:.3f}")

    yield report
