"""The gated delta product as a layer.

B batch, T tokens, D hidden size, M Householder copies, H query/key heads, HV value heads, K and V
head dims, W taps of the convolution, N sequences, S slots of a pool.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype, Initializer
from jax import lax
from jax.sharding import PartitionSpec

from gdp_jax import inputs
from gdp_jax.chunk import chunk_gated_delta_product
from gdp_jax.fused_recurrent import fused_recurrent_gated_delta_product
from gdp_jax.nn import packing
from gdp_jax.nn.norm import GatedRMSNorm
from gdp_jax.nn.short_convolution import ShortConvolution, default_kernel_init
from gdp_jax.sharding import (
  Axis,
  axis_names,
  sharded_fused_recurrent_gated_delta_product,
  sharded_gated_delta_product,
)
from gdp_jax.xla import log_decay, step_size

default_projection_init = nnx.initializers.lecun_normal()


class GatedDeltaProductState(NamedTuple):
  """What a layer keeps of N sequences, or of S slots of a pool.

  Attributes:
    recurrent_state: the operator's states [N, HV, K, V].
    conv_state: the last W-1 inputs of the convolutions of q [N, W-1, H*K], k [N, W-1, M*H*K] and
      v [N, W-1, M*HV*V]; None without convolutions.

  Example:
    >>> from flax import nnx
    >>> from gdp_jax.nn import GatedDeltaProduct
    >>> layer = GatedDeltaProduct(32, num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
    >>> state = layer.initialize_state(batch_size=3)
    >>> state.recurrent_state.shape, [x.shape for x in state.conv_state]
    ((3, 2, 8, 16), [(3, 3, 16), (3, 3, 32), (3, 3, 64)])
  """

  recurrent_state: jax.Array
  conv_state: tuple[jax.Array, jax.Array, jax.Array] | None


def A_log_init(key: jax.Array, shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> jax.Array:
  """log A, with A uniform in (0, 16]."""
  return jnp.log(16 * (1 - jax.random.uniform(key, shape, dtype)))


def dt_bias_init(key: jax.Array, shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> jax.Array:
  """The x with softplus(x) = dt, for dt log-uniform in [1e-3, 0.1]."""
  dt = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1)))
  return dt + jnp.log(-jnp.expm1(-dt))


def split_init(init: Initializer, *axes: Axis) -> Initializer:
  """An initialiser whose parameters say that their dims are split over these axes of a mesh."""
  return nnx.with_partitioning(init, axes) if any(axes) else init


class GatedDeltaProduct(nnx.Module):
  """A layer around the gated delta product: what flash-linear-attention has under this name.

      q, k, v = silu(conv(x W_q)), silu(conv(x W_k)), silu(conv(x W_v))
      beta = sigmoid(x W_b), doubled with allow_neg_eigval
      g = -exp(A_log) softplus(x W_a + dt_bias)
      o = gated delta product of q, k, v, g, beta, with q and k of unit length
      y = (RMSNorm(o) * silu(x W_g)) W_o

  A token has M keys, values and step sizes: the channels of x W_k are [M, H, K], those of x W_v
  [M, HV, V], those of x W_b [M, HV]. A_log, dt_bias, beta and g are fp32 always.

  The layer is called in three ways, with the same numbers: without a state, to train; with a state,
  to prefill, in one piece or several; and by `step`, to decode. The state may be a pool of S slots,
  `initialize_state(S)`, of which state_indices give each sequence one. A slot is to be set to 0
  before another request gets it: `jax.tree.map(lambda x: x.at[slot].set(0), state)`.

  Attributes:
    q_proj, k_proj, v_proj, b_proj, a_proj, g_proj, o_proj: nnx.Linear without bias; a_proj is None
      without forget gate, g_proj without output gate.
    q_conv, k_conv, v_conv: ShortConvolution, or None.
    A_log, dt_bias: nnx.Param [HV], fp32, or None without forget gate. Weight decay is not meant
      for them.
    o_norm: GatedRMSNorm of V features, shared by the heads.

  Args:
    hidden_size: D.
    expand_v: V / K; K * expand_v must be a whole number.
    head_dim: K.
    num_heads: H.
    num_v_heads: HV, a multiple of H; default H.
    num_householder: M.
    use_forget_gate: False: no decay, g = None.
    use_output_gate: False: a plain RMSNorm.
    use_short_conv: False: silu alone.
    conv_size: W.
    conv_bias: whether the convolutions have a bias.
    norm_eps: added to the mean square in the norm.
    allow_neg_eigval: step sizes up to 2, so that a step may reflect.
    dtype: of the computation; None: that of x and the parameters, promoted.
    param_dtype: of the parameters, but for A_log and dt_bias.
    kernel_init: initialiser of the projections [in, out]; default lecun_normal.
    conv_kernel_init: initialiser of the convolutions' kernels [W, channels].
    conv_bias_init: initialiser of their biases; default zeros.
    scale_init: initialiser of the norm's scale; default ones.
    A_log_init, dt_bias_init: initialisers of A_log and dt_bias [HV]; default A uniform in (0, 16]
      and softplus(dt_bias) log-uniform in [1e-3, 0.1].
    num_segments, implementation: of the operators, as for `gdp_jax.chunk_gated_delta_product`.
    batch_axis, head_axis, sequence_axis: axes of the mesh of `jax.set_mesh` over which a call is
      split, as for `gdp_jax.sharding.sharded_gated_delta_product`, which says when to use which.
      The axes must be Auto. x is to lie there as P(batch_axis, sequence_axis), and a row of packed
      sequences as P(None, (batch_axis, sequence_axis)). With head_axis `nnx.get_partition_spec`
      gives the parameters' own placement, and the layer and its states have to be made under the
      mesh. `step` takes the first two; a pool of slots is split by head_axis alone.
    rngs: a stream `params` of keys.

  Split over n devices by head_axis, a call moves what tensor parallelism moves anyway, y summed by
  an all-reduce, and if M > 1 also k, v and beta, from the order of the weights, [M, H, K], to whole
  heads: an all-to-all of (n - 1) / n of a device's part of each, B T M (H K + HV V + HV) / n
  elements. Split by sequence_axis, the convolutions fetch what they lack from their neighbours: the
  last W-1 tokens, and the few by which the compiler shifts the segments to make room for these.

  Raises:
    ValueError: naming the argument, what was expected and what was given.
    NotImplementedError: implementation="pallas" with K > 256.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gdp_jax.nn import GatedDeltaProduct
    >>> layer = GatedDeltaProduct(32, num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
    >>> pool = layer.initialize_state(batch_size=8)
    >>> cu_seqlens, slots = jnp.array([0, 4, 10]), jnp.array([5, 2])
    >>> y, pool = layer(jnp.ones((1, 10, 32)), pool, cu_seqlens, state_indices=slots)
    >>> y.shape, bool(jnp.allclose(y[:, 0], y[:, 4], atol=1e-5))  # of two sequences the first
    ((1, 10, 32), True)
    >>> y, pool = layer.step(jnp.ones((2, 1, 32)), pool, slots)
    >>> y.shape, pool.recurrent_state.shape
    ((2, 1, 32), (8, 2, 8, 16))

  Source: DeltaProduct, arXiv 2502.10297; Gated Delta Networks, arXiv 2412.06464; names and defaults
  of flash-linear-attention's layer.
  """

  def __init__(
    self,
    hidden_size: int = 2048,
    expand_v: float = 2,
    head_dim: int = 256,
    num_heads: int = 6,
    num_v_heads: int | None = None,
    *,
    num_householder: int = 2,
    use_forget_gate: bool = True,
    use_output_gate: bool = True,
    use_short_conv: bool = True,
    conv_size: int = 4,
    conv_bias: bool = False,
    norm_eps: float = 1e-5,
    allow_neg_eigval: bool = True,
    dtype: Dtype | None = None,
    param_dtype: Dtype = jnp.float32,
    kernel_init: Initializer = default_projection_init,
    conv_kernel_init: Initializer = default_kernel_init,
    conv_bias_init: Initializer = nnx.initializers.zeros,
    scale_init: Initializer = nnx.initializers.ones,
    A_log_init: Initializer = A_log_init,
    dt_bias_init: Initializer = dt_bias_init,
    num_segments: int = 1,
    implementation: str | None = None,
    batch_axis: Axis = None,
    head_axis: Axis = None,
    sequence_axis: Axis = None,
    rngs: nnx.Rngs,
  ):
    num_v_heads = num_heads if num_v_heads is None else num_v_heads
    counts = dict(
      hidden_size=hidden_size, head_dim=head_dim, num_heads=num_heads, num_v_heads=num_v_heads,
      num_householder=num_householder, conv_size=conv_size, num_segments=num_segments,
    )  # fmt: skip
    for name, count in counts.items():
      if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {count!r}")
    if num_v_heads % num_heads:
      raise ValueError(f"num_v_heads must be a multiple of num_heads={num_heads},"
                       f" got {num_v_heads}")  # fmt: skip
    head_v_dim = round(head_dim * expand_v)
    if head_v_dim < 1 or not math.isclose(head_v_dim, head_dim * expand_v):
      raise ValueError(f"expand_v must make head_dim * expand_v a whole number of at least 1,"
                       f" got {expand_v} and head_dim={head_dim}")  # fmt: skip
    inputs.check_implementation(implementation, head_dim)

    self.hidden_size = hidden_size
    self.num_heads, self.num_v_heads, self.num_householder = num_heads, num_v_heads, num_householder
    self.head_k_dim, self.head_v_dim = head_dim, head_v_dim
    self.conv_size = conv_size
    self.allow_neg_eigval = allow_neg_eigval
    self.num_segments, self.implementation = num_segments, implementation
    self.batch_axis, self.head_axis, self.sequence_axis = batch_axis, head_axis, sequence_axis

    M, key_dim, value_dim = num_householder, num_heads * head_dim, num_v_heads * head_v_dim
    linear = partial(
      nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs,
    )  # fmt: skip
    into_heads = partial(linear, kernel_init=split_init(kernel_init, None, head_axis))
    self.q_proj = into_heads(hidden_size, key_dim)
    self.k_proj = into_heads(hidden_size, M * key_dim)
    self.v_proj = into_heads(hidden_size, M * value_dim)
    self.b_proj = into_heads(hidden_size, M * num_v_heads)
    self.a_proj: Any = nnx.data(None)
    self.A_log: Any = nnx.data(None)
    self.dt_bias: Any = nnx.data(None)
    if use_forget_gate:
      self.a_proj = into_heads(hidden_size, num_v_heads)
      of_heads = lambda init: nnx.Param(
        split_init(init, head_axis)(rngs.params(), (num_v_heads,), jnp.float32)
      )
      self.A_log, self.dt_bias = of_heads(A_log_init), of_heads(dt_bias_init)
    self.q_conv = self.k_conv = self.v_conv = nnx.data(None)
    if use_short_conv:
      conv = partial(
        ShortConvolution, kernel_size=conv_size, use_bias=conv_bias, dtype=dtype,
        param_dtype=param_dtype, kernel_init=split_init(conv_kernel_init, None, head_axis),
        bias_init=split_init(conv_bias_init, head_axis), rngs=rngs,
      )  # fmt: skip
      self.q_conv, self.k_conv, self.v_conv = conv(key_dim), conv(M * key_dim), conv(M * value_dim)
    self.g_proj = into_heads(hidden_size, value_dim) if use_output_gate else nnx.data(None)
    self.o_norm = GatedRMSNorm(
      head_v_dim, epsilon=norm_eps, dtype=dtype, param_dtype=param_dtype, scale_init=scale_init,
      rngs=rngs,
    )  # fmt: skip
    self.o_proj = linear(
      value_dim, hidden_size, kernel_init=split_init(kernel_init, head_axis, None)
    )

  def initialize_state(self, batch_size: int, dtype: Dtype = jnp.float32) -> GatedDeltaProductState:
    """The state of sequences that have had no token, all zeros.

    Args:
      batch_size: N, the number of sequences, or S, that of a pool's slots.
      dtype: of the states; a pool is fp32 or bf16.

    Returns:
      GatedDeltaProductState; with head_axis, split by heads and channels.
    """
    shape = (batch_size, self.num_v_heads, self.head_k_dim, self.head_v_dim)
    conv_state = None
    if self.q_conv is not None:
      conv_state = tuple(conv.initialize_state(batch_size, dtype) for conv in self._convs)
    return self._place_state(GatedDeltaProductState(jnp.zeros(shape, dtype), conv_state))

  def __call__(
    self,
    x: jax.Array,
    state: GatedDeltaProductState | None = None,
    cu_seqlens: jax.Array | np.ndarray | list[int] | tuple[int, ...] | None = None,
    *,
    segment_ids: jax.Array | np.ndarray | None = None,
    max_segments: int | None = None,
    state_indices: jax.Array | np.ndarray | list[int] | None = None,
  ) -> tuple[jax.Array, GatedDeltaProductState | None]:
    """Computes the layer in chunks: one sequence a row, or several packed into one.

    Args:
      x: [B, T, D], any float dtype.
      state: of N = B sequences, or of as many as are packed, from which they go on; or a pool of S
        slots.
      cu_seqlens: offsets of packed sequences in tokens [N+1], int32 or int64, with B = 1. Starts at
        0, never decreases, ends at or below T; outputs behind the last offset are 0, whatever x
        holds there. A list, tuple or NumPy array is checked.
      segment_ids: the other way to pack, for training: int [B, T], a document being a run of equal
        ids in a row. Id 0 is padding: its outputs are 0, whatever x holds there. Not with state or
        cu_seqlens.
      max_segments: the most documents that all rows together have, a static int: needed with
        segment_ids. If padding comes first in the first row, it counts as one. Outputs of further
        documents are 0; for a NumPy array they are an error.
      state_indices: int32 [N], each sequence's slot in the pool; no slot may occur twice, but -1
        may. -1 is padding: no slot is read or written for it, and its outputs are 0, whatever x
        holds.

    Returns:
      (y, state): y [B, T, D] with x's dtype, or what dtype says, and the state after the last
      token, with the given state's dtypes; None if none was given.

    Raises:
      TypeError, ValueError: naming the argument, what was expected and what was given.
    """
    packing.check_segment_ids_alone(
      segment_ids, max_segments, state=state, cu_seqlens=cu_seqlens, state_indices=state_indices
    )
    if segment_ids is None:
      operator = self._operator(packed=cu_seqlens is not None)
      return self._apply(operator, x, state, cu_seqlens, state_indices)
    x = packing.check_x(x, self.hidden_size, "hidden_size")
    B, T, D = x.shape
    cu_seqlens, valid = packing.pack_segment_ids(segment_ids, max_segments, B, T)
    x = packing.where_tokens(valid, x).reshape(1, B * T, D)
    y, _ = self._apply(self._operator(packed=True), x, None, cu_seqlens, None)
    return packing.where_tokens(valid, y.reshape(B, T, D)), None

  def step(
    self,
    x: jax.Array,
    state: GatedDeltaProductState,
    state_indices: jax.Array | np.ndarray | list[int] | None = None,
  ) -> tuple[jax.Array, GatedDeltaProductState]:
    """Decodes: the next token, or the next few, of each of N sequences. It has no gradient.

    To speculate, keep the state from before the draft, and step from it with the tokens that are
    accepted.

    Args:
      x: [N, T, D] with T >= 1, any float dtype.
      state: of the N sequences, or a pool of S slots. Under `jax.jit` with the pool donated it is
        updated in place.
      state_indices: int32 [N], as for a call.

    Returns:
      (y, state): y [N, T, D], and the state after the last token, with the given state's dtypes.

    Raises:
      TypeError, ValueError: naming the argument, what was expected and what was given.
      NotImplementedError: differentiated; or the layer has a sequence_axis, or a batch_axis and
        there is a pool.
    """
    if state is None:
      raise ValueError("step needs a state: see initialize_state")
    if self.sequence_axis:
      raise NotImplementedError(
        "a step cannot be split by sequence: decode with a layer without sequence_axis, of the same"
        f" parameters; got sequence_axis={self.sequence_axis!r}"
      )
    operator: Any = fused_recurrent_gated_delta_product
    if self.batch_axis or self.head_axis:
      operator = partial(
        sharded_fused_recurrent_gated_delta_product, batch_axis=self.batch_axis or None,
        head_axis=self.head_axis,
      )  # fmt: skip
    y, new_state = self._apply(operator, x, state, None, state_indices)
    assert new_state is not None  # there was one
    return y, new_state

  def _operator(self, packed):
    """The operator of a call; over the mesh, if the layer has axes of one."""
    batch, sequence = axis_names(self.batch_axis), axis_names(self.sequence_axis)
    if packed:  # rows are one behind the other, so what splits them splits that
      batch, sequence = (), batch + sequence
    if not (batch or self.head_axis or sequence):
      return partial(chunk_gated_delta_product, num_segments=self.num_segments)
    return partial(
      sharded_gated_delta_product, batch_axis=batch or None, head_axis=self.head_axis,
      sequence_axis=sequence or None, num_segments=self.num_segments,
    )  # fmt: skip

  def _apply(self, operator, x, state, cu_seqlens, state_indices):
    x = packing.check_x(x, self.hidden_size, "hidden_size")
    B, T, _ = x.shape
    M, H, HV, K, V = (
      self.num_householder, self.num_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim,
    )  # fmt: skip
    cu_seqlens, N = packing.check_cu_seqlens(cu_seqlens, B, T)
    S, slots = self._check_state(state, state_indices, N)
    if slots is not None and (self.batch_axis or self.sequence_axis):
      raise NotImplementedError(
        "a layer's pool of slots can be split by heads only: use a layer without batch_axis and"
        f" sequence_axis, of the same parameters; got batch_axis={self.batch_axis!r},"
        f" sequence_axis={self.sequence_axis!r}"
      )
    # From here on padding is 0, not whatever it may hold, and its output will be. Its gradient too.
    keep = packing.live_tokens(B, T, cu_seqlens, slots, S)
    x = packing.where_tokens(keep, x)

    streams = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
    conv_state = None
    if self.q_conv is None:
      q, k, v = (jax.nn.silu(stream) for stream in streams)
    else:
      old = (None, None, None) if state is None else state.conv_state
      convolved = [
        conv(stream, conv_state, cu_seqlens, state_indices=slots)
        for conv, stream, conv_state in zip(self._convs, streams, old, strict=True)
      ]
      (q, k, v), conv_state = zip(*convolved, strict=True)
    q = q.reshape(B, T, H, K)
    k = self._rows(k, H).reshape(B, T * M, H, K)
    v = self._rows(v, HV).reshape(B, T * M, HV, V)
    beta = self._rows(self.b_proj(x), HV).reshape(B, T * M, HV)
    beta = step_size(beta, self.allow_neg_eigval)
    g = None
    if self.a_proj is not None:
      g = log_decay(self.a_proj(x), self.A_log[...], self.dt_bias[...])

    options = dict(use_qk_l2norm_in_kernel=True, implementation=self.implementation)
    if cu_seqlens is not None:
      options |= dict(cu_seqlens=cu_seqlens)
    if slots is not None:
      options |= dict(state=state.recurrent_state, state_indices=slots)
    elif state is not None:
      options |= dict(initial_state=state.recurrent_state, output_final_state=True)
    o, recurrent_state = operator(q, k, v, g, beta, M, **options)

    gate = None if self.g_proj is None else self.g_proj(x).reshape(B, T, HV, V)
    y = self.o_proj(self.o_norm(o, gate).reshape(B, T, HV * V))
    if state is None:
      return y, None
    recurrent_state = recurrent_state.astype(state.recurrent_state.dtype)
    return y, self._place_state(GatedDeltaProductState(recurrent_state, conv_state))

  def _rows(self, x, heads):
    """x [B, T, M * heads * d] as [B, T, M, heads, d]."""
    B, T, channels = x.shape
    M = self.num_householder
    x = x.reshape(B, T, M, heads, channels // (M * heads))  # no -1: T may be 0
    if self.head_axis is None or M == 1:
      return x
    # Its parts are some copies of some heads, so that it has to be moved. Said here, before M is
    # merged with T, the compiler finds how to; later it would gather the whole.
    free = PartitionSpec.UNCONSTRAINED
    return lax.with_sharding_constraint(x, PartitionSpec(free, free, None, self.head_axis, None))

  def _place_state(self, state):
    """Lays it as the parameters lie, so that a new state takes the place of the old one."""
    if not self.head_axis:
      return state
    free = PartitionSpec.UNCONSTRAINED
    specs = [PartitionSpec(free, self.head_axis, None, None)]
    specs += [PartitionSpec(free, None, self.head_axis)] * (len(jax.tree.leaves(state)) - 1)
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, map(lax.with_sharding_constraint, leaves, specs))

  @property
  def _convs(self):
    return self.q_conv, self.k_conv, self.v_conv

  def _check_state(self, state, state_indices, N):
    """How many sequences or slots the state has, and the N slots on the device, or None."""
    if state is None:
      if state_indices is not None:
        raise ValueError("state_indices needs state, the pool that it points into")
      return 0, None
    if not isinstance(state, GatedDeltaProductState):
      raise TypeError(f"state must be a GatedDeltaProductState, got {type(state).__name__}")
    if (state.conv_state is None) != (self.q_conv is None):
      has, been_given = ("no", "one") if self.q_conv is None else ("a", "None")
      raise ValueError(f"state.conv_state must fit the layer, which has {has} convolution,"
                       f" got {been_given}")  # fmt: skip
    letter, S = ("N", N) if state_indices is None else ("S", state.recurrent_state.shape[0])
    expected = jax.tree.leaves(jax.eval_shape(lambda: self.initialize_state(S)))
    for n, (x, like) in enumerate(zip(jax.tree.leaves(state), expected, strict=True)):
      name = f"conv_state[{n - 1}]" if n else "recurrent_state"
      if x.shape != like.shape:
        raise ValueError(f"state.{name} must have shape [{letter}, ...] = {like.shape},"
                         f" got {x.shape}")  # fmt: skip
    if state_indices is None:
      return S, None
    dims = (self.num_v_heads, self.head_k_dim, self.head_v_dim)
    return S, inputs.check_pool(state.recurrent_state, state_indices, N, dims)
