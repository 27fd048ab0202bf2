"""L2 normalisation of queries and keys."""

import jax
import jax.numpy as jnp
from jax import lax

EPS = 1e-6


@jax.checkpoint  # keeps x itself for the backward pass, not its fp32 copy
def l2_normalize(x: jax.Array) -> jax.Array:
  """Returns x * rsqrt(sum(x^2) + 1e-6) over the last axis.

  The sum is taken in fp32 (fp64 for fp64 input); the result has x's dtype. A zero vector stays
  zero and has a finite gradient.
  """
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  norm = lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + EPS)
  return (wide * norm).astype(x.dtype)
