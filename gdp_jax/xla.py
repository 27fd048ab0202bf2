"""The stages in plain jnp: the XLA implementation, and the oracle of each kernel's own test.

Same names, signatures, shapes and dtypes as in `gdp_jax.kernels`, whose modules explain each stage.
Arithmetic is fp32 at full precision; what a stage returns is rounded as the kernel's result is.

B batch, T tokens, M Householder copies, R = T*M rows, H query/key heads, HV value heads, K and V
head dims, N sequences, C chunk size, NC chunks.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from gdp_jax import metadata
from gdp_jax.metadata import CHUNK_SIZE

LOG2_E = 1.4426950408889634
# exp2 of this is 0 in fp32. A -inf gate is clamped to it, since -inf - -inf is NaN. A multiple of 8,
# so that a sum of several loses as little as can be of the small gates beside them.
LOG2_ZERO = -152.0

_einsum = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


def chunk_local_cumsum(g, chunk_size=CHUNK_SIZE, cu_seqlens=None, chunk_indices=None):
  chunks = _Chunks(g, chunk_size, cu_seqlens, chunk_indices)
  g = jnp.maximum(chunks.split(g) * LOG2_E, LOG2_ZERO)
  return chunks.join(jnp.cumsum(g, axis=1))


def chunk_scaled_dot_kkt_fwd(
  k, g=None, beta=None, cu_seqlens=None, chunk_size=CHUNK_SIZE, output_dtype=jnp.float32,
  chunk_indices=None,
):  # fmt: skip
  chunks = _Chunks(k, chunk_size, cu_seqlens, chunk_indices)
  beta = chunks.split(beta)
  kk = _einsum("cihk,cjhk->cihj", chunks.split(k), chunks.split(k))
  A = _repeat_heads(kk, beta.shape[2]) * beta[..., None]
  i = jnp.arange(chunk_size)
  lower = (i[:, None] > i[None, :])[None, :, None, :]
  A = jnp.where(lower, A, 0)
  if g is not None:
    A = A * _decay(chunks.split(g), chunks.split(g), lower)
  return chunks.join(A).astype(output_dtype)


def solve_tril(A, cu_seqlens=None, chunk_indices=None, output_dtype=jnp.float32):
  C = A.shape[-1]
  chunks = _Chunks(A, C, cu_seqlens, chunk_indices)
  L = jnp.swapaxes(chunks.split(A), 1, 2)
  eye = jnp.broadcast_to(jnp.eye(C, dtype=L.dtype), L.shape)
  Ti = lax.linalg.triangular_solve(
    L + eye, eye, left_side=True, lower=True, unit_diagonal=True
  )
  return chunks.join(jnp.swapaxes(Ti, 1, 2)).astype(output_dtype)


def recompute_w_u_fwd(k, v, beta, A, g=None, cu_seqlens=None, chunk_indices=None):
  chunks = _Chunks(k, A.shape[-1], cu_seqlens, chunk_indices)
  Ti, b = chunks.split(A), chunks.split(beta)[..., None]
  k_scaled = _repeat_heads(chunks.split(k), v.shape[2]) * b
  if g is not None:
    k_scaled = k_scaled * jnp.exp2(chunks.split(g))[..., None]
  w = _einsum("cihj,cjhk->cihk", Ti, k_scaled)
  u = _einsum("cihj,cjhv->cihv", Ti, chunks.split(v) * b)
  return chunks.join(w).astype(k.dtype), chunks.join(u).astype(v.dtype)


def chunk_gated_delta_product_fwd_h(
  k, w, u, g=None, initial_state=None, output_final_state=False, chunk_size=CHUNK_SIZE,
  cu_seqlens=None, num_householder=1,
):  # fmt: skip
  B, R, HV, K = w.shape
  V, M, C = u.shape[-1], num_householder, chunk_size
  # All M row chunks of a token chunk in a row: the table of token chunks, times M.
  tokens = None if cu_seqlens is None else cu_seqlens // M
  chunks = _Chunks(k, C * M, cu_seqlens, _token_chunk_indices(tokens, R // M, C))
  N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
  S0 = jnp.zeros((N, HV, K, V), jnp.float32) if initial_state is None else initial_state
  S0 = S0.astype(jnp.float32)

  # [NC, M*C, ...] -> [NC per batch row, B, M, C, ...]
  def xs(x):
    x = chunks.split(x)
    x = x.reshape(B if cu_seqlens is None else 1, -1, M, C, *x.shape[2:])
    return jnp.swapaxes(x, 0, 1)

  def step(S, x):
    if cu_seqlens is not None:
      S = jnp.where(x["first"], S0[x["sequence"]][None], S)
    h, v_new = S, []
    for m in range(M):
      k, w, u, g = (x[name][:, m] for name in "kwug")
      v_m = u - _einsum("bihk,bhkv->bihv", w, S)
      g_last = g[:, -1]
      k = k * jnp.exp2(g_last[:, None] - g)[..., None]
      S = S * jnp.exp2(g_last)[..., None, None] + _einsum("bihk,bihv->bhkv", k, v_m)
      v_new.append(v_m)
    return S, (h, jnp.stack(v_new, 1), S)

  if g is None:
    g = jnp.zeros((B, R, HV), jnp.float32)
  inputs = dict(k=xs(_repeat_heads(k, HV)), w=xs(w), u=xs(u), g=chunks.hold_last(xs(g)))
  S = S0
  if cu_seqlens is not None:
    sequence, chunk = chunks.indices[:, 0], chunks.indices[:, 1]
    sequence = jnp.minimum(sequence, N - 1)
    inputs |= dict(first=chunk == 0, sequence=sequence)
    S = jnp.zeros((1, HV, K, V), jnp.float32)
  final, (h, v_new, ends) = lax.scan(step, S, inputs)

  v_new = jnp.swapaxes(v_new, 0, 1).reshape(-1, M * C, HV, V)
  h = jnp.swapaxes(h, 0, 1)
  if cu_seqlens is not None:
    # A sequence ends where its last chunk does; an empty one where it began.
    real = metadata.num_chunks(R // M, N, C)
    bounds = metadata.sequence_bounds(B, R, M, C, cu_seqlens)[:N]
    count = -(-(bounds[:, 1] - bounds[:, 0]) // (C * M))
    last = jnp.clip(bounds[:, 3] + count - 1, 0, max(ends.shape[0] - 1, 0))
    final = jnp.where((count > 0)[:, None, None, None], ends[last, 0], S0)
    used = jnp.arange(real) < bounds[-1, 3] + count[-1]
    h = jnp.where(used[None, :, None, None, None], h[:, :real], 0)
  return h.astype(k.dtype), chunks.join(v_new).astype(u.dtype), final if output_final_state else None


def chunk_gated_delta_product_fwd_o(
  q, k, v, h, g=None, scale=None, cu_seqlens=None, chunk_size=CHUNK_SIZE, num_householder=1,
  chunk_indices=None,
):  # fmt: skip
  M, C, HV = num_householder, chunk_size, v.shape[2]
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  chunks = _Chunks(q, C, cu_seqlens, chunk_indices)
  rows = lambda x: chunks.split(x.reshape(*x.shape[:1], -1, M, *x.shape[2:]))  # [NC, C, M, ...]
  q = _repeat_heads(chunks.split(q), HV)
  h = h.astype(jnp.float32).reshape(-1, *h.shape[2:])
  h = jnp.pad(h, [(0, q.shape[0] - h.shape[0])] + [(0, 0)] * 3)  # the padding's chunks
  i = jnp.arange(C)
  causal = (i[:, None] >= i[None, :])[None, :, None, :]
  decay = causal.astype(jnp.float32)
  if g is not None:
    g = chunks.split(g)
    decay = _decay(g, g, causal)
  attn = _einsum("cihk,cjmhk->cmihj", q, _repeat_heads(rows(k), HV, axis=3)) * decay[:, None]
  if g is not None:
    q = q * jnp.exp2(g)[..., None]
  o = _einsum("cihk,chkv->cihv", q, h) + _einsum("cmihj,cjmhv->cihv", attn, rows(v))
  return (scale * chunks.join(o)).astype(v.dtype)


class _Chunks:
  """Cuts a stream [B, L, ...] into chunks [NC, C, ...] in fp32, and puts them together again.

  Rows of no sequence are read as 0 whatever they hold, and written as 0.
  """

  def __init__(self, like, chunk_size, cu_seqlens=None, chunk_indices=None):
    self.batch, self.length = like.shape[:2]
    self.size, self.packed = chunk_size, cu_seqlens is not None
    if self.packed:
      if chunk_indices is None:
        chunk_indices = metadata.prepare_chunk_indices(cu_seqlens, self.length, chunk_size)
      self.indices = chunk_indices
      bounds = metadata.chunk_bounds(1, self.length, chunk_size, cu_seqlens, chunk_indices)
      rows = bounds[:, :1] + jnp.arange(chunk_size)
      self.valid = rows < bounds[:, 1:2]
      self.rows = jnp.where(self.valid, rows, self.length)  # `length` stands for nowhere
    else:
      self.count = -(-self.length // chunk_size)
      rows = jnp.arange(self.count * chunk_size).reshape(self.count, chunk_size)
      self.valid = jnp.tile(rows < self.length, (self.batch, 1))

  def split(self, x):
    x = x.astype(jnp.float32)
    if self.packed:
      return x.at[0, self.rows].get(mode="fill", fill_value=0)
    x = jnp.pad(x, [(0, 0), (0, self.count * self.size - self.length)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, self.size, *x.shape[2:])

  def join(self, x):
    if self.packed:
      out = jnp.zeros((1, self.length, *x.shape[2:]), x.dtype)
      return out.at[0, self.rows].set(x, mode="drop", unique_indices=False)
    x = x.reshape(self.batch, self.count * self.size, *x.shape[2:])
    return x[:, : self.length]

  def hold_last(self, g):
    """Carries the last valid row of [NC, B, M, C, HV] cumulative decays on over the padding."""
    n, b, m, c, _ = g.shape
    valid = jnp.swapaxes(self.valid.reshape(b, n, m, c), 0, 1)
    last = jnp.maximum(jnp.sum(valid, axis=-1) - 1, 0)
    held = jnp.take_along_axis(g, last[..., None, None], axis=3)
    return jnp.where(valid[..., None], g, held)


def _token_chunk_indices(cu_seqlens, length, chunk_size):
  if cu_seqlens is None:
    return None
  return metadata.prepare_chunk_indices(cu_seqlens, length, chunk_size)


def _decay(g_row, g_col, keep):
  """2^(g_row_i - g_col_j) [NC, C, HV, C] where `keep`, else 0; masked before the exponential."""
  difference = g_row[:, :, :, None] - jnp.swapaxes(g_col, 1, 2)[:, None]
  return jnp.where(keep, jnp.exp2(jnp.where(keep, difference, 0)), 0)


def _repeat_heads(x, HV, axis=2):
  return jnp.repeat(x, HV // x.shape[axis], axis=axis)
