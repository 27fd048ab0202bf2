"""The gated delta product in chunks: check, describe the chunks, run the stages.

B batch, T tokens, M Householder copies, R = T*M rows, H query/key heads, HV value heads, K and V
head dims, N sequences.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdp_jax import inputs, kernels, metadata, xla
from gdp_jax.kernels.pallas import dispatch
from gdp_jax.l2norm import l2_normalize


def chunk_gated_delta_product(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array | None,
  beta: jax.Array,
  num_householder: int = 1,
  *,
  scale: float | None = None,
  initial_state: jax.Array | None = None,
  output_final_state: bool = False,
  use_qk_l2norm_in_kernel: bool = False,
  cu_seqlens: jax.Array | np.ndarray | list[int] | tuple[int, ...] | None = None,
  state: jax.Array | None = None,
  state_indices: jax.Array | np.ndarray | None = None,
  output_chunk_states: bool = False,
  num_segments: int = 1,
  implementation: str | None = None,
) -> tuple[Any, ...]:
  """The gated delta product of a sequence, or of several packed into one, computed in chunks.

  Per head, with a state S [K, V] and r = t*M + j:

      S <- exp(g_t) S
      for j in 0..M-1:   S <- S + beta_r k_r (v_r - S^T k_r)^T
      o_t = scale * S^T q_t

  Value head i reads query/key head i // (HV // H). Everything runs under `jax.jit` with
  `cu_seqlens` traced: sizes depend on shapes alone.

  Args:
    q: queries [B, T, H, K]; bfloat16, float16 or float32.
    k: keys [B, T*M, H, K], q's dtype. Row t*M + j is token t's j-th update. Keys are expected to
      have unit length: see use_qk_l2norm_in_kernel.
    v: values [B, T*M, HV, V], q's dtype; HV is a multiple of H.
    g: natural-log decay [B, T, HV], at most 0, any float dtype; -inf is a reset. None: no decay.
    beta: step sizes in [0, 2], [B, T*M, HV], any float dtype.
    num_householder: M.
    scale: factor of the output; default K**-0.5.
    initial_state: [N, HV, K, V], any float dtype; default zeros. N is B, or the number of packed
      sequences.
    output_final_state: whether to return the final state.
    use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum(x^2) + 1e-6), in fp32.
    cu_seqlens: offsets of packed sequences in tokens, [N+1], int32 or int64; needs B = 1. Starts
      at 0, never decreases, ends at or below T. Equal neighbours are empty sequences; outputs
      behind the last offset are 0. A list, tuple or NumPy array is checked; an array on the device
      is not read back, and a bad one gives wrong numbers, never an access out of bounds.
    state: pool of states [S, HV, K, V], fp32 or bf16, from which the initial states are read and to
      which the final ones are written: prefill of a server, see
      `gdp_jax.fused_recurrent_gated_delta_product`. Not with initial_state or output_final_state.
    state_indices: int32 [N], each sequence's slot in the pool. -1 is skipped: no slot is read or
      written, and its outputs are 0, whatever its inputs hold.
    output_chunk_states: whether to return the state at each chunk's start as well, for prefix
      caching. No gradient flows through them.
    num_segments: into how many segments to cut each sequence, to run them side by side. The chain
      of chunks, which is what few heads and few sequences wait for, becomes so many times shorter,
      for about three times the work in it: see the README for when that pays. The numbers are those
      of one segment but for rounding. Not with cu_seqlens.
    implementation: "pallas" (CUDA GPUs), "xla" (any device), "interpret" (the Pallas kernels run
      without a GPU, slowly, for tests), or None: Pallas where the code is lowered for CUDA and
      K <= 256, else XLA.

  Returns:
    o [B, T, HV, V] with v's dtype, and the final state [N, HV, K, V] in fp32, or None; with a pool,
    the pool in its place. With output_chunk_states also the states [B, NC, HV, K, V] at the start
    of each chunk of 64 tokens, in k's dtype (fp32 for fp16): packed, sequence n's chunks follow
    those of sequence n-1, and unused entries are 0.

  Raises:
    TypeError, ValueError: naming the argument, what was expected and what was given.
    NotImplementedError: implementation="pallas" with K > 256; num_segments > 1 with cu_seqlens;
      forward-mode or second-order differentiation unless implementation="xla".

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from gdp_jax import chunk_gated_delta_product
    >>> B, T, M, H, K, V = 1, 100, 2, 2, 16, 32
    >>> kq, kk, kv = jax.random.split(jax.random.key(0), 3)
    >>> q = jax.random.normal(kq, (B, T, H, K))
    >>> k = jax.random.normal(kk, (B, T * M, H, K))
    >>> v = jax.random.normal(kv, (B, T * M, H, V))
    >>> g, beta = jnp.full((B, T, H), -0.1), jnp.full((B, T * M, H), 0.5)
    >>> o, state = chunk_gated_delta_product(
    ...     q, k, v, g, beta, M, use_qk_l2norm_in_kernel=True, output_final_state=True)
    >>> o.shape, state.shape
    ((1, 100, 2, 32), (1, 2, 16, 32))

  Source: DeltaProduct, arXiv 2502.10297; Gated Delta Networks, arXiv 2412.06464; the WY form,
  arXiv 2406.06484.
  """
  cu_seqlens = inputs.check_arguments(
    q, k, v, g, beta, num_householder, scale, initial_state, cu_seqlens
  )
  inputs.check_not_split(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, state=state)
  inputs.check_num_segments(num_segments, cu_seqlens)
  implementation = inputs.check_implementation(implementation, q.shape[-1])
  N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
  expected = (v.shape[2], q.shape[-1], v.shape[3])
  state_indices = inputs.check_pool(
    state, state_indices, N, expected, initial_state, output_final_state
  )
  try:
    return _chunk(
      q, k, v, g, beta, initial_state, cu_seqlens, state, state_indices,
      num_householder=int(num_householder),
      scale=inputs.default_scale(scale, q.shape[-1]),
      output_final_state=bool(output_final_state),
      use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
      output_chunk_states=bool(output_chunk_states),
      num_segments=int(num_segments),
      implementation=implementation,
    )  # fmt: skip
  except TypeError as error:
    if "custom_vjp" in str(error):  # how JAX refuses forward mode
      raise NotImplementedError(_FIRST_ORDER) from error
    raise


@partial(
  jax.jit,
  static_argnames=(
    "num_householder", "scale", "output_final_state", "use_qk_l2norm_in_kernel",
    "output_chunk_states", "num_segments", "implementation",
  ),
)  # fmt: skip
def _chunk(
  q, k, v, g, beta, initial_state, cu_seqlens, state, state_indices,
  *, num_householder, scale, output_final_state, use_qk_l2norm_in_kernel, output_chunk_states,
  num_segments, implementation,
):  # fmt: skip
  if state is not None:
    live, slots = metadata.pool_slots(state_indices, state.shape[0])
    initial_state = state.at[slots].get(mode="fill", fill_value=0)
    output_final_state = True
    live_tokens = metadata.on_tokens(live, q.shape[1], cu_seqlens)
    q, k, v, g, beta = (
      None if x is None else metadata.where_tokens(x, live_tokens) for x in (q, k, v, g, beta)
    )
  if use_qk_l2norm_in_kernel:
    if cu_seqlens is not None:
      # The norm's gradient would multiply what the padding holds by 0, which NaN survives.
      valid = jnp.arange(q.shape[1]) < metadata.sanitize_cu_seqlens(cu_seqlens, q.shape[1])[-1]
      q, k = (metadata.where_tokens(x, valid[None]) for x in (q, k))
    q, k = l2_normalize(q), l2_normalize(k)
  dtype = v.dtype
  if dtype == jnp.float16:
    # The state and what is read from it may exceed fp16's range where the output does not.
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  T = q.shape[1]
  if num_segments > 1:
    # So that each segment is of whole chunks.
    short = -T % (num_segments * metadata.CHUNK_SIZE)
    q, g = (metadata.pad_rows(x, short) for x in (q, g))
    k, v, beta = (metadata.pad_rows(x, short * num_householder) for x in (k, v, beta))
  static = _Static(
    implementation, num_householder, scale, output_final_state, output_chunk_states, num_segments
  )
  args = (q, k, v, g, beta, initial_state, cu_seqlens)
  if 0 in v.shape:
    o, final_state, h = _nothing(static, *args)
  elif implementation == "xla":
    o, final_state, h, _ = _forward(static, xla, *args)  # differentiable as it is
  else:
    o, final_state, h = _kernels(static, *args)
  if num_segments > 1:
    o, h = o[:, :T], None if h is None else h[:, : -(-T // metadata.CHUNK_SIZE)]
  o = o.astype(dtype)
  if state is not None:
    o = metadata.where_tokens(o, live_tokens)
    final_state = state.at[slots].set(final_state.astype(state.dtype), mode="drop")
  return (o, final_state, lax.stop_gradient(h)) if output_chunk_states else (o, final_state)


_FIRST_ORDER = (
  "chunk_gated_delta_product has first-order reverse-mode gradients only, unless"
  ' implementation="xla": pass that for jax.jvp, jax.linearize, jax.hessian and grad of grad'
)


class _Static(NamedTuple):
  """What a call's trace depends on besides shapes and dtypes."""

  implementation: str | None
  num_householder: int
  scale: float
  output_final_state: bool
  output_chunk_states: bool
  num_segments: int


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernels(static, *args):
  return _dispatch(_forward, static, *args)[:3]


