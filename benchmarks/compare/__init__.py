# SPDX-License-Identifier: MIT OR Apache-2.0
"""``python -m benchmarks.compare``: ferrodist and its peers side by side in one interleaved run.

``plan.py`` says what is measured, ``engines.py`` how each library is started, ``driver.py`` starts
the ranks and takes turns; ``worker/`` runs inside the ranks, also under a peer's own Python.
``goals.py`` and ``report.py`` judge, ``tables.py`` and ``page.py`` show.
"""
