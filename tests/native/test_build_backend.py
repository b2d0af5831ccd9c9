"""What a machine lacks to compile the package is said in one sentence, before pip starts."""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import sys
import sysconfig
from pathlib import Path

import pytest

BACKEND = Path(__file__).parents[2] / "native" / "build_backend.py"


def refusal() -> str:
    """Run the check of ``make``; return what it says."""
    with pytest.raises(SystemExit) as found:
        runpy.run_path(str(BACKEND), run_name="__main__")
    assert isinstance(found.value.code, str)  # printed, and the exit code is 1
    assert "\n" not in found.value.code
    return found.value.code


def test_a_machine_with_all_of_it_passes():
    runpy.run_path(str(BACKEND), run_name="__main__")


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal() == (
        "ferrodist needs a C++20 compiler: install g++ 11 or later, or clang 14 or later"
    )
    monkeypatch.setenv("CXX", "nonexistent++ -O2")
    assert "a C++20 compiler, and CXX='nonexistent++ -O2' is not there" in refusal()


def test_a_compiler_that_does_not_know_cxx20_is_named(monkeypatch, tmp_path):
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert f"{str(old)!r} is none" in refusal()


def test_missing_headers_are_named_with_their_package(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    found = refusal()
    assert f"{tmp_path}/Python.h is not there" in found
    assert "install python3-dev" in found


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_missing_venv_module_is_named_with_its_package(monkeypatch, module):
    find = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == module else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    assert "install python3-venv" in refusal()


def test_another_platform_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert refusal() == "ferrodist runs on Linux, on x86_64 and aarch64; this is Linux on riscv64"
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is Darwin on riscv64" in refusal()


def test_an_old_python_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert "needs Python 3.11 or later" in refusal()


def test_pip_gets_the_sentence_from_every_hook_that_compiles(monkeypatch, tmp_path):
    build = pytest.importorskip("scikit_build_core.build", reason="the hooks are its")
    backend = runpy.run_path(str(BACKEND))
    assert set(build.__all__) <= backend.keys()
    monkeypatch.setenv("CXX", "nonexistent++")
    hooks = [name for name in build.__all__ if "sdist" not in name]
    assert len(hooks) == 6
    for name in hooks:
        with pytest.raises(SystemExit, match="needs a C\\+\\+20 compiler"):
            backend[name](os.devnull)
