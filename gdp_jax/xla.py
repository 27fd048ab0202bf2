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
from gdp_jax.l2norm import l2_normalize
from gdp_jax.metadata import CHUNK_SIZE

LOG2_E = 1.4426950408889634
# exp2 of this is 0 in fp32. A -inf gate is clamped to it, since -inf - -inf is NaN. A multiple of
# 8, so that a sum of several loses as little as can be of the small gates beside them.
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
  lower = chunks.pairs(jnp.greater)
  A = jnp.where(lower, A, 0)
  if g is not None:
    A = A * _decay(chunks.split(g), chunks.split(g), lower)
  return chunks.join(A).astype(output_dtype)


def solve_tril(A, cu_seqlens=None, chunk_indices=None, output_dtype=jnp.float32, allow_tf32=False):
  del allow_tf32  # there is no faster solver to allow
  C = A.shape[-1]
  chunks = _Chunks(A, C, cu_seqlens, chunk_indices)
  Ti = _unit_lower_inverse(jnp.swapaxes(chunks.split(A), 1, 2))
  return chunks.join(jnp.swapaxes(Ti, 1, 2)).astype(output_dtype)


@jax.custom_jvp
def _unit_lower_inverse(A):
  """(I + A)^-1 for strictly lower triangular A [..., C, C], C a power of two.

  Inverted blocks on the diagonal are merged, two by two. A solver would be as fast, but on a CPU
  its threads and those of JAX wait for each other, and on a busy machine that takes ten times as
  long.
  """
  *lead, C, _ = A.shape
  A = lax.optimization_barrier(A)  # or else what makes A is fused into each merge, and done again
  Ti = jnp.ones((*lead, C, 1, 1), A.dtype)
  for n in (2**i for i in range(C.bit_length() - 1)):
    pairs = jnp.moveaxis(A.reshape(*lead, C // (2 * n), 2 * n, C // (2 * n), 2 * n), -2, -4)
    below = jnp.moveaxis(jnp.diagonal(pairs, 0, -4, -3), -1, -3)[..., n:, :n]
    upper, lower = Ti[..., 0::2, :, :], Ti[..., 1::2, :, :]
    corner = -_einsum("...ij,...jk,...kl->...il", lower, below, upper)
    Ti = jnp.block([[upper, jnp.zeros_like(upper)], [corner, lower]])
  return Ti[..., 0, :, :]


@_unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
  # Three products, where the derivative of the merges would be dozens.
  Ti, dA = _unit_lower_inverse(*primals), jnp.tril(tangents[0], -1)
  return Ti, -_einsum("...ij,...jk,...kl->...il", Ti, dA, Ti)


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
  def v_new(x, S):
    return x["u"] - _einsum("bihk,bhkv->bihv", x["w"], S)

  return _sweep(
    v_new, k, dict(w=w, u=u), u, g, initial_state, output_final_state, chunk_size, cu_seqlens,
    num_householder,
  )  # fmt: skip


def chunk_gated_delta_product_fwd_wy_h(
  k, v, beta, A, g=None, initial_state=None, output_final_state=False, cu_seqlens=None,
  num_householder=1,
):  # fmt: skip
  def v_new(x, S):
    kS = _einsum("bihk,bhkv->bihv", x["k"], S) * jnp.exp2(x["g"])[..., None]
    return _einsum("bihj,bjhv->bihv", x["A"], x["beta"][..., None] * (x["v"] - kS))

  return _sweep(
    v_new, k, dict(v=v, beta=beta, A=A), v, g, initial_state, output_final_state,
    A.shape[-1], cu_seqlens, num_householder,
  )  # fmt: skip


def chunk_gated_delta_product_effects(k, v, beta, A, g=None, cu_seqlens=None, num_householder=1):
  (B, _, HV, V), K = v.shape, k.shape[-1]
  N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
  nothing = jnp.concatenate([jnp.zeros((K, V)), jnp.eye(K)], axis=1)
  return chunk_gated_delta_product_fwd_wy_h(
    k, jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, K))), beta, A, g,
    jnp.broadcast_to(nothing, (N, HV, K, V + K)), True, cu_seqlens, num_householder,
  )[2]  # fmt: skip


