# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist bench``: ferrodist and its peers side by side in one interleaved run.

``plan.py`` says what is measured, ``engines.py`` how each library is started, ``parts.py`` brings
them together and keeps cores busy, ``job.py`` talks to the ranks, ``driver.py`` takes turns;
``worker/`` runs inside the ranks. ``goals.py`` and ``report.py`` judge, ``join.py`` puts several
runs together, ``tables.py`` lays out, ``show.py``, ``page.py`` and ``pictures.py`` print.
"""
