"""RMSNorm with a gate."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Dtype, Initializer
from jax import lax

from gdp_jax.l2norm import wide_dtype


class GatedRMSNorm(nnx.Module):
  """Root-mean-square normalisation of the last axis, times silu of a gate.

      y = x / sqrt(mean(x^2) + epsilon) * scale * silu(gate)

  computed in fp32 and rounded once. Without a gate it is RMSNorm.

  Attributes:
    scale: nnx.Param [num_features].

  Args:
    num_features: size of the last axis.
    epsilon: added to the mean square.
    dtype: of the result; None: that of x, gate and scale, promoted.
    param_dtype: of scale.
    scale_init: initialiser of scale; default ones.
    rngs: a stream `params` of keys.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gdp_jax.nn import GatedRMSNorm
    >>> norm = GatedRMSNorm(2, rngs=nnx.Rngs(0))
    >>> y = norm(jnp.array([[3.0, 4.0]]), jnp.array([[0.0, 50.0]]))
    >>> [round(float(y_i), 3) for y_i in y[0]]
    [0.0, 56.569]

  Source: root mean square layer normalisation, arXiv 1910.07467; the gate, arXiv 2307.08621.
  """

  def __init__(
    self,
    num_features: int,
    *,
    epsilon: float = 1e-5,
    dtype: Dtype | None = None,
    param_dtype: Dtype = jnp.float32,
    scale_init: Initializer = nnx.initializers.ones,
    rngs: nnx.Rngs,
  ):
    if num_features < 1:
      raise ValueError(f"num_features must be at least 1, got {num_features}")
    self.scale = nnx.Param(scale_init(rngs.params(), (num_features,), param_dtype))
    self.num_features = num_features
    self.epsilon = epsilon
    self.dtype = dtype

  def __call__(self, x: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """Normalises x [..., num_features]; gate has its shape, or is None.

    Raises:
      ValueError: x or gate has another shape.
    """
    if x.ndim < 1 or x.shape[-1] != self.num_features:
      raise ValueError(f"x must have shape [..., num_features] with num_features="
                       f"{self.num_features}, got {x.shape}")  # fmt: skip
    if gate is not None and gate.shape != x.shape:
      raise ValueError(f"gate must have x's shape {x.shape}, got {gate.shape}")
    x, gate, scale = promote_dtype((x, gate, self.scale[...]), dtype=self.dtype)
    return _gated_rms_norm(x, gate, scale, self.epsilon)


@jax.checkpoint  # keeps x and the gate themselves for the backward pass, not their fp32 copies
def _gated_rms_norm(x, gate, scale, epsilon):
  wide = x.astype(wide_dtype(x.dtype))
  y = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
  y = y * scale.astype(y.dtype)
  if gate is not None:
    y = y * jax.nn.silu(gate.astype(y.dtype))
  return y.astype(x.dtype)
