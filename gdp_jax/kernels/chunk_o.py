"""The output of each token chunk, from its state and its own rows, and the gradient."""

import jax
import jax.numpy as jnp
from jax import lax

from gdp_jax import config, inputs, metadata
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
  M = num_householder
  sizes = inputs.check_stage(
    M, q=(q, "B T H K"), k=(k, "B R H K"), v=(v, "B R HV V"), h=(h, "B S HV K V"), g=(g, "B T HV")
  )
  B, T, K, HV, V = (sizes[c] for c in ("B", "T", "K", "HV", "V"))
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
    M=M,
    whole=metadata.all_whole(T, chunk_size, cu_seqlens),
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
  whole,
  block_k,
  block_v,
):
  """A program owns one token chunk of one value head, and block_v columns of its output."""
  c, hv, block = (pallas.program_id(i) for i in range(3))
  head = hv // (v_ref.shape[1] // k_ref.shape[1])
  start, stop, write_stop = (pallas.load_scalar(bounds_ref, c, i) for i in range(3))
  i = jnp.arange(C, dtype=jnp.int32)
  tokens = start + i
  valid, written = (pallas.below(tokens, end, whole) for end in (stop, write_stop))
  has_rows = pallas.below(start, stop, whole)
  v_cols, v_exists = pallas.columns(block, v_ref.shape[2], block_v)
  k_blocks = pallas.blocks(k_ref.shape[2], block_k)
  causal = pallas.mask(valid, where=i[:, None] >= i[None, :])
  if g_ref is not None:
    g = pallas.load(g_ref.at[tokens, hv], valid)
    decay = pallas.decay(g, g, causal)
  else:
    decay = causal.astype(jnp.float32)

  # A chunk of padding has no state; its rows are masked, but 0 times what is there might be NaN.
  chunk = jnp.minimum(c, h_ref.shape[0] - 1)
  q_tiles = []
  o = jnp.zeros((C, block_v), jnp.float32)
  for cols, exists in k_blocks:
    q = pallas.load(pallas.tile(q_ref, tokens, head, cols), pallas.mask(valid, exists))
    view = h_ref.at[chunk, hv, cols[:, None], v_cols[None, :]]
    o += dot(q, pallas.load(view, pallas.mask(exists, v_exists, has_rows)))
    q_tiles.append(q)
  if g_ref is not None:
    o *= jnp.exp2(g)[:, None]

  def copy(m, o):
    rows = tokens * M + m
    v = pallas.load(pallas.tile(v_ref, rows, hv, v_cols), pallas.mask(valid, v_exists))
    attn = jnp.zeros((C, C), jnp.float32)
    for q, (cols, exists) in zip(q_tiles, k_blocks, strict=True):
      k = pallas.load(pallas.tile(k_ref, rows, head, cols), pallas.mask(valid, exists))
      attn += dot(q, k, trans_b=True)
    # Rounding attn to bf16 would be this stage's largest error: the sum over rows cancels.
    high, low = pallas.split(attn * decay, v.dtype)
    o += dot(high, v)
    return o if low is None else o + dot(low, v)

  o = lax.fori_loop(0, M, copy, o)
  view = pallas.tile(o_ref, tokens, hv, v_cols)
  pallas.store(view, o * scale, pallas.mask(written, v_exists))


