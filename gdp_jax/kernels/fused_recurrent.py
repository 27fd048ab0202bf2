"""The recurrence itself, for one or a few tokens of many requests: decode."""

import jax
import jax.numpy as jnp
from jax import lax

from gdp_jax import config, inputs
from gdp_jax.kernels import pallas
from gdp_jax.l2norm import EPS


def fused_recurrent_gated_delta_product_fwd(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array | None,
  beta: jax.Array,
  scale: float,
  state: jax.Array | None = None,
  state_indices: jax.Array | None = None,
  num_householder: int = 1,
  use_qk_l2norm_in_kernel: bool = False,
  output_state: bool = True,
  output_intermediate_states: bool = False,
  *,
  implementation: str = "pallas",
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
  """Reads each request's state, takes its T tokens one by one, writes the state back.

  Args:
    q: queries [N, T, H, K].
    k: keys [N, R, H, K].
    v: values [N, R, HV, V].
    g: natural-log decay [N, T, HV], or None.
    beta: step sizes [N, R, HV].
    scale: factor of the output.
    state: with state_indices a pool [S, HV, K, V]; without, one state a request [N, HV, K, V], or
      None for zeros. The arithmetic is fp32; between two tokens the state is rounded to the pool's
      dtype, so that bits do not depend on how many tokens a call takes.
    state_indices: int32 [N], each request's slot in the pool. A slot outside [0, S) is padding:
      nothing is read or written, o is 0. No other slot may occur twice.
    num_householder: M.
    use_qk_l2norm_in_kernel: normalise q and k.
    output_state: whether to write the last state.
    output_intermediate_states: whether to return the state after each token.
    implementation: "pallas" or "interpret".

  Returns:
    o [N, T, HV, V] with v's dtype; the pool with its slots replaced, in place where it can be (a
    new fp32 array [N, HV, K, V] without a pool), or None; the states after each token
    [N, T, HV, K, V] in the pool's dtype, or None.

  Source: DeltaProduct, arXiv 2502.10297; `core.ssm.ops.gdp` of Megatron Core.
  """
  M, pooled = num_householder, state_indices is not None
  sizes = inputs.check_stage(
    M, q=(q, "N T H K"), k=(k, "N R H K"), v=(v, "N R HV V"), g=(g, "N T HV"),
    beta=(beta, "N R HV"), state=(state, "S HV K V" if pooled else "N HV K V"),
    state_indices=(state_indices, "N"),
  )  # fmt: skip
  N, T, K, HV, V = (sizes[c] for c in ("N", "T", "K", "HV", "V"))
  cfg = config.choose("fused_recurrent_gated_delta_product_fwd", K, V, jnp.float32)
  dtype = state.dtype if pooled and state is not None else jnp.float32
  state_out = None
  if output_state:
    shape = state.shape if pooled and state is not None else (N, HV, K, V)
    state_out = jax.ShapeDtypeStruct(shape, dtype)
  states = jax.ShapeDtypeStruct((N, T, HV, K, V), dtype) if output_intermediate_states else None
  return pallas.call(
    _fused_recurrent_kernel,
    q,
    k,
    v,
    g,
    beta,
    state_indices,
    state,
    grid=(N * HV * -(-V // cfg.block_v),),
    out_shape=(jax.ShapeDtypeStruct((N, T, HV, V), v.dtype), state_out, states),
    in_place={6: 1} if pooled and output_state else None,
    config=cfg,
    implementation=implementation,
    name="gdp_fused_recurrent_fwd",
    scale=scale,
    M=M,
    l2norm=use_qk_l2norm_in_kernel,
    state_dtype=dtype,
    block_k=cfg.block_k,
    block_v=cfg.block_v,
  )


def _fused_recurrent_kernel(
  q_ref,  # [N, T, H, K]
  k_ref,  # [N, R, H, K]
  v_ref,  # [N, R, HV, V]
  g_ref,  # [N, T, HV] or None
  beta_ref,  # [N, R, HV]
  indices_ref,  # [N] or None
  state_ref,  # [S or N, HV, K, V] or None
  o_ref,  # [N, T, HV, V]
  out_ref,  # [S or N, HV, K, V] or None
  states_ref,  # [N, T, HV, K, V] or None
  *,
  scale,
  M,
  l2norm,
  state_dtype,
  block_k,
  block_v,
):
  """A program owns one request of one value head, and block_v columns of its state.

  It reads the state once a token, for all keys and the query together, although each key's read
  sees what the updates before it did: with r_j = S^T k_j of the token's decayed state S,

      d_j = beta_j (v_j - r_j - sum_{i<j} (k_i . k_j) d_i);   o = S^T q + sum_j (q . k_j) d_j
  """
  T, K, HV, V = q_ref.shape[1], q_ref.shape[3], v_ref.shape[2], v_ref.shape[3]
  # Neighbours in the grid are neighbours in memory.
  v_blocks = -(-V // block_v)
  program = pallas.program_id(0)
  block, program = lax.rem(program, v_blocks), lax.div(program, v_blocks)
  hv, n = lax.rem(program, HV), lax.div(program, HV)
  head = lax.div(hv, HV // q_ref.shape[2])
  k_cols, k_exists = pallas.columns(0, K, block_k)
  v_cols, v_exists = pallas.columns(block, V, block_v)
  if indices_ref is None:
    slot, live = n, None
  else:
    slot = pallas.load_scalar(indices_ref, n)
    live = (slot >= 0) & (slot < state_ref.shape[0])
    slot = jnp.where(live, slot, 0)
  tile_exists = pallas.mask(k_exists, v_exists, live)

  def vector(ref, row, head, cols, exists, **policy):
    x = pallas.load(ref.at[n, row, head, cols], pallas.both(exists, live), **policy)
    return x.astype(jnp.float32)

  def key(ref, row, **policy):
    return vector(ref, row, head, k_cols, k_exists, **policy)

  def norm(x):
    return lax.rsqrt(jnp.sum(x * x) + EPS) if l2norm else 1.0

  def token(t, S):
    keys = [key(k_ref, t * M + j) for j in range(M)]
    values = [vector(v_ref, t * M + j, hv, v_cols, v_exists) for j in range(M)]
    beta = [pallas.load(beta_ref.at[n, t * M + j, hv], live).astype(jnp.float32) for j in range(M)]
    q = key(q_ref, t)
    if g_ref is not None:
      S *= jnp.exp(pallas.load(g_ref.at[n, t, hv], live).astype(jnp.float32))
    # The norms multiply what the sums give, so that these need not wait for them.
    k_norms, q_norm = [norm(k) for k in keys], scale * norm(q)
    reads = [c * jnp.sum(S * k[:, None], axis=0) for c, k in zip(k_norms, keys, strict=True)]
    o = q_norm * jnp.sum(S * q[:, None], axis=0)
    updates: list[jax.Array] = []
    for j, k in enumerate(keys):
      read = reads[j]
      for i, update in enumerate(updates):
        read += k_norms[i] * k_norms[j] * jnp.sum(keys[i] * k) * update
      updates.append(beta[j] * (values[j] - read))
      o += q_norm * k_norms[j] * jnp.sum(q * k) * updates[j]
    for j, update in enumerate(updates):
      # Loaded again, as kept in registers the keys would leave room for fewer programs. (With
      # another policy, or the compiler would take it for the load that it has already done.)
      k = key(k_ref, t * M + j, eviction_policy="evict_last")
      S += k[:, None] * (k_norms[j] * update)[None, :]
    pallas.store(o_ref.at[n, t, hv, v_cols], o, v_exists)
    S = S.astype(state_dtype).astype(jnp.float32)
    if states_ref is not None:
      view = states_ref.at[n, t, hv, k_cols[:, None], v_cols[None, :]]
      pallas.store(view, S, pallas.mask(k_exists, v_exists))
    return S

  view = lambda ref: ref.at[slot, hv, k_cols[:, None], v_cols[None, :]]
  if state_ref is None:
    S = jnp.zeros((block_k, block_v), jnp.float32)
  else:
    S = pallas.load(view(state_ref), tile_exists).astype(jnp.float32)
  S = token(jnp.int32(0), S) if T == 1 else lax.fori_loop(0, T, token, S)
  if out_ref is not None:
    pallas.store(view(out_ref), S, tile_exists)
