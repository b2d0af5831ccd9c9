# SPDX-License-Identifier: MIT OR Apache-2.0
"""The version, apart so that every package can name it."""

__version__ = "0.1.0"
