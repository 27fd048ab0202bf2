"""The WY factors of a chunk's M*C Householder updates."""

import jax
import jax.numpy as jnp

from gdp_jax import config, metadata
from gdp_jax.kernels import pallas


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
  B, R, H, K = k.shape
  HV, V = v.shape[2:]
  C = A.shape[-1]
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
  block_k,
  block_v,
):
  """A program owns one row chunk of one value head."""
  c, hv = pallas.program_id(0), pallas.program_id(1)
  h = hv // (v_ref.shape[1] // k_ref.shape[1])
  start, stop, write_stop = (pallas.load_scalar(bounds_ref, c, i) for i in range(3))
  i = jnp.arange(C, dtype=jnp.int32)
  rows = start + i
  valid, written = (rows < stop)[:, None], (rows < write_stop)[:, None]
  Ti = pallas.load(pallas.tile(Ti_ref, rows, hv, i), valid)
  beta = pallas.load(beta_ref.at[rows, hv], rows < stop).astype(jnp.float32)[:, None]

  def product(x_ref, head, block, factor, out_ref):
    for cols, exists in pallas.blocks(x_ref.shape[2], block):
      x = pallas.load(pallas.tile(x_ref, rows, head, cols), valid & exists[None, :])
      x = (x.astype(jnp.float32) * factor).astype(x_ref.dtype)
      out = dot(Ti.astype(x.dtype), x)
      pallas.store(pallas.tile(out_ref, rows, hv, cols), out, written & exists[None, :])

  product(v_ref, hv, block_v, beta, u_ref)
  if g_ref is not None:
    beta = beta * jnp.exp2(pallas.load(g_ref.at[rows, hv], rows < stop))[:, None]
  product(k_ref, h, block_k, beta, w_ref)
