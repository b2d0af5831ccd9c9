# SPDX-License-Identifier: MIT OR Apache-2.0
"""``python -m ferrodist``: the twin of the ``ferrodist`` command."""

from ferrodist.launch.main import main

main()
