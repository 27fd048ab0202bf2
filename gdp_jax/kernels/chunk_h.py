"""The sweep of the state over a sequence's chunks."""

import jax
import jax.numpy as jnp
from jax import lax

from gdp_jax import config, metadata
from gdp_jax.kernels import pallas
from gdp_jax.metadata import CHUNK_SIZE


def chunk_gated_delta_product_fwd_h(
  k: jax.Array,
  w: jax.Array,
  u: jax.Array,
  g: jax.Array | None = None,
  initial_state: jax.Array | None = None,
  output_final_state: bool = False,
  chunk_size: int = CHUNK_SIZE,
  cu_seqlens: jax.Array | None = None,
  num_householder: int = 1,
  *,
  implementation: str = "pallas",
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Row chunk by row chunk: v_new = u - w S, S <- 2^G_last S + sum_i 2^(G_last - G_i) k_i v_new_i^T.

  Two chunkings meet here: a token chunk of C tokens is M row chunks of C rows, the last ones
  possibly empty, and S is stored at each token chunk's start. The decay of a partial chunk ends at
  its last valid row.

  Args:
    k: keys [B, R, H, K].
    w, u: WY factors [B, R, HV, K] and [B, R, HV, V].
    g: cumulative log2 decay within row chunks [B, R, HV], or None.
    initial_state: [N, HV, K, V], any float dtype, or None for zeros.
    output_final_state: whether to return it.
    chunk_size: C, a power of two of at least 16.
    cu_seqlens: offsets in the row stream, int [N+1], multiples of num_householder; or None.
    num_householder: M, rows of a token.
    implementation: "pallas" or "interpret".

  Returns:
    h: states at the start of each token chunk, k's dtype, [B, NC, HV, K, V]. Packed, NC is
      `metadata.num_chunks(T, N, C)`, chunks in stream order, unused ones 0.
    v_new: [B, R, HV, V], u's dtype; 0 in rows of no sequence.
    final_state: [N, HV, K, V] in fp32, or None.

  Source: DESIGN of Gated Delta Networks' chunked form, arXiv 2412.06464; `core.ssm.ops.gdp.chunk_h`
  of Megatron Core.
  """
  B, R, HV, K = w.shape
  V, M = u.shape[-1], num_householder
  bounds = metadata.sequence_bounds(B, R, M, chunk_size, cu_seqlens)
  if cu_seqlens is None:
    N, NC = B, -(-(R // M) // chunk_size)
  else:
    N = cu_seqlens.shape[0] - 1
    NC = metadata.num_chunks(R // M, N, chunk_size)
  flat = lambda x: None if x is None else x.reshape(B * R, *x.shape[2:])
  cfg = config.choose("chunk_gated_delta_product_fwd_h", K, V, k.dtype)
  final_state = jax.ShapeDtypeStruct((N, HV, K, V), jnp.float32) if output_final_state else None
  h, v_new, final_state = pallas.call(
    _fwd_h_kernel,
    bounds,
    flat(k),
    flat(w),
    flat(u),
    flat(g),
    initial_state,
    grid=(bounds.shape[0], HV, -(-V // cfg.block_v)),
    out_shape=(
      jax.ShapeDtypeStruct((B * NC, HV, K, V), k.dtype),
      jax.ShapeDtypeStruct((B * R, HV, V), u.dtype),
      final_state,
    ),
    config=cfg,
    implementation=implementation,
    name="gdp_chunk_fwd_h",
    dot=None,
    C=chunk_size,
    M=M,
    N=N,
    block_k=cfg.block_k,
    block_v=cfg.block_v,
  )
  return h.reshape(B, NC, HV, K, V), v_new.reshape(B, R, HV, V), final_state


def _fwd_h_kernel(
  bounds_ref,  # [N or N+1, 4]
  k_ref,  # [B*R, H, K]
  w_ref,  # [B*R, HV, K]
  u_ref,  # [B*R, HV, V]
  g_ref,  # [B*R, HV] or None
  initial_ref,  # [N, HV, K, V] or None
  h_ref,  # [B*NC, HV, K, V]
  v_new_ref,  # [B*R, HV, V]
  final_ref,  # [N, HV, K, V] or None
  *,
  dot,
  C,
  M,
  N,
  block_k,
  block_v,
):
  """A program owns one sequence of one value head, and block_v columns of its state.

  Sequence N is the padding behind the last offset: the same walk with no valid row writes zeros.
  """
  n, hv, block = (pallas.program_id(i) for i in range(3))
  HV = u_ref.shape[1]
  h = hv // (HV // k_ref.shape[1])
  start, stop, write_stop, chunk0 = (pallas.load_scalar(bounds_ref, n, i) for i in range(4))
  real = n < N
  i = jnp.arange(C, dtype=jnp.int32)
  v_cols = block * block_v + jnp.arange(block_v, dtype=jnp.int32)
  v_exists = (v_cols < u_ref.shape[2])[None, :]
  k_blocks = pallas.blocks(k_ref.shape[2], block_k)

  def state_view(ref, index, k_cols):
    return ref.at[index, hv, k_cols[:, None], v_cols[None, :]]

  def store_state(ref, index, S, where):
    for S_b, (cols, exists) in zip(S, k_blocks, strict=True):
      pallas.store(state_view(ref, index, cols), S_b, exists[:, None] & v_exists & where)

  def row_chunk(c, S):
    first_row = start + c * C
    rows = first_row + i
    valid = (rows < stop)[:, None]
    # Only at a token chunk's start; beyond the last valid row there is no token chunk.
    keep = (lax.rem(c, M) == 0) & (first_row < stop)
    store_state(h_ref, chunk0 + lax.div(c, M), S, keep)
    v_new = pallas.load(pallas.tile(u_ref, rows, hv, v_cols), valid & v_exists)
    v_new = v_new.astype(jnp.float32)
    for S_b, (cols, exists) in zip(S, k_blocks, strict=True):
      w = pallas.load(pallas.tile(w_ref, rows, hv, cols), valid & exists[None, :])
      v_new -= dot(w, S_b.astype(w.dtype))
    written = (rows < write_stop)[:, None]
    pallas.store(pallas.tile(v_new_ref, rows, hv, v_cols), v_new, written & v_exists)

    if g_ref is not None:
      last = jnp.minimum(first_row + C, stop) - 1
      g_last = pallas.load(g_ref.at[last, hv], first_row < stop)
      g = pallas.load(g_ref.at[rows, hv], rows < stop)
      # Rows past the end have g = 0 here; v_new is 0 there, and the exponent must stay finite.
      v_new *= jnp.exp2(jnp.where(rows < stop, g_last - g, 0.0))[:, None]
      S = [S_b * jnp.exp2(g_last) for S_b in S]
    v_new = v_new.astype(k_ref.dtype)
    new = []
    for S_b, (cols, exists) in zip(S, k_blocks, strict=True):
      k = pallas.load(pallas.tile(k_ref, rows, h, cols), valid & exists[None, :])
      new.append(S_b + dot(k, v_new, trans_a=True))
    return tuple(new)

  S = []
  for cols, exists in k_blocks:
    if initial_ref is None:
      S.append(jnp.zeros((block_k, block_v), jnp.float32))
    else:
      view = state_view(initial_ref, jnp.minimum(n, N - 1), cols)
      S.append(pallas.load(view, exists[:, None] & v_exists & real).astype(jnp.float32))
  chunks = lax.div(write_stop - start + (C - 1), C)
  S = lax.fori_loop(0, chunks, row_chunk, tuple(S))
  if final_ref is not None:
    store_state(final_ref, jnp.minimum(n, N - 1), S, real)

  def zero_state(chunk, _):
    store_state(h_ref, chunk, [jnp.zeros((block_k, block_v), jnp.float32)] * len(k_blocks), True)
    return ()

  # What the table of token chunks has room for and these offsets leave unused.
  unused = jnp.where(real, h_ref.shape[0], chunk0)
  lax.fori_loop(unused, h_ref.shape[0], zero_state, ())
