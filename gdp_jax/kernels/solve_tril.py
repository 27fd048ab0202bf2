"""The inverse of a chunk's unit lower triangular matrix."""

import jax
import jax.numpy as jnp

from gdp_jax import config, inputs, metadata
from gdp_jax.kernels import pallas

_BLOCK = 16  # rows of a block, the least that a matrix product takes


def solve_tril(
  A: jax.Array,
  cu_seqlens: jax.Array | None = None,
  chunk_indices: jax.Array | None = None,
  output_dtype=jnp.float32,
  allow_tf32: bool = False,
  *,
  implementation: str = "pallas",
) -> jax.Array:
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
    implementation: "pallas" or "interpret".

  Returns:
    Ti [B, R, HV, C]; 0 in rows of no sequence.

  Source: the WY form, arXiv 2406.06484; `core.ssm.ops.gdp.solve_tril` of Megatron Core.
  """
  sizes = inputs.check_stage(A=(A, "B R HV C"))
  B, R, HV, C = (sizes[c] for c in ("B", "R", "HV", "C"))
  bounds = metadata.chunk_bounds(B, R, C, cu_seqlens, chunk_indices)
  Ti = pallas.call(
    _solve_tril_kernel,
    bounds,
    A.reshape(B * R, HV, C),
    grid=(bounds.shape[0], HV),
    out_shape=jax.ShapeDtypeStruct((B * R, HV, C), output_dtype),
    config=config.choose("solve_tril", C, C, jnp.bfloat16 if allow_tf32 else jnp.float32),
    implementation=implementation,
    name="gdp_solve_tril",
    dot=None,
    precision="tf32" if allow_tf32 else None,
    C=C,
  )
  return Ti.reshape(B, R, HV, C)


def _solve_tril_kernel(
  bounds_ref,  # [NC, 3]
  A_ref,  # [B*R, HV, C]
  Ti_ref,  # [B*R, HV, C]
  *,
  dot,
  precision,
  C,
):
  """A program owns one row chunk of one value head."""
  c, hv = pallas.program_id(0), pallas.program_id(1)
  start, stop, write_stop = (pallas.load_scalar(bounds_ref, c, i) for i in range(3))
  D, n = _BLOCK, C // _BLOCK
  block = jnp.arange(n, dtype=jnp.int32)
  d = jnp.arange(D, dtype=jnp.int32)

  def load(row, col, exists=True):
    mask = (start + row < stop) & exists
    return pallas.load(A_ref.at[start + row, hv, col], mask).astype(jnp.float32)

  # All loads first: the substitution would wait for each of them.
  across, down = d[None, :], d[:, None]
  A = {(i, j): load(i * D + down, j * D + across) for i in range(n) for j in range(i)}
  first = block[None, :] * D
  A_rows = [load(first + i, first + down, down < i) for i in range(1, D)]

  # X [row, block, column]: the inverses of the diagonal blocks, a row at a time,
  # X_i = e_i - sum_{j<i} A_ij X_j. With the rows in front a thread holds whole columns.
  X = jnp.broadcast_to((d[:, None] == d[None, :]).astype(jnp.float32)[:, None, :], (D, n, D))
  for i, A_i in enumerate(A_rows, start=1):
    X_i = jnp.sum(A_i[:, :, None] * X, axis=0)
    X = jnp.where((d == i)[:, None, None], X - X_i[None], X)

  # Block forward substitution: T_ij = -T_ii sum_k A_ik T_kj.
  T = {}
  for i in range(n):
    T[i, i] = jnp.sum(jnp.where((block == i)[None, :, None], X, 0.0), axis=1)
    for j in reversed(range(i)):
      product = sum(dot(A[i, k], T[k, j], precision=precision) for k in range(j, i))
      T[i, j] = -dot(T[i, i], product, precision=precision)

  for i in range(n):
    rows = start + i * D + d
    valid, written = (rows < stop)[:, None], (rows < write_stop)[:, None]
    for j in range(n):
      T_ij = jnp.where(valid, T[i, j], 0.0) if j <= i else jnp.zeros((D, D), jnp.float32)
      pallas.store(pallas.tile(Ti_ref, rows, hv, j * D + d), T_ij, written)
