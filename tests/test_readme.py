# SPDX-License-Identifier: MIT OR Apache-2.0
"""What README says about speed is what the tables of docs/benchmarks.md say."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = " ".join((ROOT / "README.md").read_text().split())


def rows_of(title: str, call: str) -> list[dict[str, str]]:
    """Read the rows of one call from the table under a title; of equal columns the first counts."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE)
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    columns, _, *rows = table
    named = [dict(reversed([*zip(columns, row, strict=False)])) for row in rows]
    return [row for row in named if row["call"] == call]


def ratios_of(num_ranks: int) -> list[str]:
    rows = rows_of(f"{num_ranks} ranks: against the peers", "allreduce")
    assert [rows[0]["size"], rows[-1]["size"]] == ["8 B", "64 MB"]
    return sorted((row["x MPI"] for row in rows), key=float)


def test_readme_says_how_much_faster_allreduce_is_than_mpi_as_the_tables_do():
    said = re.search(
        r"From 8 bytes to 64 MB it is ([\d.]+) to ([\d.]+) times as fast as the faster of MPICH "
        r"and Open MPI; with four ranks on two cores, ([\d.]+) to ([\d.]+) times",
        README,
    )
    assert said is not None
    two, four = ratios_of(2), ratios_of(4)
    assert said.groups() == (two[0], two[-1], four[0], four[-1])


def test_readme_says_how_long_a_small_allreduce_takes_as_the_tables_do():
    said = re.search(
        r"allreduce of 8 bytes takes ([\d.]+) microseconds for NumPy arrays and ([\d.]+) for torch",
        README,
    )
    assert said is not None
    of_numpy = rows_of("2 ranks: against the peers", "allreduce")[0]["ferrodist"]
    any_array = rows_of("2 ranks: any array, blocking and in flight", "allreduce, torch tensor")
    assert said.groups() == (of_numpy, any_array[0]["takes"])


def test_no_other_sentence_of_readme_compares_speeds():
    assert len(re.findall(r"times as fast|times faster|faster than", README)) == 1
