"""A jaxlib without the Triton backend (that for Windows is one) still has all but the kernels."""

import subprocess
import sys

PROGRAM = """
import sys

sys.modules["jax.experimental.pallas.triton"] = None  # import raises ImportError

import jax
import jax.numpy as jnp
import gdp_jax

q = k = v = jnp.ones((1, 5, 2, 8))
g, beta = jnp.full((1, 5, 2), -0.1), jnp.full((1, 5, 2), 0.5)
loss = lambda q: gdp_jax.chunk_gated_delta_product(q, k / 8, v, g, beta)[0].sum()
assert jnp.isfinite(jax.grad(loss)(q)).all()
gdp_jax.fused_recurrent_gated_delta_product(q, k / 8, v, g, beta)
for implementation in ("pallas", "interpret"):
  try:
    gdp_jax.chunk_gated_delta_product(q, k, v, g, beta, implementation=implementation)
  except NotImplementedError as error:
    assert implementation in str(error) and "Triton" in str(error)
  else:
    raise AssertionError(implementation)
"""


def test_without_triton():
  subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)
