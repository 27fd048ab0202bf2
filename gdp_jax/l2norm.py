"""L2 normalisation of queries and keys."""

import jax
import jax.numpy as jnp
from jax import lax

EPS = 1e-6


def wide_dtype(dtype) -> jnp.dtype:
  """What a reference computes in: float64 for float64, else float32."""
  return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


@jax.checkpoint  # keeps x itself for the backward pass, not its fp32 copy
def l2_normalize(x: jax.Array) -> jax.Array:
  """Returns x * rsqrt(sum(x^2) + 1e-6) over the last axis.

  The sum is taken in fp32 (fp64 for fp64 input); the result has x's dtype. A zero vector stays
  zero and has a finite gradient.
  """
  wide = x.astype(wide_dtype(x.dtype))
  norm = lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + EPS)
  return (wide * norm).astype(x.dtype)
