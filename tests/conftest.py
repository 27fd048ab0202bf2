"""What every test runs under: the `gpu` mark, memory for several processes, 8 CPU devices."""

import importlib.metadata
import importlib.util
import os

# Several pytest processes may share one GPU (`pytest -n 8`); by default the first takes it all.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Compiling is what takes time in tests, and LLVM's optimisation most of that on a CPU.
if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
  flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
  if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Its other way to compile fusions takes half the time. Later ones have no such choice.
    flags.append("--xla_cpu_use_fusion_emitters=false")
  os.environ["XLA_FLAGS"] = " ".join(flags)

# A device waits for the others in a thread of a pool, which on a small machine has too few for all.
os.environ.setdefault("NPROC", "16")

import jax
import pytest

# For the tests of gdp_jax.sharding; what says nothing of devices runs on the first alone.
jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_modifyitems(items):
  if jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version.lower():
    return
  reason = f"the compiled kernels need a CUDA GPU, JAX runs on {jax.default_backend()}"
  for item in items:
    if item.get_closest_marker("gpu"):
      item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def _forget_what_is_compiled():
  """Each compiled program is mapped into memory, and a process may have 65530 such maps."""
  yield
  jax.clear_caches()
