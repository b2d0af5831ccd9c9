# SPDX-License-Identifier: MIT OR Apache-2.0
"""What runs inside every rank of a benchmark: scripts, which other Pythons run by their path."""