def _sweep(v_new, k, arrays, like, g, initial_state, output_final_state, C, cu_seqlens, M):
  """The states over the row chunks of each sequence, returned at the start of each token chunk.

  `v_new(x, S)` is a row chunk's v_new from its arrays x.
  """
  B, R, HV, V = like.shape
  K = k.shape[-1]
  chunks, xs = _token_chunks(k, C, cu_seqlens, M)
  N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
  S0 = jnp.zeros((N, HV, K, V), jnp.float32) if initial_state is None else initial_state
  S0 = S0.astype(jnp.float32)
  inputs = {name: xs(x) for name, x in arrays.items()}
  inputs["k"] = xs(_repeat_heads(k, HV))
  inputs["g"] = chunks.hold_last(xs(jnp.zeros((B, R, HV)) if g is None else g))

  def step(S, x):
    x, where = x
    if cu_seqlens is not None:
      S = jnp.where(where["first"], S0[where["sequence"]][None], S)
    h, out = S, []
    for m in range(M):
      x_m = {name: a[:, m] for name, a in x.items()}
      out.append(v_new(x_m, S))
      S = _next_state(S, x_m["k"], out[-1], x_m["g"])
    return S, (h[:, None], jnp.stack(out, 1), S)

  where = chunks.sequences(N)
  S = S0 if cu_seqlens is None else jnp.zeros((1, HV, K, V), jnp.float32)
  final, (h, v_new, ends) = lax.scan(step, S, (inputs, where))

  if cu_seqlens is not None:
    # A sequence ends where its last chunk does; an empty one where it began.
    _, last, count = _sequence_ends(cu_seqlens, R, M, C)
    final = jnp.where((count > 0)[:, None, None, None], ends[last, 0], S0)
  h = _used_states(h, cu_seqlens, R, M, C).astype(k.dtype)
  v_new = chunks.join(_rows(v_new)).astype(like.dtype)
  return h, v_new, final if output_final_state else None


def _next_state(S, k, v_new, g):
  """2^G_last S + sum_i 2^(G_last - G_i) k_i v_new_i^T, of a row chunk."""
  g_last = g[:, -1:]
  k = k * jnp.exp2(g_last - g)[..., None]
  return S * jnp.exp2(g_last[:, 0])[..., None, None] + _einsum("bihk,bihv->bhkv", k, v_new)


def chunk_gated_delta_product_states(
  k, v_new, h, g=None, chunk_size=CHUNK_SIZE, cu_seqlens=None, num_householder=1
):
  B, R, HV, _ = v_new.shape
  M, NC = num_householder, h.shape[1]
  chunks, xs = _token_chunks(k, chunk_size, cu_seqlens, M)
  G = chunks.hold_last(xs(jnp.zeros((B, R, HV)) if g is None else g))
  k_rows, v_new = xs(_repeat_heads(k, HV)), xs(v_new)
  states = [jnp.swapaxes(h, 0, 1).astype(jnp.float32)]
  for m in range(M - 1):
    x = (a[:NC, :, m] for a in (k_rows, v_new, G))  # what lies behind is the padding's
    states.append(jax.vmap(_next_state)(states[-1], *x))
  rows = jnp.swapaxes(jnp.stack(states, 2), 0, 1)
  return rows.reshape(B, NC * M, *h.shape[2:]).astype(k.dtype)


def chunk_gated_delta_product_fwd_o(
  q, k, v, h, g=None, scale=None, cu_seqlens=None, chunk_size=CHUNK_SIZE, num_householder=1,
  chunk_indices=None,
):  # fmt: skip
  M, C, HV = num_householder, chunk_size, v.shape[2]
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  chunks = _Chunks(q, C, cu_seqlens, chunk_indices)
  rows = lambda x: chunks.split(x.reshape(*x.shape[:1], -1, M, *x.shape[2:]))  # [NC, C, M, ...]
  q = _repeat_heads(chunks.split(q), HV)
  h = _states(h, q.shape[0])
  causal = chunks.pairs(jnp.greater_equal)
  decay = causal.astype(jnp.float32)
  if g is not None:
    g = chunks.split(g)
    decay = _decay(g, g, causal)
  attn = _einsum("cihk,cjmhk->cmihj", q, _repeat_heads(rows(k), HV, axis=3)) * decay[:, None]
  if g is not None:
    q = q * jnp.exp2(g)[..., None]
  o = _einsum("cihk,chkv->cihv", q, h) + _einsum("cmihj,cjmhv->cihv", attn, rows(v))
  return (scale * chunks.join(o)).astype(v.dtype)


