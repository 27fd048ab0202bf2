"""The WY factors of a row chunk's Householder updates, and the gradient of these updates."""

import jax
import jax.numpy as jnp
from jax import lax

from gdp_jax import config, inputs, metadata
from gdp_jax.kernels import pallas
from gdp_jax.metadata import CHUNK_SIZE


def recompute_w_u_fwd(
  k: jax.Array,
  v: jax.Array,
  beta: jax.Array,
  A: jax.Array,
  g: jax.Array | None = None,
  cu_seqlens: jax.Array | None = None,
  chunk_indices: jax.Array | None = None,
  *,
  implementation: str = "pallas",
) -> tuple[jax.Array, jax.Array]:
  """w = Ti (beta 2^G k) and u = Ti (beta v), so that a chunk's v_new is u - w S.

  Args:
    k: keys [B, R, H, K].
    v: values [B, R, HV, V].
    beta: step sizes [B, R, HV].
    A: the inverted block Ti [B, R, HV, C].
    g: cumulative log2 decay within row chunks [B, R, HV], or None.
    cu_seqlens: offsets in the row stream, int [N+1], or None.
    chunk_indices: descriptors of the row stream; derived if omitted.
    implementation: "pallas" or "interpret".

  Returns:
    w [B, R, HV, K] with k's dtype and u [B, R, HV, V] with v's; 0 in rows of no sequence.

  Source: the WY form, arXiv 2406.06484; `core.ssm.ops.gdp.wy_fast` of Megatron Core.
  """
  sizes = inputs.check_stage(
    k=(k, "B R H K"), v=(v, "B R HV V"), beta=(beta, "B R HV"), A=(A, "B R HV C"), g=(g, "B R HV")
  )
  B, R, K, HV, V, C = (sizes[c] for c in ("B", "R", "K", "HV", "V", "C"))
  bounds = metadata.chunk_bounds(B, R, C, cu_seqlens, chunk_indices)
  flat = lambda x: None if x is None else x.reshape(B * R, *x.shape[2:])
  cfg = config.choose("recompute_w_u_fwd", K, V, k.dtype)
  w, u = pallas.call(
    _w_u_kernel,
    bounds,
    flat(k),
    flat(v),
    flat(beta),
    flat(A),
    flat(g),
    grid=(bounds.shape[0], HV),
    out_shape=(
      jax.ShapeDtypeStruct((B * R, HV, K), k.dtype),
      jax.ShapeDtypeStruct((B * R, HV, V), v.dtype),
    ),
    config=cfg,
    implementation=implementation,
    name="gdp_recompute_w_u_fwd",
    dot=None,
    C=C,
    whole=metadata.all_whole(R, C, cu_seqlens),
    block_k=cfg.block_k,
    block_v=cfg.block_v,
  )
  return w.reshape(B, R, HV, K), u.reshape(B, R, HV, V)


def _w_u_kernel(
  bounds_ref,  # [NC, 3]
  k_ref,  # [B*R, H, K]
  v_ref,  # [B*R, HV, V]
  beta_ref,  # [B*R, HV]
  Ti_ref,  # [B*R, HV, C]
  g_ref,  # [B*R, HV] or None
  w_ref,  # [B*R, HV, K]
  u_ref,  # [B*R, HV, V]
  *,
  dot,
  C,
  whole,
  block_k,
  block_v,
):
  """A program owns one row chunk of one value head."""
  c, hv = pallas.program_id(0), pallas.program_id(1)
  h = hv // (v_ref.shape[1] // k_ref.shape[1])
  start, stop, write_stop = (pallas.load_scalar(bounds_ref, c, i) for i in range(3))
  i = jnp.arange(C, dtype=jnp.int32)
  rows = start + i
  valid, written = (pallas.below(rows, end, whole) for end in (stop, write_stop))
  Ti = pallas.load(pallas.tile(Ti_ref, rows, hv, i), pallas.mask(valid))
  beta = pallas.load(beta_ref.at[rows, hv], valid).astype(jnp.float32)[:, None]

  def product(x_ref, head, block, factor, out_ref):
    for cols, exists in pallas.blocks(x_ref.shape[2], block):
      x = pallas.load(pallas.tile(x_ref, rows, head, cols), pallas.mask(valid, exists))
      x = (x.astype(jnp.float32) * factor).astype(x_ref.dtype)
      out = dot(Ti.astype(x.dtype), x)
      pallas.store(pallas.tile(out_ref, rows, hv, cols), out, pallas.mask(written, exists))

  product(v_ref, hv, block_v, beta, u_ref)
  if g_ref is not None:
    beta = beta * jnp.exp2(pallas.load(g_ref.at[rows, hv], valid))[:, None]
  product(k_ref, h, block_k, beta, w_ref)


