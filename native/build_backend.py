# SPDX-License-Identifier: MIT OR Apache-2.0
"""What pip builds the package with: scikit-build-core, after a look at what the build needs.

What is missing is named in one sentence, before CMake prints a page about it. ``make`` runs this
file for the same check before it makes an environment; an old Python can run it, to be refused.
"""

import functools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec

_MACHINES = ("x86_64", "aarch64")
_OLDEST_PYTHON = (3, 11)
_CXX20 = "#include <bit>\n#include <semaphore>\nint main() { return std::countr_zero(1u); }\n"


def missing():
    """Return a sentence about what this machine lacks to compile the package; None if nothing."""
    if sys.version_info < _OLDEST_PYTHON:
        return f"needs Python 3.11 or later, and {sys.executable} is {platform.python_version()}"
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        found = f"{platform.system()} on {platform.machine()}"
        return f"runs on Linux, on {' and '.join(_MACHINES)}; this is {found}"
    named = os.environ.get("CXX")
    compiler = _try_compiler([named] if named else ["c++", "g++", "clang++"])
    if compiler is None:
        found = f", and CXX={named!r} is not there" if named else ""
        return f"needs a C++20 compiler{found}: install g++ 11 or later, or clang 14 or later"
    if not _compiles(compiler, _CXX20):
        found = " ".join(compiler)
        return f"needs a C++20 compiler, and {found!r} is none: install g++ 11 or later"
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        return (
            f"needs Python's headers, and {header} is not there: install python3-dev "
            "(Debian and Ubuntu; python3-devel on Fedora)"
        )
    return None


def missing_for_environment():
    """Return a sentence about what this Python lacks to make an environment with pip in it."""
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        return f"needs Python's venv module, and {sys.executable} has none: install python3-venv"
    return None


def _try_compiler(names):
    for name in names:
        words = shlex.split(name)
        if shutil.which(words[0]):
            return words
    return None


def _compiles(compiler, code):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "try.cpp")
        with open(path, "w") as file:
            file.write(code)
        command = [*compiler, "-std=c++20", "-fsyntax-only", path]
        return subprocess.run(command, capture_output=True).returncode == 0


def _check(sentence):
    if sentence:
        sys.exit(f"ferrodist {sentence}")


def _checked(hook):
    @functools.wraps(hook)
    def run(*args, **options):
        _check(missing())
        return hook(*args, **options)

    return run


if __name__ == "__main__":
    _check(missing() or missing_for_environment())
else:
    from scikit_build_core import build as _build

    build_sdist = _build.build_sdist
    get_requires_for_build_sdist = _build.get_requires_for_build_sdist
    build_wheel = _checked(_build.build_wheel)
    build_editable = _checked(_build.build_editable)
    get_requires_for_build_wheel = _checked(_build.get_requires_for_build_wheel)
    get_requires_for_build_editable = _checked(_build.get_requires_for_build_editable)
    prepare_metadata_for_build_wheel = _checked(_build.prepare_metadata_for_build_wheel)
    prepare_metadata_for_build_editable = _checked(_build.prepare_metadata_for_build_editable)