def chunk_gated_delta_product_bwd_o(
  q, k, v, h, do, g=None, scale=None, cu_seqlens=None, chunk_size=CHUNK_SIZE, num_householder=1,
  chunk_indices=None,
):  # fmt: skip
  B, T = q.shape[:2]
  M, C, HV = num_householder, chunk_size, v.shape[2]
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  chunks = _Chunks(q, C, cu_seqlens, chunk_indices)
  rows = lambda x: chunks.split(x.reshape(B, T, M, *x.shape[2:]))  # [NC, C, M, ...]
  q, do = _repeat_heads(chunks.split(q), HV), chunks.split(do)
  k_rows, v_rows = _repeat_heads(rows(k), HV, axis=3), rows(v)
  h = _states(h, q.shape[0])

  causal = chunks.pairs(jnp.greater_equal)
  E = scale * causal.astype(jnp.float32)
  into = jnp.full(q.shape[:3], scale)  # the factor of what the state adds
  if g is not None:
    g_chunks = chunks.split(g)
    E, into = scale * _decay(g_chunks, g_chunks, causal), scale * jnp.exp2(g_chunks)
  P = _einsum("cihk,cjmhk->cmihj", q, k_rows) * E[:, None]
  dP = _einsum("cihv,cjmhv->cmihj", do, v_rows)
  dv = _einsum("cmihj,cihv->cjmhv", P, do)
  dk = _einsum("cmihj,cihk->cjmhk", dP * E[:, None], q)
  dq_state = into[..., None] * _einsum("cihv,chkv->cihk", do, h)
  dq = dq_state + _einsum("cmihj,cjmhk->cihk", dP * E[:, None], k_rows)

  join_rows = lambda x, like: chunks.join(x).reshape(B, T * M, *x.shape[3:]).astype(like.dtype)
  dg = None
  if g is not None:
    # A pair of one token has no decay between it: left out, not subtracted from itself.
    X = jnp.where(chunks.pairs(jnp.greater)[:, None], P * dP, 0)
    dG = jnp.sum(X, (1, 4)) - jnp.swapaxes(jnp.sum(X, (1, 2)), 1, 2) + jnp.sum(q * dq_state, -1)
    dg = chunks.join(jnp.cumsum(dG[:, ::-1], axis=1)[:, ::-1])
  return chunks.join(dq).astype(k.dtype), join_rows(dk, k), join_rows(dv, v), dg