def _kernels_fwd(static, *args):
  # Kept: the inputs, and in bf16 Ti, v_new and the token chunks' states, 2 C + 2 V + 2 K V / (C M)
  # bytes a row and value head: 640 for K = V = 128 and M = 2. Recomputed from these: the states of
  # the row chunks, 2 K V / C = 512.
  *out, kept = _dispatch(_forward, static, *args)
  return tuple(out), (args, kept)


def _kernels_bwd(static, residuals, cotangents):
  args, kept = residuals
  do, dfinal_state, _ = cotangents  # of the states it is 0: see output_chunk_states
  return *_dispatch(_backward, static, *args, kept, do, dfinal_state), None


_kernels.defvjp(_kernels_fwd, _kernels_bwd)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _dispatch(function, static, *args):
  """Runs `function(static, stages, *args)` with the stages that the implementation means."""
  kernel = lambda implementation: partial(function, static, _stages(implementation))
  plain = partial(function, static, xla)
  advice = inputs.CHUNK_SPLIT + inputs.XLA_SPLIT
  return dispatch(static.implementation, kernel, plain, *args, advice=advice)


@_dispatch.defjvp
def _dispatch_jvp(function, static, primals, tangents):
  raise NotImplementedError(_FIRST_ORDER)


def _stages(implementation):
  stages = {name: getattr(kernels, name) for name in kernels.__all__}
  bound = {n: partial(stage, implementation=implementation) for n, stage in stages.items()}
  return SimpleNamespace(**bound)


