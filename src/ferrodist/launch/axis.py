# SPDX-License-Identifier: MIT OR Apache-2.0
"""The axes of a chart: which range, which ticks, which words beside them. Knows no pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_FEW_DECADES = 3  # so many leave room for ticks at 2 and 5
_FUZZ = 1e-9  # 0.3 / 0.1 must count as 3
_TINIEST, _LARGEST = 1e-290, 1e290  # beyond these, differences of numbers are no numbers any more
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Axis:
    """A range with its ticks; both ends are round numbers."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def place(self, value: float) -> float:
        """Return where a value lies: 0 at the low end, 1 at the high one."""
        low, high, value = (_scaled(number, self.is_log) for number in (self.low, self.high, value))
        return (value - low) / (high - low)


def _scaled(value: float, is_log: bool) -> float:
    return math.log10(value) if is_log else value


def has_place(value: float, *, is_log: bool) -> bool:
    """Tell whether a value can be drawn: a finite number, on a logarithmic axis above zero."""
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
    step = _round_step((high - low) / most_steps)
    first, last = math.floor(low / step + _FUZZ), math.ceil(high / step - _FUZZ)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), False, ticks, _linear_labels(ticks, step))


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... that is large enough, at any power of ten."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - _FUZZ))


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
