"""What every test needs."""

import signal


def pytest_configure() -> None:
    """Let Ctrl-C work in the programs that tests start, however the tests were started.

    A shell ignores SIGINT for what it puts into the background, and programs inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
