"""Flax NNX layers of the gated delta product.

    GatedDeltaProduct     the layer: projections, short convolution, gates, operator, norm, output
    ShortConvolution      causal depthwise convolution over a few tokens
    GatedRMSNorm          RMSNorm, times silu of a gate
    GatedDeltaProductLM   a small language model of such layers, with generation
    next_token_loss       its loss

A layer trains in chunks, prefills in chunks from and to a state, and decodes token by token, with
the same numbers. State is explicit: what a call is given it returns updated.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gdp_jax.nn import GatedDeltaProduct
    >>> layer = GatedDeltaProduct(32, num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 10, 32))
    >>> y, _ = layer(x)
    >>> state = layer.initialize_state(batch_size=2)
    >>> y_prefill, state = layer(x[:, :9], state)
    >>> y_last, state = layer.step(x[:, 9:], state)
    >>> bool(jnp.allclose(y[:, 9:], y_last, atol=1e-5))
    True

In Linen the same layer is reached through Flax's own bridge; `nnx_method` names another method than
`__call__`:

    >>> import jax
    >>> linen_layer = nnx.bridge.to_linen(GatedDeltaProduct, 32, num_heads=2, head_dim=8)
    >>> variables = linen_layer.init(jax.random.key(0), x)
    >>> y, _ = linen_layer.apply(variables, x)
    >>> y_last, state = linen_layer.apply(variables, x[:, 9:], state, nnx_method="step")
    >>> y.shape, y_last.shape
    ((2, 10, 32), (2, 1, 32))
"""

try:
  import flax  # noqa: F401
except ImportError as error:
  raise ImportError("gdp_jax.nn needs Flax: pip install 'gdp_jax[flax]'") from error

from gdp_jax.nn.gated_delta_product import GatedDeltaProduct, GatedDeltaProductState
from gdp_jax.nn.language_model import (
  GatedDeltaProductConfig,
  GatedDeltaProductLM,
  next_token_loss,
)
from gdp_jax.nn.norm import GatedRMSNorm
from gdp_jax.nn.short_convolution import ShortConvolution

__all__ = [
  "GatedDeltaProduct",
  "GatedDeltaProductConfig",
  "GatedDeltaProductLM",
  "GatedDeltaProductState",
  "GatedRMSNorm",
  "ShortConvolution",
  "next_token_loss",
]
