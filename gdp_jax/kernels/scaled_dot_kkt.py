"""The strictly lower triangular block that couples the rows of a chunk."""

import jax
import jax.numpy as jnp

from gdp_jax import config, inputs, metadata
from gdp_jax.kernels import pallas
from gdp_jax.metadata import CHUNK_SIZE


def chunk_scaled_dot_kkt_fwd(
  k: jax.Array,
  g: jax.Array | None = None,
  beta: jax.Array | None = None,
  cu_seqlens: jax.Array | None = None,
  chunk_size: int = CHUNK_SIZE,
  output_dtype=jnp.float32,
  chunk_indices: jax.Array | None = None,
  *,
  implementation: str = "pallas",
) -> jax.Array:
  """A_ij = beta_i (k_i . k_j) 2^(G_i - G_j) for j < i within a chunk, else 0.

  Args:
    k: keys [B, R, H, K].
    g: cumulative log2 decay within row chunks [B, R, HV], or None.
    beta: step sizes [B, R, HV].
    cu_seqlens: offsets in the row stream, int [N+1], or None.
    chunk_size: C, a power of two of at least 16.
    output_dtype: of the result.
    chunk_indices: descriptors of the row stream; derived if omitted.
    implementation: "pallas" or "interpret".

  Returns:
    A [B, R, HV, C]; 0 in rows of no sequence.

  Source: the WY form, arXiv 2406.06484; `core.ssm.ops.gdp.scaled_dot_kkt` of Megatron Core.
  """
  if beta is None:
    raise ValueError("beta must be an array [B, R, HV], got None")
  sizes = inputs.check_stage(k=(k, "B R H K"), beta=(beta, "B R HV"), g=(g, "B R HV"))
  B, R, K, HV = (sizes[c] for c in ("B", "R", "K", "HV"))
  bounds = metadata.chunk_bounds(B, R, chunk_size, cu_seqlens, chunk_indices)
  flat = lambda x: None if x is None else x.reshape(B * R, *x.shape[2:])
  cfg = config.choose("chunk_scaled_dot_kkt_fwd", K, K, k.dtype)
  A = pallas.call(
    _kkt_kernel,
    bounds,
    flat(k),
    flat(g),
    flat(beta),
    grid=(bounds.shape[0], HV),
    out_shape=jax.ShapeDtypeStruct((B * R, HV, chunk_size), output_dtype),
    config=cfg,
    implementation=implementation,
    name="gdp_chunk_scaled_dot_kkt_fwd",
    dot=None,
    C=chunk_size,
    whole=metadata.all_whole(R, chunk_size, cu_seqlens),
    block_k=cfg.block_k,
  )
  return A.reshape(B, R, HV, chunk_size)


def _kkt_kernel(
  bounds_ref,  # [NC, 3]
  k_ref,  # [B*R, H, K]
  g_ref,  # [B*R, HV] or None
  beta_ref,  # [B*R, HV]
  A_ref,  # [B*R, HV, C]
  *,
  dot,
  C,
  whole,
  block_k,
):
  """A program owns one row chunk of one value head."""
  c, hv = pallas.program_id(0), pallas.program_id(1)
  h = hv // (beta_ref.shape[1] // k_ref.shape[1])
  start, stop, write_stop = (pallas.load_scalar(bounds_ref, c, i) for i in range(3))
  i = jnp.arange(C, dtype=jnp.int32)
  rows = start + i
  valid, written = (pallas.below(rows, end, whole) for end in (stop, write_stop))

  beta = pallas.load(beta_ref.at[rows, hv], valid).astype(jnp.float32)
  if g_ref is not None:
    g = pallas.load(g_ref.at[rows, hv], valid)
  A = jnp.zeros((C, C), jnp.float32)
  for cols, exists in pallas.blocks(k_ref.shape[2], block_k):
    k = pallas.load(pallas.tile(k_ref, rows, h, cols), pallas.mask(valid, exists))
    A += dot(k, k, trans_b=True)
  A *= beta[:, None]
  lower = pallas.mask(valid, where=i[:, None] > i[None, :])
  if g_ref is None:
    A = jnp.where(lower, A, 0.0)
  else:
    A *= pallas.decay(g, g, lower)
  pallas.store(pallas.tile(A_ref, rows, hv, i), A, pallas.mask(written))