def _forward(static, stages, q, k, v, g, beta, initial_state, cu_seqlens):
  """The operator as its list of stages: `gdp_jax.xla`, or the kernels."""
  n = static.num_segments
  q, k, v, g, beta = _cut(n, q, k, v, g, beta)
  at = _Layout(static, stages, q, g, cu_seqlens)
  beta = beta.astype(jnp.float32)
  A = stages.chunk_scaled_dot_kkt_fwd(k, at.g_rows, beta, **at.row_chunks)
  Ti = stages.solve_tril(
    A, output_dtype=k.dtype, allow_tf32=k.dtype != jnp.float32, **at.row_chunks
  )
  transitions = None
  if n > 1:
    initial_state, transitions = _entering_states(n, stages, at, k, v, beta, Ti, initial_state)
  h, v_new, final_state = stages.chunk_gated_delta_product_fwd_wy_h(
    k, v, beta, Ti, at.g_rows, initial_state, static.output_final_state, **at.rows
  )
  o = stages.chunk_gated_delta_product_fwd_o(
    q, k, v_new, h, at.g_tokens, static.scale, num_householder=at.M, **at.token_chunks
  )
  if final_state is not None:
    final_state = final_state[n - 1 :: n]
  kept = Ti, v_new, h, transitions
  o, h = _join(n, o, h)
  return o, final_state, h if static.output_chunk_states else None, kept


def _backward(static, stages, q, k, v, g, beta, initial_state, cu_seqlens, kept, do, dfinal_state):
  """Gradients of q, k, v, g, beta and initial_state, each in its primal's dtype."""
  n = static.num_segments
  q, k, v, g, beta, do = _cut(n, q, k, v, g, beta, do)
  at = _Layout(static, stages, q, g, cu_seqlens)
  Ti, v_new, h, transitions = kept
  wide_beta = beta.astype(jnp.float32)
  dq, dk, dv, dg_tokens = stages.chunk_gated_delta_product_bwd_o(
    q, k, v_new, h, do, at.g_tokens, static.scale, num_householder=at.M, **at.token_chunks
  )
  sweep = partial(
    stages.chunk_gated_delta_product_bwd_h,
    q, k, wide_beta, Ti, do, dv, at.g_rows, at.g_tokens, static.scale, **at.rows,
  )  # fmt: skip
  if n > 1:
    dfinal_state = _leaving_gradients(n, sweep, transitions, dfinal_state)
  dh, dres, dinitial_state = sweep(dfinal_state, initial_state is not None)
  states = stages.chunk_gated_delta_product_states(k, v_new, h, at.g_rows, Ti.shape[-1], **at.rows)
  dk, dv, dbeta, dg_rows = stages.chunk_gated_delta_product_bwd_wy(
    k, v, wide_beta, states, v_new, dh, dres, dk, at.g_rows, chunk_size=Ti.shape[-1], **at.rows
  )
  dg = None
  if g is not None:
    # A gate below this is a reset, on which nothing depends: what is left is rounding.
    reset = g.astype(jnp.float32) * xla.LOG2_E <= xla.LOG2_ZERO
    dg = jnp.where(reset, 0, dg_tokens + dg_rows[:, :: at.M]).astype(g.dtype)
  if initial_state is not None:
    dinitial_state = dinitial_state[::n].astype(initial_state.dtype)
  dq, dk = _sum_over_group(dq, q), _sum_over_group(dk, k)
  return *_join(n, dq, dk, dv, dg, dbeta.astype(beta.dtype)), dinitial_state