def chunk_gated_delta_product_bwd_o(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  h: jax.Array,
  do: jax.Array,
  g: jax.Array | None = None,
  scale: float | None = None,
  cu_seqlens: jax.Array | None = None,
  chunk_size: int = CHUNK_SIZE,
  num_householder: int = 1,
  chunk_indices: jax.Array | None = None,
  *,
  implementation: str = "pallas",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """Gradient of the output stage. With E_tr = 2^(G_t - G_tok(r)) for tok(r) <= t, else 0,

      P = scale E (q k^T);  dP = do v^T;  dv = P^T do;  dk = scale (dP*E)^T q
      dq = scale 2^G_t (do h^T) + scale (dP*E) k

  The state's own gradient, scale (2^G_t q)^T do, is taken up in
  `chunk_gated_delta_product_bwd_h`, so it is never written.

  Args:
    q, k, v, g, scale, cu_seqlens, chunk_size, num_householder, chunk_indices, implementation: as
      for `chunk_gated_delta_product_fwd_o`.
    h: states at the start of each token chunk [B, NC, HV, K, V].
    do: cotangent of o [B, T, HV, V].

  Returns:
    dq [B, T, HV, K], dk [B, R, HV, K] and dv [B, R, HV, V] in the inputs' dtypes, for each value
    head (of k and v, only what comes through o), and dg [B, T, HV] in fp32, or None: with respect
    to the natural-log decay, not its cumulative sum. 0 in rows of no sequence.

  Source: this project; checked against autodiff of the recurrence.
  """
  M = num_householder
  sizes = inputs.check_stage(
    M, q=(q, "B T H K"), k=(k, "B R H K"), v=(v, "B R HV V"), h=(h, "B S HV K V"),
    do=(do, "B T HV V"), g=(g, "B T HV"),
  )  # fmt: skip
  B, T, R, K, HV, V = (sizes[c] for c in ("B", "T", "R", "K", "HV", "V"))
  bounds = metadata.chunk_bounds(B, T, chunk_size, cu_seqlens, chunk_indices)
  flat = lambda x: None if x is None else x.reshape(-1, *x.shape[2:])
  cfg = config.choose("chunk_gated_delta_product_bwd_o", K, V, q.dtype)
  dq, dk, dv, dg = pallas.call(
    _bwd_o_kernel,
    bounds,
    flat(q),
    flat(k),
    flat(v),
    flat(h),
    flat(do),
    flat(g),
    grid=(bounds.shape[0], HV),
    out_shape=(
      jax.ShapeDtypeStruct((B * T, HV, K), q.dtype),
      jax.ShapeDtypeStruct((B * R, HV, K), k.dtype),
      jax.ShapeDtypeStruct((B * R, HV, V), v.dtype),
      None if g is None else jax.ShapeDtypeStruct((B * T, HV), jnp.float32),
    ),
    config=cfg,
    implementation=implementation,
    name="gdp_chunk_gated_delta_product_bwd_o",
    dot=None,
    scale=K**-0.5 if scale is None else scale,
    C=chunk_size,
    M=M,
    whole=metadata.all_whole(T, chunk_size, cu_seqlens),
    block_k=cfg.block_k,
    block_v=cfg.block_v,
  )
  if dg is not None:
    dg = dg.reshape(B, T, HV)
  return dq.reshape(B, T, HV, K), dk.reshape(B, R, HV, K), dv.reshape(B, R, HV, V), dg


def _bwd_o_kernel(
  bounds_ref,  # [NC, 3]
  q_ref,  # [B*T, H, K]
  k_ref,  # [B*R, H, K]
  v_ref,  # [B*R, HV, V]
  h_ref,  # [B*NC, HV, K, V]
  do_ref,  # [B*T, HV, V]
  g_ref,  # [B*T, HV] or None
  dq_ref,  # [B*T, HV, K]
  dk_ref,  # [B*R, HV, K]
  dv_ref,  # [B*R, HV, V]
  dg_ref,  # [B*T, HV] or None
  *,
  dot,
  scale,
  C,
  M,
  whole,
  block_k,
  block_v,
):
  """A program owns one token chunk of one value head."""
  c, hv = pallas.program_id(0), pallas.program_id(1)
  head = hv // (v_ref.shape[1] // k_ref.shape[1])
  start, stop, write_stop = (pallas.load_scalar(bounds_ref, c, i) for i in range(3))
  i = jnp.arange(C, dtype=jnp.int32)
  tokens = start + i
  valid, written = (pallas.below(tokens, end, whole) for end in (stop, write_stop))
  has_rows = pallas.below(start, stop, whole)
  k_blocks = pallas.blocks(k_ref.shape[2], block_k)
  V = v_ref.shape[2]
  causal = pallas.mask(valid, where=i[:, None] >= i[None, :])
  if g_ref is None:
    E, into = scale * causal.astype(jnp.float32), scale
  else:
    g = pallas.load(g_ref.at[tokens, hv], valid)
    E, into = scale * pallas.decay(g, g, causal), (scale * jnp.exp2(g))[:, None]

  def q_tile(cols, exists):
    return pallas.load(pallas.tile(q_ref, tokens, head, cols), pallas.mask(valid, exists))

  def k_tile(rows, cols, exists):
    return pallas.load(pallas.tile(k_ref, rows, head, cols), pallas.mask(valid, exists))

  def do_tile(cols, exists):
    return pallas.load(pallas.tile(do_ref, tokens, hv, cols), pallas.mask(valid, exists))

  # Heads of one block: a tile is loaded once, not for each product that takes it.
  one_block = len(k_blocks) == len(pallas.blocks(V, block_v)) == 1
  if one_block:
    q, do = q_tile(*k_blocks[0]), do_tile(*pallas.blocks(V, block_v)[0])
    q_tile, do_tile = lambda *_: q, lambda *_: do

  # What the state adds to o. A chunk of padding has no state: see the forward kernel.
  slot = jnp.minimum(c, h_ref.shape[0] - 1)
  dq, dG = [], jnp.zeros((C,), jnp.float32)
  for k_cols, k_exists in k_blocks:

    def add_state(v_cols, v_exists, dq_b, k_cols=k_cols, k_exists=k_exists):
      view = h_ref.at[slot, hv, k_cols[:, None], v_cols[None, :]]
      h = pallas.load(view, pallas.mask(k_exists, v_exists, has_rows))
      return dq_b + dot(do_tile(v_cols, v_exists), h, trans_b=True)

    dq_b = pallas.over_blocks(V, block_v, add_state, jnp.zeros((C, block_k), jnp.float32))
    dq_b *= into
    if g_ref is not None:
      dG += jnp.sum(dq_b * q_tile(k_cols, k_exists).astype(jnp.float32), axis=1)
    dq.append(dq_b)

  def copy(m, carry):
    dq, dG = carry
    rows = tokens * M + m
    P = jnp.zeros((C, C), jnp.float32)
    for cols, exists in k_blocks:
      k = k_tile(rows, cols, exists)
      P += dot(q_tile(cols, exists), k, trans_b=True)
    P *= E
    P_rounded = P.astype(do_ref.dtype)

    def values(cols, exists, dP):
      v = pallas.load(pallas.tile(v_ref, rows, hv, cols), pallas.mask(valid, exists))
      do = do_tile(cols, exists)
      dv = dot(P_rounded, do, trans_a=True)
      pallas.store(pallas.tile(dv_ref, rows, hv, cols), dv, pallas.mask(written, exists))
      return dP + dot(do, v, trans_b=True)

    dP = pallas.over_blocks(V, block_v, values, jnp.zeros((C, C), jnp.float32))
    if g_ref is not None:
      # A pair of one token has no decay between it: left out, not subtracted from itself.
      X = jnp.where(i[:, None] > i[None, :], P * dP, 0.0)
      dG += jnp.sum(X, axis=1) - jnp.sum(X, axis=0)
    dA = (dP * E).astype(k_ref.dtype)
    new = []
    for dq_b, (cols, exists) in zip(dq, k_blocks, strict=True):
      if not one_block:
        k = k_tile(rows, cols, exists)
      new.append(dq_b + dot(dA, k))
      dk = dot(dA, q_tile(cols, exists), trans_a=True)
      pallas.store(pallas.tile(dk_ref, rows, hv, cols), dk, pallas.mask(written, exists))
    return tuple(new), dG

  dq, dG = lax.fori_loop(0, M, copy, (tuple(dq), dG))
  for dq_b, (cols, exists) in zip(dq, k_blocks, strict=True):
    pallas.store(pallas.tile(dq_ref, tokens, hv, cols), dq_b, pallas.mask(written, exists))
  if g_ref is not None:
    pallas.store(dg_ref.at[tokens, hv], pallas.sum_from(dG), written)
