"""README.md and the docstrings say what is so: their examples run, their commands are CI's."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gdp_jax

ROOT = Path(__file__).resolve().parents[1]
# (language, text) of each block, in order.
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
COMMANDS = [text.strip() for language, text in BLOCKS if language == "sh"]
MODULES = ["gdp_jax", *(m.name for m in pkgutil.walk_packages(gdp_jax.__path__, "gdp_jax."))]


def test_snippets():
  # In sequence and in one namespace, as a reader would type them. A text block holds what the
  # snippet above it prints.
  namespace = {}
  snippets = 0
  for (language, text), (next_language, expected) in zip(
    BLOCKS, [*BLOCKS[1:], ("", "")], strict=True
  ):
    if language != "python":
      continue
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      exec(compile(text, "README.md", "exec"), namespace)
    assert printed.getvalue() == (expected if next_language == "text" else "")
    snippets += 1
  assert snippets >= 4


def test_main_job():
  main_job, _ = COMMANDS
  assert main_job.endswith(".venv/bin/python -m gdp_jax")
  result = subprocess.run(
    [sys.executable, "-m", "gdp_jax", "--tokens", "300"], capture_output=True, text=True
  )
  assert result.returncode == 0, result.stderr
  assert "300 tokens" in result.stdout
  assert "ok: all within" in result.stdout


def test_ci_runs_the_commands():
  listed = subprocess.run(
    ["bash", ROOT / ".ci" / "run", "--list"], capture_output=True, text=True, check=True
  )
  assert listed.stdout.splitlines() == COMMANDS
  assert COMMANDS[1].endswith("pip install -e '.[test]' && .venv/bin/python -m pytest")


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
  result = doctest.testmod(importlib.import_module(name))
  assert result.failed == 0


@pytest.mark.parametrize("name", gdp_jax.__all__)
def test_public_function_has_example(name):
  tests = doctest.DocTestFinder(recurse=False).find(getattr(gdp_jax, name), name)
  assert any(test.examples for test in tests)