def _cut(n, *streams):
  """Streams [B, L, ...] with each sequence's n segments in the place of sequences, [B*n, L/n, ...].

  Segments of a sequence are like sequences of their own, but that the state which enters the first
  determines those that enter the others. A segment's effect on it is affine,

      S_out = P S_in + F,    P [K, K], F [K, V],

  which one more sweep computes for all segments at once; a short chain of products makes these the
  entering states. Backward, the gradient of a segment's S_in is P^T dS_out + G, so that a first
  reverse sweep finds G, and the chain, with the P kept from forward, the dS_out for a second one.
  """
  return tuple(None if x is None else x.reshape(x.shape[0] * n, -1, *x.shape[2:]) for x in streams)


def _join(n, *streams):
  """What `_cut` has cut, put together again."""
  return tuple(None if x is None else x.reshape(x.shape[0] // n, -1, *x.shape[2:]) for x in streams)


def _entering_states(n, stages, at, k, v, beta, Ti, initial_state):
  """The state in front of each of n segments [B*n, HV, K, V], and their P [B*n, HV, K, K]."""
  V = v.shape[-1]
  effects = stages.chunk_gated_delta_product_effects(k, v, beta, Ti, at.g_rows, **at.rows)
  F, P = effects[..., :V], effects[..., V:]
  if initial_state is None:
    initial_state = jnp.zeros_like(F[::n])
  entering = [initial_state.astype(jnp.float32)]
  for i in range(n - 1):
    entering.append(F[i::n] + jnp.matmul(P[i::n], entering[-1], precision="highest"))
  return _interleave(entering), P


def _leaving_gradients(n, sweep, P, dfinal_state):
  """The gradient of the state behind each of n segments [B*n, HV, K, V].

  `sweep` takes those and whether to return the gradients of the states in front.
  """
  *_, G = sweep(None, True)
  leaving = [jnp.zeros_like(G[::n]) if dfinal_state is None else dfinal_state]
  for i in range(n - 1, 0, -1):
    leaving.append(G[i::n] + jnp.matmul(P[i::n].mT, leaving[-1], precision="highest"))
  return _interleave(leaving[::-1])


def _interleave(states):
  """n arrays of the segments at one place [B, ...] as one of all segments [B*n, ...]."""
  return jnp.stack(states, axis=1).reshape(-1, *states[0].shape[1:])


class _Layout:
  """The two streams: how each is cut, and the decay summed within the chunks of each."""

  def __init__(self, static, stages, q, g, cu_seqlens):
    T, self.M = q.shape[1], static.num_householder
    tokens = rows = token_chunks = row_chunks = None
    if cu_seqlens is not None:
      tokens = metadata.sanitize_cu_seqlens(cu_seqlens, T)
      rows = tokens * self.M
      token_chunks = metadata.prepare_chunk_indices(tokens, T)
      row_chunks = metadata.prepare_chunk_indices(rows, T * self.M)
    self.token_chunks = dict(cu_seqlens=tokens, chunk_indices=token_chunks)
    self.row_chunks = dict(cu_seqlens=rows, chunk_indices=row_chunks)
    self.rows = dict(cu_seqlens=rows, num_householder=self.M)
    self.g_tokens = self.g_rows = None
    if g is not None:
      self.g_tokens = stages.chunk_local_cumsum(g, **self.token_chunks)
      # On the row stream a token's decay belongs to its first row.
      g_rows = jnp.zeros((*g.shape[:2], self.M, g.shape[2]), g.dtype).at[:, :, 0].set(g)
      g_rows = g_rows.reshape(g.shape[0], -1, g.shape[2])
      self.g_rows = stages.chunk_local_cumsum(g_rows, **self.row_chunks)


def _sum_over_group(dx, x):
  """Gradients of the value heads that read one query/key head, added up in fp32."""
  B, L, H, K = x.shape
  if dx.shape == x.shape:
    return dx
  return dx.reshape(B, L, H, -1, K).sum(axis=3, dtype=jnp.float32).astype(x.dtype)


def _nothing(static, q, k, v, g, beta, initial_state, cu_seqlens):
  """No tokens, or no sequences: the state stays as it was."""
  B, T, _, K = q.shape
  HV, V = v.shape[2:]
  o = jnp.zeros((B, T, HV, V), v.dtype)
  h = jnp.zeros((B, 0, HV, K, V), k.dtype) if static.output_chunk_states else None
  if not static.output_final_state:
    return o, None, h
  if initial_state is None:
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    initial_state = jnp.zeros((N, HV, K, V))
  return o, initial_state.astype(jnp.float32), h
