"""The inverse of a chunk's unit lower triangular matrix."""

import jax
import jax.numpy as jnp

from gdp_jax import config, inputs, metadata
from gdp_jax.kernels import pallas

_DIAGONAL = 16  # rows of the diagonal blocks that are inverted by substitution


def solve_tril(
  A: jax.Array,
  cu_seqlens: jax.Array | None = None,
  chunk_indices: jax.Array | None = None,
  output_dtype=jnp.float32,
  allow_tf32: bool = False,
  output_low: bool = False,
  *,
  implementation: str = "pallas",
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Ti = (I + A)^-1 for the strictly lower triangular A of each chunk.

  Forward substitution on 16-row diagonal blocks, all of them at once, then merges of neighbours.
  Substitution is backward stable, where a sum of powers of A is not: with repeated keys those
  reach 1e17 before they cancel.

  Args:
    A: [B, R, HV, C], fp32; C a power of two of at least 16.
    cu_seqlens: offsets in the row stream, int [N+1], or None.
    chunk_indices: descriptors of the row stream; derived if omitted.
    output_dtype: of the result.
    allow_tf32: merge in tf32, about 3e-4 relative error, enough where A comes from bf16 keys;
      otherwise in fp32 accuracy.
    output_low: whether to return what rounding Ti to output_dtype leaves as well, in that dtype.
    implementation: "pallas" or "interpret".

  Returns:
    Ti [B, R, HV, C]; 0 in rows of no sequence. With output_low two such arrays, whose sum is Ti.

  Source: the WY form, arXiv 2406.06484; `core.ssm.ops.gdp.solve_tril` of Megatron Core.
  """
  sizes = inputs.check_stage(A=(A, "B R HV C"))
  B, R, HV, C = (sizes[c] for c in ("B", "R", "HV", "C"))
  bounds = metadata.chunk_bounds(B, R, C, cu_seqlens, chunk_indices)
  shape = jax.ShapeDtypeStruct((B * R, HV, C), output_dtype)
  Ti, low = pallas.call(
    _solve_tril_kernel,
    bounds,
    A.reshape(B * R, HV, C),
    grid=(bounds.shape[0], HV),
    out_shape=(shape, shape if output_low else None),
    config=config.choose("solve_tril", C, C, jnp.bfloat16 if allow_tf32 else jnp.float32),
    implementation=implementation,
    name="gdp_solve_tril",
    dot=None,
    precision="tf32" if allow_tf32 else None,
    C=C,
  )
  Ti = Ti.reshape(B, R, HV, C)
  return (Ti, low.reshape(B, R, HV, C)) if output_low else Ti


def _solve_tril_kernel(
  bounds_ref,  # [NC, 3]
  A_ref,  # [B*R, HV, C]
  Ti_ref,  # [B*R, HV, C]
  low_ref,  # [B*R, HV, C] or None
  *,
  dot,
  precision,
  C,
):
  """A program owns one row chunk of one value head."""
  c, hv = pallas.program_id(0), pallas.program_id(1)
  start, stop, write_stop = (pallas.load_scalar(bounds_ref, c, i) for i in range(3))
  D = _DIAGONAL
  block = jnp.arange(C // D, dtype=jnp.int32)
  d = jnp.arange(D, dtype=jnp.int32)

  # X [block, row, column]: the inverses of the diagonal blocks, a row at a time,
  # X_i = e_i - sum_{j<i} A_ij X_j.
  eye = (d[:, None] == d[None, :]).astype(jnp.float32)
  X = jnp.broadcast_to(eye[None], (C // D, D, D))
  for i in range(1, D):
    rows = start + block * D + i
    view = A_ref.at[rows[:, None], hv, block[:, None] * D + d[None, :]]
    A_i = pallas.load(view, (rows < stop)[:, None] & (d < i)[None, :]).astype(jnp.float32)
    X_i = jnp.sum(A_i[:, :, None] * X, axis=1)
    X = jnp.where((d == i)[None, :, None], X - X_i[:, None, :], X)

  # Laid out as one block-diagonal [C, C] matrix.
  same = block[:, None, None, None] == block[None, None, :, None]
  X = jnp.where(same, X[:, :, None, :], 0.0).reshape(C, C)

  cols = jnp.arange(C, dtype=jnp.int32)
  rows = start + cols
  A = pallas.load(pallas.tile(A_ref, rows, hv, cols), (rows < stop)[:, None]).astype(jnp.float32)
  shift = D.bit_length() - 1
  size = D
  while size < C:
    # Pairs of inverted blocks of `size` rows become one: [[X1, 0], [-X2 A21 X1, X2]].
    row, col = cols[:, None] >> shift, cols[None, :] >> shift
    pair = (row == col + 1) & ((col & 1) == 0)
    A_off = jnp.where(pair, A, 0.0)
    X = X - dot(dot(X, A_off, precision=precision), X, precision=precision)
    size, shift = 2 * size, shift + 1

  Ti = jnp.where((rows < stop)[:, None], X, 0.0)
  written = (rows < write_stop)[:, None]
  pallas.store(pallas.tile(Ti_ref, rows, hv, cols), Ti, written)
  if low_ref is not None:
    low = Ti - Ti.astype(Ti_ref.dtype).astype(jnp.float32)
    pallas.store(pallas.tile(low_ref, rows, hv, cols), low, written)
