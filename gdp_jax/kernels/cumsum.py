"""Cumulative decay within each chunk."""

import jax
import jax.numpy as jnp
from jax import lax

from gdp_jax import config, inputs, metadata
from gdp_jax.kernels import pallas
from gdp_jax.metadata import CHUNK_SIZE
from gdp_jax.xla import LOG2_E, LOG2_ZERO

_BLOCK_H = 16


def chunk_local_cumsum(
  g: jax.Array,
  chunk_size: int = CHUNK_SIZE,
  cu_seqlens: jax.Array | None = None,
  chunk_indices: jax.Array | None = None,
  *,
  implementation: str = "pallas",
) -> jax.Array:
  """G = cumsum(g) * log2(e), starting anew at each chunk.

  Args:
    g: natural-log decay [B, L, HV], any float dtype; -inf is a reset.
    chunk_size: rows of a chunk.
    cu_seqlens: offsets in the stream, int [N+1] (then B = 1), or None.
    chunk_indices: `metadata.prepare_chunk_indices` of them; derived if omitted.
    implementation: "pallas", or "interpret" to run the kernel on any device, slowly.

  Returns:
    [B, L, HV] in fp32, base-2 logarithm; 0 in rows of no sequence.

  Source: `core.ssm.ops.gdp.cumsum` of Megatron Core.
  """
  sizes = inputs.check_stage(g=(g, "B L HV"))
  B, L, HV = (sizes[c] for c in ("B", "L", "HV"))
  bounds = metadata.chunk_bounds(B, L, chunk_size, cu_seqlens, chunk_indices)
  out = pallas.call(
    _cumsum_kernel,
    bounds,
    g.reshape(B * L, HV),
    grid=(bounds.shape[0], -(-HV // _BLOCK_H)),
    out_shape=jax.ShapeDtypeStruct((B * L, HV), jnp.float32),
    config=config.choose("chunk_local_cumsum", 0, 0, g.dtype),
    implementation=implementation,
    name="gdp_chunk_local_cumsum",
    C=chunk_size,
    whole=metadata.all_whole(L, chunk_size, cu_seqlens),
  )
  return out.reshape(B, L, HV)


def _cumsum_kernel(
  bounds_ref,  # [NC, 3]
  g_ref,  # [B*L, HV]
  out_ref,  # [B*L, HV]
  *,
  C,
  whole,
):
  """A program owns one chunk and 16 heads."""
  c, block = pallas.program_id(0), pallas.program_id(1)
  start, stop, write_stop = (pallas.load_scalar(bounds_ref, c, i) for i in range(3))
  rows = start + jnp.arange(C, dtype=jnp.int32)
  valid, written = (pallas.below(rows, end, whole) for end in (stop, write_stop))
  heads, exists = pallas.columns(block, g_ref.shape[1], _BLOCK_H)
  view = lambda ref: ref.at[rows[:, None], heads[None, :]]
  g = pallas.load(view(g_ref), pallas.mask(valid, exists)).astype(jnp.float32) * LOG2_E
  # The sum over padding is never seen, but a NaN there would be: it is masked by the load.
  total = lax.cumsum(jnp.maximum(g, LOG2_ZERO), axis=0)
  pallas.store(view(out_ref), pallas.keep(pallas.mask(valid), total), pallas.mask(written, exists))
