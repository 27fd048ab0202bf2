"""What every test runs under: the `gpu` mark, and memory for several processes."""

import os

# Several pytest processes may share one GPU (`pytest -n 8`); by default the first takes it all.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest


def pytest_collection_modifyitems(items):
  if jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version.lower():
    return
  reason = f"the compiled kernels need a CUDA GPU, JAX runs on {jax.default_backend()}"
  for item in items:
    if item.get_closest_marker("gpu"):
      item.add_marker(pytest.mark.skip(reason=reason))
