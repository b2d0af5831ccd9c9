# SPDX-License-Identifier: MIT OR Apache-2.0
"""Do whole collectives: one file per backend, found by name through ``registry``.

A backend sees small integers and Buffers, never a user's array. What is common to all (the order of
calls, handles in flight, closing) is in ``base``; what ranks are told when something is wrong is in
``group_error``. Do not put an algorithm here: those are data, in ``schedules``.
"""
