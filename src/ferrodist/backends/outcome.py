# SPDX-License-Identifier: MIT OR Apache-2.0
"""The name that ``process_messenger`` has for StatusCode."""

from ferrodist.backends.status import StatusCode as Outcome

__all__ = ["Outcome"]
