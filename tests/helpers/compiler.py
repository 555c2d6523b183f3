"""Tests that need a compiler: inductor generates code, and a library in C makes storage fail."""

import os
import shutil

import pytest


def _needs(names: tuple[str, ...], reason: str) -> pytest.MarkDecorator:
    has_compiler = any(shutil.which(name) for name in names)
    return pytest.mark.skipif(not has_compiler and "REQUIRE_COMPILER" not in os.environ, reason=reason)


needs_compiler = _needs(("c++", "g++", "clang++"), "inductor needs a C++ compiler")
"""Skips where there is none; CI sets REQUIRE_COMPILER, and fails there."""

needs_c_compiler = _needs(("cc",), "the library of faults needs a C compiler")
"""The same for tests with faults of storage."""