def chunk_gated_delta_product_bwd_wy(
  k: jax.Array,
  v: jax.Array,
  beta: jax.Array,
  states: jax.Array,
  v_new: jax.Array,
  dh: jax.Array,
  dres: jax.Array,
  dk: jax.Array,
  g: jax.Array | None = None,
  cu_seqlens: jax.Array | None = None,
  chunk_size: int = CHUNK_SIZE,
  num_householder: int = 1,
  *,
  implementation: str = "pallas",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """Gradient of the updates, from what the two sweeps left: all row chunks in parallel.

  Since v_new = Ti res with res = beta (v - 2^G (k S)), the inverse needs no product of its own:
  dA = -strict_lower(dres v_new^T). With D_ij = 2^(G_i - G_j), W = beta dA*D, and S and dS the state
  entering and the cotangent of the state leaving the row chunk,

      dv = beta dres;   dbeta = dres.(v - 2^G (k S)) + sum_j (dA*D*kk^T)_ij
      dk += 2^(G_last - G) v_new dS^T - beta 2^G dres S^T + W k + W^T k

  Args:
    k, v, beta: keys [B, R, H, K], values [B, R, HV, V], step sizes [B, R, HV].
    states: of `chunk_gated_delta_product_states` [B, NC * M, HV, K, V].
    v_new: of `chunk_gated_delta_product_fwd_wy_h` [B, R, HV, V].
    dh, dres: of `chunk_gated_delta_product_bwd_h`.
    dk: of `chunk_gated_delta_product_bwd_o` [B, R, HV, K].
    g: cumulative log2 decay within row chunks [B, R, HV], or None.
    cu_seqlens: offsets in the row stream, int [N+1], or None.
    chunk_size: C.
    num_householder: M.
    implementation: "pallas" or "interpret".

  Returns:
    dk [B, R, HV, K] and dv [B, R, HV, V] in the inputs' dtypes, dbeta [B, R, HV] in fp32, and dg
    [B, R, HV] in fp32, or None: of each token's first row, with respect to the natural-log decay.
    0 in rows of no sequence.

  Source: this project; checked against autodiff of the recurrence.
  """
  M = num_householder
  sizes = inputs.check_stage(
    M, k=(k, "B R H K"), v=(v, "B R HV V"), beta=(beta, "B R HV"),
    states=(states, "B S HV K V"), dh=(dh, "B S HV K V"),
    v_new=(v_new, "B R HV V"), dres=(dres, "B R HV V"), dk=(dk, "B R HV K"), g=(g, "B R HV"),
  )  # fmt: skip
  B, R, K, HV, V = (sizes[c] for c in ("B", "R", "K", "HV", "V"))
  tokens = None if cu_seqlens is None else cu_seqlens // M
  bounds = metadata.chunk_bounds(B, R // M, chunk_size, tokens)
  flat = lambda x: None if x is None else x.reshape(-1, *x.shape[2:])
  cfg = config.choose("chunk_gated_delta_product_bwd_wy", K, V, k.dtype)
  dk, dv, dbeta, dg = pallas.call(
    _bwd_wy_kernel,
    bounds,
    flat(k),
    flat(v),
    flat(beta),
    flat(states),
    flat(v_new),
    flat(dh),
    flat(dres),
    flat(dk),
    flat(g),
    grid=(bounds.shape[0] * M, HV),
    out_shape=(
      jax.ShapeDtypeStruct((B * R, HV, K), k.dtype),
      jax.ShapeDtypeStruct((B * R, HV, V), v.dtype),
      jax.ShapeDtypeStruct((B * R, HV), jnp.float32),
      None if g is None else jax.ShapeDtypeStruct((B * R, HV), jnp.float32),
    ),
    in_place={7: 1, 8: 0},  # dv of dres, and dk
    config=cfg,
    implementation=implementation,
    name="gdp_chunk_gated_delta_product_bwd_wy",
    dot=None,
    barrier=None,
    C=chunk_size,
    M=M,
    whole=metadata.all_whole(R, M * chunk_size, cu_seqlens),
    block_k=cfg.block_k,
    block_v=cfg.block_v,
  )
  if dg is not None:
    dg = dg.reshape(B, R, HV)
  return dk.reshape(B, R, HV, K), dv.reshape(B, R, HV, V), dbeta.reshape(B, R, HV), dg


def _bwd_wy_kernel(
  bounds_ref,  # [NC, 3], of the token stream
  k_ref,  # [B*R, H, K]
  v_ref,  # [B*R, HV, V]
  beta_ref,  # [B*R, HV]
  S_ref,  # [B*NC*M, HV, K, V]
  v_new_ref,  # [B*R, HV, V]
  dh_ref,  # [B*NC*M, HV, K, V]
  dres_ref,  # [B*R, HV, V]
  dk_in_ref,  # [B*R, HV, K]
  g_ref,  # [B*R, HV] or None
  dk_ref,  # [B*R, HV, K]
  dv_ref,  # [B*R, HV, V]
  dbeta_ref,  # [B*R, HV]
  dg_ref,  # [B*R, HV] or None
  *,
  dot,
  barrier,
  C,
  M,
  whole,
  block_k,
  block_v,
):
  """A program owns row chunk m of token chunk c, of one value head."""
  chunk, hv = pallas.program_id(0), pallas.program_id(1)
  c, m = lax.div(chunk, M), lax.rem(chunk, M)
  head = hv // (v_ref.shape[1] // k_ref.shape[1])
  first, stop, write_stop = (pallas.load_scalar(bounds_ref, c, i) * M for i in range(3))
  start = first + m * C
  i = jnp.arange(C, dtype=jnp.int32)
  rows = start + i
  valid, written = (pallas.below(rows, end, whole) for end in (stop, write_stop))
  has_rows = pallas.below(start, stop, whole)
  K, V = k_ref.shape[2], v_ref.shape[2]
  beta = pallas.load(beta_ref.at[rows, hv], valid)
  if g_ref is not None:
    g = pallas.load(g_ref.at[rows, hv], valid)
    g_last = pallas.load(g_ref.at[jnp.minimum(start + C, stop) - 1, hv], has_rows)

  def diagonal(x):
    i = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.where(i[:, None] == i[None, :], x, 0.0)

  def load_v(ref, cols, exists):
    return pallas.load(pallas.tile(ref, rows, hv, cols), pallas.mask(valid, exists))

  def load_k(cols, exists):
    return pallas.load(pallas.tile(k_ref, rows, head, cols), pallas.mask(valid, exists))

  # No load serves both a product and something else. Triton's pipeline on Hopper overwrites such a
  # tile while the product, a wgmma, still reads it: seen on an H200 as bits that change from run to
  # run. So what is summed over elements comes from the diagonal of one more product, or is loaded
  # again. A product of fewer than 64 rows is no wgmma: `gdp_jax.config` pipelines nothing then.

  def values(cols, exists, carry):
    minus_dA, dres_v = carry
    dres, v_new, v = (load_v(ref, cols, exists) for ref in (dres_ref, v_new_ref, v_ref))
    minus_dA += dot(dres, v_new, trans_b=True)  # a product adds to what there is, for nothing
    return minus_dA, dres_v + dot(dres, v, trans_b=True)

  def keys(cols, exists, kk):
    k = load_k(cols, exists)
    return kk + dot(k, k, trans_b=True)

  square, row = jnp.zeros((C, C), jnp.float32), jnp.zeros((C,), jnp.float32)
  minus_dA, dres_v = pallas.over_blocks(V, block_v, values, (square, square))
  dbeta = jnp.sum(diagonal(dres_v), axis=1)
  kk = pallas.over_blocks(K, block_k, keys, square)

  lower = pallas.mask(valid, where=i[:, None] > i[None, :])
  if g_ref is None:
    from_start = to_end = jnp.ones((C,), jnp.float32)
    W = jnp.where(lower, -minus_dA, 0.0)
  else:
    from_start = jnp.exp2(g)
    to_end = jnp.exp2(pallas.keep(valid, g_last - g))
    W = -minus_dA * pallas.decay(g, g, lower)
  dbeta += jnp.sum(W * kk, axis=1)
  W *= beta[:, None]
  if g_ref is not None:
    # Rows of one token have no decay between them: such pairs are left out of the sums, in which
    # they would only cancel.
    token = lax.div(rows - first, M)
    Z = jnp.where(token[:, None] != token[None, :], W * kk, 0.0)
    dG = jnp.sum(Z, axis=1) - jnp.sum(Z, axis=0)
  W = W.astype(k_ref.dtype)

  # A row chunk of padding, and one behind its token chunk's last row, has no state.
  slot = jnp.minimum(chunk, S_ref.shape[0] - 1)

  def through_states(k_cols, k_exists, carry):
    y, z, product = carry

    def products(v_cols, v_exists, carry):
      via_dS, via_S, S_dS = carry
      exists = pallas.mask(k_exists, v_exists, has_rows)
      view = lambda ref: ref.at[slot, hv, k_cols[:, None], v_cols[None, :]]
      S, dS = pallas.load(view(S_ref), exists), pallas.load(view(dh_ref), exists)
      v_new, dres = (load_v(ref, v_cols, v_exists) for ref in (v_new_ref, dres_ref))
      via_dS += dot(v_new, dS, trans_b=True)
      via_S += dot(dres, S, trans_b=True)
      if g_ref is not None:
        S_dS += dot(S, dS, trans_b=True)
      return via_dS, via_S, S_dS

    k = load_k(k_cols, k_exists)
    dk = pallas.load(pallas.tile(dk_in_ref, rows, hv, k_cols), pallas.mask(valid, k_exists))
    zeros, none = jnp.zeros((C, block_k), jnp.float32), jnp.zeros((block_k, block_k), jnp.float32)
    via_dS, via_S, S_dS = pallas.over_blocks(V, block_v, products, (zeros, zeros, none))
    product += jnp.sum(diagonal(S_dS))
    dk = dk.astype(jnp.float32) + to_end[:, None] * via_dS - (beta * from_start)[:, None] * via_S
    dk += dot(W, k)
    dk += dot(W, k, trans_a=True)
    pallas.store(pallas.tile(dk_ref, rows, hv, k_cols), dk, pallas.mask(written, k_exists))
    k = load_k(k_cols, k_exists).astype(jnp.float32)  # behind a store: a load of its own
    y += jnp.sum(k * via_dS, axis=1)
    z += jnp.sum(k * via_S, axis=1)
    return y, z, product

  y, z, product = pallas.over_blocks(K, block_k, through_states, (row, row, jnp.float32(0.0)))

  def store_dv(cols, exists, _):
    dv = beta[:, None] * load_v(dres_ref, cols, exists).astype(jnp.float32)
    pallas.store(pallas.tile(dv_ref, rows, hv, cols), dv, pallas.mask(written, exists))
    return ()

  barrier()  # dv takes the place of dres, which some threads may still load for via_S
  pallas.over_blocks(V, block_v, store_dv, ())
  z *= from_start
  pallas.store(dbeta_ref.at[rows, hv], dbeta - z, written)

  if g_ref is not None:
    last_token = lax.div(jnp.minimum(start + C, stop) - 1 - first, M)
    y = jnp.where(pallas.both(valid, token != last_token), to_end * y, 0.0)
    end = jnp.sum(y) + jnp.exp2(g_last) * product
    dg = pallas.keep(valid, pallas.sum_from(dG - beta * z - y) + end)
    pallas.store(dg_ref.at[rows, hv], dg, written)
