# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist bench``: ferrodist and its peers side by side in one interleaved run.

``plan.py`` says what is measured, ``engines.py`` how each library is started, ``job.py`` talks to
its ranks, ``driver.py`` takes turns; ``worker/`` runs inside the ranks. ``goals.py`` and
``report.py`` judge, ``tables.py`` lays out, ``show.py`` and ``page.py`` print.
"""
