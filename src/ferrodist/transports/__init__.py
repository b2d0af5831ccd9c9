# SPDX-License-Identifier: MIT OR Apache-2.0
"""Move bytes between ranks.

A transport knows ranks and bytes, not dtypes, collectives or groups' members. A new wire is one
file here. Do not put anything here that folds, chooses an algorithm or decides what an error means.
"""
