"""A causal convolution over a few tokens, each channel by itself.

B batch, T tokens, D channels, W taps, N sequences, S slots of a pool.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Dtype, Initializer

from gdp_jax import metadata
from gdp_jax.l2norm import wide_dtype
from gdp_jax.nn import packing

# Uniform within +-W**-0.5, for a kernel [W, D].
default_kernel_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class ShortConvolution(nnx.Module):
  """Causal depthwise convolution of each sequence.

      y_t = activation(bias + sum over i in 0..W-1 of kernel[i] * x_(t - (W-1) + i))

  Inputs before a sequence's first are those that its state holds, or 0. Sums are fp32 and rounded
  once.

  Attributes:
    kernel: nnx.Param [W, D]; its last row is the tap on the token itself.
    bias: nnx.Param [D], or None.

  Args:
    hidden_size: D.
    kernel_size: W.
    use_bias: whether there is a bias.
    activation: a function of the result, or None.
    dtype: of the result; None: that of x and the parameters, promoted.
    param_dtype: of the parameters.
    kernel_init: initialiser of the kernel [W, D]; default uniform within +-W**-0.5.
    bias_init: initialiser of the bias; default zeros.
    rngs: a stream `params` of keys.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gdp_jax.nn import ShortConvolution
    >>> ones = nnx.initializers.ones
    >>> conv = ShortConvolution(1, 3, activation=None, kernel_init=ones, rngs=nnx.Rngs(0))
    >>> x = jnp.arange(1.0, 6.0).reshape(1, 5, 1)
    >>> conv(x)[0].ravel().tolist()
    [1.0, 3.0, 6.0, 9.0, 12.0]
    >>> conv(x, cu_seqlens=jnp.array([0, 3, 5]))[0].ravel().tolist()
    [1.0, 3.0, 6.0, 4.0, 9.0]
    >>> y, state = conv(x[:, :4], conv.initialize_state(1))
    >>> conv(x[:, 4:], state)[0].ravel().tolist()
    [12.0]

  Source: the short convolution of Gated Delta Networks, arXiv 2412.06464.
  """

  def __init__(
    self,
    hidden_size: int,
    kernel_size: int = 4,
    *,
    use_bias: bool = False,
    activation: Callable[[jax.Array], jax.Array] | None = jax.nn.silu,
    dtype: Dtype | None = None,
    param_dtype: Dtype = jnp.float32,
    kernel_init: Initializer = default_kernel_init,
    bias_init: Initializer = nnx.initializers.zeros,
    rngs: nnx.Rngs,
  ):
    for name, size in (("hidden_size", hidden_size), ("kernel_size", kernel_size)):
      if size < 1:
        raise ValueError(f"{name} must be at least 1, got {size}")
    self.kernel = nnx.Param(kernel_init(rngs.params(), (kernel_size, hidden_size), param_dtype))
    self.bias: nnx.Param[jax.Array] | None = nnx.data(None)
    if use_bias:
      self.bias = nnx.Param(bias_init(rngs.params(), (hidden_size,), param_dtype))
    self.hidden_size = hidden_size
    self.kernel_size = kernel_size
    self.activation = activation
    self.dtype = dtype

  def initialize_state(self, batch_size: int, dtype: Dtype = jnp.float32) -> jax.Array:
    """The state of sequences that have had no input: zeros [batch_size, W-1, D]."""
    return jnp.zeros((batch_size, self.kernel_size - 1, self.hidden_size), dtype)

  def __call__(
    self,
    x: jax.Array,
    state: jax.Array | None = None,
    cu_seqlens: jax.Array | np.ndarray | list[int] | tuple[int, ...] | None = None,
    *,
    state_indices: jax.Array | np.ndarray | list[int] | None = None,
  ) -> tuple[jax.Array, jax.Array | None]:
    """Convolves one sequence a row, or several packed into one row.

    Args:
      x: [B, T, D], any float dtype.
      state: each sequence's last W-1 inputs [N, W-1, D], or a pool of such states [S, W-1, D]; any
        float dtype.
      cu_seqlens: offsets of packed sequences in tokens [N+1], as for
        `gdp_jax.chunk_gated_delta_product`; then B = 1. Outputs behind the last offset are 0.
      state_indices: int32 [N], each sequence's slot in the pool. -1 is padding: no slot is read or
        written for it, and its outputs are 0, whatever its inputs hold.

    Returns:
      (y, state): y [B, T, D], and the state after the last token with state's dtype, or None if
      none was given.

    Raises:
      TypeError, ValueError: naming the argument, what was expected and what was given.
    """
    x = packing.check_x(x, self.hidden_size, "hidden_size")
    B, T, D = x.shape
    cu_seqlens, N = packing.check_cu_seqlens(cu_seqlens, B, T)
    W = self.kernel_size
    slots = before = None
    if state is None:
      if state_indices is not None:
        raise ValueError("state_indices needs state, the pool that it points into")
    else:
      letter = "N" if state_indices is None else "S"
      size = N if state_indices is None else state.shape[0]
      if state.shape != (size, W - 1, D):
        raise ValueError(f"state must have shape [{letter}, W-1, D] = {(size, W - 1, D)},"
                         f" got {state.shape}")  # fmt: skip
      before = state = jnp.asarray(state)
      if state_indices is not None:
        _, slots = metadata.pool_slots(packing.check_state_indices(state_indices, N, size), size)
        before = state.at[slots].get(mode="fill", fill_value=0)

    keep = packing.live_tokens(B, T, cu_seqlens, slots, 0 if state is None else state.shape[0])
    x = packing.where_tokens(keep, x)
    bias = None if self.bias is None else self.bias[...]
    x, kernel, bias = promote_dtype((x, self.kernel[...], bias), dtype=self.dtype)
    if before is not None:
      before = before.astype(x.dtype)
    y = _convolve(x, before, kernel, bias, cu_seqlens, self.activation)
    y = packing.where_tokens(keep, y)
    if state is None:
      return y, None
    after = _last_inputs(x, before, cu_seqlens).astype(state.dtype)
    return y, after if slots is None else state.at[slots].set(after, mode="drop")


def _convolve(x, before, kernel, bias, cu_seqlens, activation):
  @jax.checkpoint  # keeps x itself for the backward pass, not its fp32 copies
  def convolve(x, before, kernel, bias, cu_seqlens):
    wide = wide_dtype(x.dtype)
    T, W = x.shape[1], kernel.shape[0]
    pad_front = lambda x: jnp.pad(x, ((0, 0), (W - 1, 0), (0, 0)))

    def add_taps(inputs, length, keep=lambda i, tap: tap):
      taps = (keep(i, inputs[:, i : i + length].astype(wide)) for i in range(W))
      return sum(weight * tap for weight, tap in zip(kernel.astype(wide), taps, strict=True))

    if cu_seqlens is None:
      y = add_taps(pad_front(x) if before is None else jnp.concatenate([before, x], axis=1), T)
    else:
      sequence, position = _positions(cu_seqlens, T)
      # Tap i is that on the token W-1-i places back, which must be the sequence's own.
      own = lambda i, tap: jnp.where((position >= W - 1 - i)[:, None], tap, 0)
      y = add_taps(pad_front(x), T, own)
      if before is not None and W > 1:
        # What the state adds to a sequence's first W-1 tokens, [N, W-1, D].
        first = add_taps(jnp.pad(before, ((0, 0), (0, W - 1), (0, 0))), W - 1)
        y += first.at[sequence, position].get(mode="fill", fill_value=0)
    if bias is not None:
      y += bias.astype(wide)
    return (y if activation is None else activation(y)).astype(x.dtype)

  return convolve(x, before, kernel, bias, cu_seqlens)


def _last_inputs(x, before, cu_seqlens):
  """The last W-1 inputs of each sequence [N, W-1, D]; of a short one some are from before it."""
  T, old = x.shape[1], before.shape[1]
  if T == 0:
    return before
  if cu_seqlens is None:
    return jnp.concatenate([before, x], axis=1)[:, T:]
  offsets = metadata.sanitize_cu_seqlens(cu_seqlens, T)
  # Row i is input number length + i of the old inputs and the sequence, one behind the other.
  number = jnp.diff(offsets)[:, None] + jnp.arange(old)
  from_x = x[0].at[offsets[:-1, None] + number - old].get(mode="fill", fill_value=0)
  n = jnp.arange(before.shape[0])[:, None]
  from_before = before.at[n, number].get(mode="fill", fill_value=0)
  return jnp.where((number >= old)[..., None], from_x, from_before)


def _positions(cu_seqlens, T):
  """Of each token its sequence, and its place in it: int32 [T]."""
  offsets = metadata.sanitize_cu_seqlens(cu_seqlens, T)
  t = jnp.arange(T, dtype=jnp.int32)
  sequence = metadata.sequence_of(t, offsets)
  return sequence, t - offsets[sequence]
