"""The output of each token chunk: what its state holds, and what its own rows add."""

import jax
import jax.numpy as jnp
from jax import lax

from gdp_jax import config, metadata
from gdp_jax.kernels import pallas
from gdp_jax.metadata import CHUNK_SIZE


def chunk_gated_delta_product_fwd_o(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  h: jax.Array,
  g: jax.Array | None = None,
  scale: float | None = None,
  cu_seqlens: jax.Array | None = None,
  chunk_size: int = CHUNK_SIZE,
  num_householder: int = 1,
  chunk_indices: jax.Array | None = None,
  *,
  implementation: str = "pallas",
) -> jax.Array:
  """o_t = scale (2^G_t q_t h + sum over rows r of tokens s <= t of 2^(G_t - G_s) (q_t . k_r) v_r).

  Queries and decays stay on the token stream: the sum over rows is M causal products, one for
  each Householder copy.

  Args:
    q: queries [B, T, H, K].
    k: keys [B, R, H, K].
    v: v_new of `chunk_gated_delta_product_fwd_h` [B, R, HV, V].
    h: its states [B, NC, HV, K, V].
    g: cumulative log2 decay within token chunks [B, T, HV], or None.
    scale: default K**-0.5.
    cu_seqlens: offsets in the token stream, int [N+1], or None.
    chunk_size: C, a power of two of at least 16.
    num_householder: M.
    chunk_indices: descriptors of the token stream; derived if omitted.
    implementation: "pallas" or "interpret".

  Returns:
    o [B, T, HV, V] with v's dtype; 0 in rows of no sequence.

  Source: `core.ssm.ops.gdp.chunk_o` of Megatron Core.
  """
  B, T, H, K = q.shape
  HV, V = v.shape[2:]
  bounds = metadata.chunk_bounds(B, T, chunk_size, cu_seqlens, chunk_indices)
  flat = lambda x: None if x is None else x.reshape(-1, *x.shape[2:])
  cfg = config.choose("chunk_gated_delta_product_fwd_o", K, V, q.dtype)
  o = pallas.call(
    _fwd_o_kernel,
    bounds,
    flat(q),
    flat(k),
    flat(v),
    flat(h),
    flat(g),
    grid=(bounds.shape[0], HV, -(-V // cfg.block_v)),
    out_shape=jax.ShapeDtypeStruct((B * T, HV, V), v.dtype),
    config=cfg,
    implementation=implementation,
    name="gdp_chunk_fwd_o",
    dot=None,
    scale=K**-0.5 if scale is None else scale,
    C=chunk_size,
    M=num_householder,
    block_k=cfg.block_k,
    block_v=cfg.block_v,
  )
  return o.reshape(B, T, HV, V)


def _fwd_o_kernel(
  bounds_ref,  # [NC, 3]
  q_ref,  # [B*T, H, K]
  k_ref,  # [B*R, H, K]
  v_ref,  # [B*R, HV, V]
  h_ref,  # [B*NC, HV, K, V]
  g_ref,  # [B*T, HV] or None
  o_ref,  # [B*T, HV, V]
  *,
  dot,
  scale,
  C,
  M,
  block_k,
  block_v,
):
  """A program owns one token chunk of one value head, and block_v columns of its output."""
  c, hv, block = (pallas.program_id(i) for i in range(3))
  head = hv // (v_ref.shape[1] // k_ref.shape[1])
  start, stop, write_stop = (pallas.load_scalar(bounds_ref, c, i) for i in range(3))
  i = jnp.arange(C, dtype=jnp.int32)
  tokens = start + i
  valid = (tokens < stop)[:, None]
  v_cols = block * block_v + jnp.arange(block_v, dtype=jnp.int32)
  v_exists = (v_cols < v_ref.shape[2])[None, :]
  k_blocks = pallas.blocks(k_ref.shape[2], block_k)
  causal = i[:, None] >= i[None, :]
  if g_ref is not None:
    g = pallas.load(g_ref.at[tokens, hv], tokens < stop)
    decay = pallas.decay(g, g, causal)
  else:
    decay = causal.astype(jnp.float32)

  # A chunk of padding has no state; its rows are masked, but 0 times what is there might be NaN.
  chunk = jnp.minimum(c, h_ref.shape[0] - 1)
  q_tiles = []
  o = jnp.zeros((C, block_v), jnp.float32)
  for cols, exists in k_blocks:
    q = pallas.load(pallas.tile(q_ref, tokens, head, cols), valid & exists[None, :])
    view = h_ref.at[chunk, hv, cols[:, None], v_cols[None, :]]
    o += dot(q, pallas.load(view, exists[:, None] & v_exists & (start < stop)))
    q_tiles.append(q)
  if g_ref is not None:
    o *= jnp.exp2(g)[:, None]

  def copy(m, o):
    rows = tokens * M + m
    attn = jnp.zeros((C, C), jnp.float32)
    for q, (cols, exists) in zip(q_tiles, k_blocks, strict=True):
      k = pallas.load(pallas.tile(k_ref, rows, head, cols), valid & exists[None, :])
      attn += dot(q, k, trans_b=True)
    v = pallas.load(pallas.tile(v_ref, rows, hv, v_cols), valid & v_exists)
    return o + dot((attn * decay).astype(v.dtype), v)

  o = lax.fori_loop(0, M, copy, o)
  view = pallas.tile(o_ref, tokens, hv, v_cols)
  pallas.store(view, o * scale, (tokens < write_stop)[:, None] & v_exists)