def chunk_gated_delta_product_bwd_h(
  q, k, beta, A, do, dv, g=None, g_tokens=None, scale=None, dfinal_state=None,
  output_dinitial_state=True, cu_seqlens=None, num_householder=1,
):  # fmt: skip
  B, R, HV, V = dv.shape
  K, M, C = k.shape[-1], num_householder, A.shape[-1]
  scale = K**-0.5 if scale is None else scale
  chunks, xs = _token_chunks(k, C, cu_seqlens, M)
  N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
  dfinal = jnp.zeros((N, HV, K, V)) if dfinal_state is None else dfinal_state
  inputs = dict(k=xs(_repeat_heads(k, HV)), beta=xs(beta), A=xs(A), dv=xs(dv))
  inputs["g"] = chunks.hold_last(xs(jnp.zeros((B, R, HV)) if g is None else g))

  def token_xs(x):  # [chunk, B, C, ...]; the token stream has the row stream's chunks
    x = _Chunks(x, C, None if cu_seqlens is None else cu_seqlens // M).split(x)
    return jnp.swapaxes(x.reshape(B, -1, C, *x.shape[2:]), 0, 1)

  into = scale if g_tokens is None else scale * jnp.exp2(token_xs(g_tokens))[..., None]
  tokens = dict(q=into * token_xs(_repeat_heads(q, HV)), do=token_xs(do))

  def step(dS, x):
    x, token, where = x
    if cu_seqlens is not None:
      dS = jnp.where(where["last"], dfinal[where["sequence"]][None], dS)
    states, out = [], []
    for m in reversed(range(M)):
      k, beta, A, dv, g = (x[name][:, m] for name in ("k", "beta", "A", "dv", "g"))
      states.append(dS)
      g_last = g[:, -1]
      to_end = jnp.exp2(g_last[:, None] - g)[..., None]
      dv = dv + to_end * _einsum("bihk,bhkv->bihv", k, dS)
      dres = _einsum("bihj,bihv->bjhv", A, dv)
      k = k * (beta * jnp.exp2(g))[..., None]
      dS = dS * jnp.exp2(g_last)[..., None, None] - _einsum("bihk,bihv->bhkv", k, dres)
      out.append(dres)
    dS = dS + _einsum("bihk,bihv->bhkv", token["q"], token["do"])
    return dS, (jnp.stack(states[::-1], 1), jnp.stack(out[::-1], 1), dS)

  where = chunks.sequences(N)
  dS = dfinal if cu_seqlens is None else jnp.zeros((1, HV, K, V))
  if cu_seqlens is not None:
    first, last, count = _sequence_ends(cu_seqlens, R, M, C)
    # Not by the chunk's number in its sequence: the padding's chunks follow the last sequence.
    is_last = jnp.zeros(chunks.indices.shape[0], bool).at[last].max(count > 0)
    where["last"] = is_last
  dinitial, (dh, dres, starts) = lax.scan(step, dS, (inputs, tokens, where), reverse=True)
  if cu_seqlens is not None:
    dinitial = jnp.where((count > 0)[:, None, None, None], starts[first, 0], dfinal)
  dh = _used_states(dh, cu_seqlens, R, M, C).astype(k.dtype)
  dres = chunks.join(_rows(dres)).astype(dv.dtype)
  return dh, dres, dinitial if output_dinitial_state else None


def chunk_gated_delta_product_bwd_wy(
  k, v, beta, states, v_new, dh, dres, dk, g=None, cu_seqlens=None, chunk_size=CHUNK_SIZE,
  num_householder=1,
):  # fmt: skip
  M, C = num_householder, chunk_size
  B, R, HV, _ = v.shape
  chunks, _ = _token_chunks(k, C, cu_seqlens, M)

  def split(x):  # [NC * M, C, ...]
    x = chunks.split(x)
    return x.reshape(-1, C, *x.shape[2:])

  def join(x):
    return chunks.join(x.reshape(-1, M * C, *x.shape[2:]))

  valid = chunks.valid.reshape(-1, C)
  i = jnp.arange(C)
  lower = (valid[:, :, None] & (i[:, None] > i))[:, :, None, :]
  S, dS = (_states(x, valid.shape[0]) for x in (states, dh))
  k_c, v_c, beta_c, v_new = _repeat_heads(split(k), HV), split(v), split(beta), split(v_new)
  dres = split(dres)
  G = jnp.zeros((valid.shape[0], C, HV)) if g is None else split(g)
  last = jnp.maximum(jnp.sum(valid, axis=1) - 1, 0)
  G_last = jnp.take_along_axis(G, last[:, None, None], axis=1)
  to_end = jnp.where(valid[..., None], jnp.exp2(G_last - jnp.where(valid[..., None], G, G_last)), 0)
  from_start = jnp.exp2(G)

  via_dS = _einsum("cihv,chkv->cihk", v_new, dS)
  via_S = _einsum("cihv,chkv->cihk", dres, S)
  kk = _einsum("cihk,cjhk->cihj", k_c, k_c)
  W = -_einsum("cihv,cjhv->cihj", dres, v_new) * _decay(G, G, lower)
  z = from_start * jnp.sum(k_c * via_S, -1)
  dbeta = jnp.sum(dres * v_c, -1) - z + jnp.sum(W * kk, -1)
  W = beta_c[..., None] * W
  dk = split(dk) + to_end[..., None] * via_dS - (beta_c * from_start)[..., None] * via_S
  dk = dk + _einsum("cihj,cjhk->cihk", W, k_c) + _einsum("cihj,cihk->cjhk", W, k_c)
  dg = None
  if g is not None:
    # Rows of one token have no decay between them: such pairs are left out of the sums, in which
    # they would only cancel.
    row = (jnp.arange(valid.shape[0])[:, None] % M) * C + i
    token = row // M
    other = token[:, :, None] != token[:, None, :]
    Z = jnp.where(other[:, :, None, :], W * kk, 0)
    last_token = jnp.take_along_axis(token, last[:, None], axis=1)
    y = jnp.where((token != last_token)[..., None], to_end * jnp.sum(k_c * via_dS, -1), 0)
    dG = jnp.sum(Z, 3) - jnp.swapaxes(jnp.sum(Z, 1), 1, 2) - beta_c * z - y
    end = jnp.sum(y, 1) + jnp.exp2(G_last[:, 0]) * jnp.sum(S * dS, (2, 3))
    dg = join(jnp.cumsum(dG[:, ::-1], axis=1)[:, ::-1] + end[:, None])
  dv = join(beta_c[..., None] * dres)
  return join(dk).astype(k.dtype), dv.astype(v.dtype), join(dbeta), dg


def _states(x, count):
  """States [B, chunk, ...] as [count, ...] in fp32, with zeros for the chunks of the padding."""
  x = x.astype(jnp.float32).reshape(-1, *x.shape[2:])
  return jnp.pad(x, [(0, count - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def fused_recurrent_gated_delta_product_fwd(
  q, k, v, g, beta, scale, state=None, state_indices=None, num_householder=1,
  use_qk_l2norm_in_kernel=False, output_state=True, output_intermediate_states=False,
):  # fmt: skip
  N, T = q.shape[:2]
  M, (HV, V), K = num_householder, v.shape[2:], q.shape[-1]
  dtype = jnp.float32 if state is None or state_indices is None else state.dtype
  live = jnp.ones((N,), bool)
  if state is None:
    S = jnp.zeros((N, HV, K, V), jnp.float32)
  elif state_indices is None:
    S = state.astype(jnp.float32)
  else:
    live, slots = metadata.pool_slots(state_indices, state.shape[0])
    S = state.at[slots].get(mode="fill", fill_value=0).astype(jnp.float32)

  def per_token(x, heads=None):  # [T, N, M, ...] in fp32, zeros for padding
    x = jnp.where(live.reshape(N, *[1] * (x.ndim - 1)), x, 0).astype(jnp.float32)
    if heads:
      x = l2_normalize(x) if use_qk_l2norm_in_kernel else x
      x = _repeat_heads(x, heads)
    return jnp.swapaxes(x.reshape(N, T, x.shape[1] // T, *x.shape[2:]), 0, 1)

  xs = dict(q=per_token(q, HV), k=per_token(k, HV), v=per_token(v), beta=per_token(beta))
  if g is not None:
    xs["g"] = per_token(g)

  def token(S, x):
    if g is not None:
      S = S * jnp.exp(x["g"][:, 0])[..., None, None]
    for j in range(M):
      k, v, beta = x["k"][:, j], x["v"][:, j], x["beta"][:, j]
      error = beta[..., None] * (v - _einsum("nhkv,nhk->nhv", S, k))
      S = S + k[..., :, None] * error[..., None, :]
    o = scale * _einsum("nhkv,nhk->nhv", S, x["q"][:, 0])
    rounded = S.astype(dtype)
    return rounded.astype(jnp.float32), (o, rounded if output_intermediate_states else None)

  S, (o, states) = lax.scan(token, S, xs)
  o = jnp.swapaxes(o, 0, 1).astype(v.dtype)
  if output_intermediate_states:
    states = jnp.swapaxes(states, 0, 1)
  if not output_state:
    return o, None, states
  if state is not None and state_indices is not None:
    S = state.at[slots].set(S.astype(dtype), mode="drop")
  return o, S, states


def prepare_fwd(x, A_log, dt_bias, sizes, allow_neg_eigval=False):
  ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
  q, k, v, b, *a = jnp.split(x, ends, axis=-1)
  g = None if A_log is None else log_decay(a[0], A_log, 0.0 if dt_bias is None else dt_bias)
  return q, k, v, step_size(b, allow_neg_eigval), g


def step_size(b, allow_neg_eigval):
  """beta, in fp32."""
  beta = lax.logistic(b.astype(jnp.float32))
  return 2 * beta if allow_neg_eigval else beta


def log_decay(a, A_log, dt_bias):
  """g = -exp(A_log) softplus(a + dt_bias) in fp32, finite everywhere."""
  z = a.astype(jnp.float32) + jnp.asarray(dt_bias, jnp.float32)
  # One exponential of the sum of logs: exp(A_log) and softplus(z) may overflow and underflow where
  # their product does neither. Far below 0, log softplus(z) is z; far above, softplus(z) is z.
  # Selected, not clamped: a clamp has half a gradient where it begins.
  middle = jnp.where(jnp.abs(z) > 15.0, 0.0, z)
  softplus = jnp.where(z > 15.0, z, jnp.log1p(jnp.exp(middle)))
  log_softplus = jnp.where(z < -15.0, z, jnp.log(softplus))
  return -jnp.exp(jnp.minimum(A_log.astype(jnp.float32) + log_softplus, 80.0))


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

  def pairs(self, compare):
    """Which pairs (i, j) of a chunk's rows have i valid and compare(i, j): bool [NC, C, 1, C]."""
    i = jnp.arange(self.size)
    # Only valid i: a row past the end has no decay, and its difference to others no sign.
    return (self.valid[:, :, None] & compare(i[:, None], i))[:, :, None, :]

  def split(self, x):
    x = x.astype(jnp.float32)
    if self.packed:
      return x.at[0, self.rows].get(mode="fill", fill_value=0)
    x = jnp.pad(x, [(0, 0), (0, self.count * self.size - self.length)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, self.size, *x.shape[2:])

  def join(self, x):
    if self.packed:
      out = jnp.zeros((1, self.length, *x.shape[2:]), x.dtype)
      return out.at[0, self.rows].set(x, mode="drop")
    x = x.reshape(self.batch, self.count * self.size, *x.shape[2:])
    return x[:, : self.length]

  def sequences(self, N):
    """Of each chunk of a packed stream: its sequence, and whether it is the sequence's first."""
    if not self.packed:
      return None
    sequence, chunk = self.indices[:, 0], self.indices[:, 1]
    return dict(sequence=jnp.minimum(sequence, N - 1), first=chunk == 0)

  def hold_last(self, g):
    """Carries the last valid row of [NC, B, M, C, HV] cumulative decays on over the padding."""
    n, b, m, c, _ = g.shape
    valid = jnp.swapaxes(self.valid.reshape(b, n, m, c), 0, 1)
    last = jnp.maximum(jnp.sum(valid, axis=-1) - 1, 0)
    held = jnp.take_along_axis(g, last[..., None, None], axis=3)
    return jnp.where(valid[..., None], g, held)


def _token_chunks(k, C, cu_seqlens, M):
  """The row stream [B, R, ...] cut by token chunks, and a function to [chunk, B, M, C, ...]."""
  indices = None
  if cu_seqlens is not None:
    indices = metadata.prepare_chunk_indices(cu_seqlens // M, k.shape[1] // M, C)
  chunks = _Chunks(k, C * M, cu_seqlens, indices)
  B = k.shape[0]

  def xs(x):
    x = chunks.split(x)
    return jnp.swapaxes(x.reshape(B, -1, M, C, *x.shape[2:]), 0, 1)

  return chunks, xs


def _rows(x):
  """[chunk, B, M, C, ...] -> [B * chunk, M * C, ...], what `_Chunks.join` takes."""
  x = jnp.swapaxes(x, 0, 1)
  return x.reshape(-1, x.shape[2] * x.shape[3], *x.shape[4:])


def _sequence_ends(cu_seqlens, R, M, C):
  """First and last token chunk of each packed sequence, and how many it has."""
  bounds = metadata.sequence_bounds(1, R, M, C, cu_seqlens)[:-1]
  count = -(-(bounds[:, 1] - bounds[:, 0]) // (C * M))
  first = bounds[:, 3]
  most = max(metadata.num_chunks(R // M, cu_seqlens.shape[0], C) - 1, 0)
  return jnp.clip(first, 0, most), jnp.clip(first + count - 1, 0, most), count


def _used_states(h, cu_seqlens, R, M, C):
  """[chunk, B, stride, ...] -> [B, chunk * stride, ...] without the padding's chunks; unused 0."""
  h = jnp.swapaxes(h, 0, 1)
  if cu_seqlens is not None:
    _, _, count = _sequence_ends(cu_seqlens, R, M, C)
    h = h[:, : metadata.num_chunks(R // M, cu_seqlens.shape[0] - 1, C)]
    used = jnp.arange(h.shape[1]) < jnp.sum(count)
    h = jnp.where(used.reshape(1, -1, *[1] * (h.ndim - 2)), h, 0)
  return h.reshape(h.shape[0], -1, *h.shape[3:])


def _decay(g_row, g_col, keep):
  """2^(g_row_i - g_col_j) [NC, C, HV, C] where `keep`, else 0; masked before the exponential."""
  difference = g_row[:, :, :, None] - jnp.swapaxes(g_col, 1, 2)[:, None]
  return jnp.where(keep, jnp.exp2(jnp.where(keep, difference, 0)), 0)


def _repeat_heads(x, HV, axis=2):
  return jnp.repeat(x, HV // x.shape[axis], axis=axis)
