# SPDX-License-Identifier: MIT OR Apache-2.0
"""Put the documents of several runs together, so that a part can be measured again alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from ferrodist.launch.bench.report import Document, result_key


def join_documents(documents: Sequence[Document]) -> Document:
    """Return one document; of results that are in several, the last one counts."""
    return reduce(_join, documents)


def _join(first: Document, second: Document) -> Document:
    results = {result_key(one): one for one in [*first["results"], *second["results"]]}
    return {
        "date": _both(first["date"], second["date"]),
        "machine": _join_facts(first["machine"], second["machine"]),
        "missing": first["missing"] | second["missing"],
        "results": list(results.values()),
        "versions": {
            engine: _join_facts(first["versions"].get(engine, {}), versions)
            for engine, versions in (first["versions"] | second["versions"]).items()
        },
        "failures": [*first["failures"], *second["failures"]],
    }


def _join_facts(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge facts by their names; where they differ, say both."""
    return {name: _both(first.get(name, fact), fact) for name, fact in second.items()}


def _both(first: Any, second: Any) -> Any:
    return first if str(second) in str(first).split(" and ") else f"{first} and {second}"
