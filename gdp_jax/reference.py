"""The recurrence itself, token by token: the specification that every other file is tested against.

B batch, T tokens, M Householder copies, H query/key heads, HV value heads, K and V head dims,
N sequences.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdp_jax import inputs, metadata
from gdp_jax.l2norm import l2_normalize, wide_dtype


def recurrent_gated_delta_product(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array | None,
  beta: jax.Array,
  num_householder: int = 1,
  *,
  scale: float | None = None,
  initial_state: jax.Array | None = None,
  output_final_state: bool = False,
  use_qk_l2norm_in_kernel: bool = False,
  cu_seqlens: jax.Array | np.ndarray | list[int] | tuple[int, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Gated delta product by `lax.scan` over tokens, in fp32: slow, differentiable, the oracle.

  Per head, with a state S [K, V] and r = t*M + j:

      S <- exp(g_t) S
      for j in 0..M-1:   S <- S + beta_r k_r (v_r - S^T k_r)^T
      o_t = scale * S^T q_t

  Arguments, results and errors are those of `gdp_jax.chunk_gated_delta_product`, without
  `implementation`; the arithmetic is fp32. Float64 arrays (under `jax_enable_x64`) are also taken
  and computed in float64.

  Returns:
    o [B, T, HV, V] with v's dtype, and the final state [N, HV, K, V] in fp32 (float64 for float64
    arrays), or None.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from gdp_jax import recurrent_gated_delta_product
    >>> q, k, v = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 2, 16))
    >>> o, _ = recurrent_gated_delta_product(q, k, v, None, jnp.full((1, 4, 2), 0.1))
    >>> o.shape
    (1, 4, 2, 16)

  Source: DeltaProduct, arXiv 2502.10297; Gated Delta Networks, arXiv 2412.06464.
  """
  cu_seqlens = inputs.check_arguments(
    q, k, v, g, beta, num_householder, scale, initial_state, cu_seqlens, allow_float64=True
  )
  return _recurrence(
    q, k, v, g, beta, initial_state, cu_seqlens,
    num_householder=num_householder,
    scale=inputs.default_scale(scale, q.shape[-1]),
    output_final_state=output_final_state,
    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
  )  # fmt: skip


@partial(
  jax.jit,
  static_argnames=("num_householder", "scale", "output_final_state", "use_qk_l2norm_in_kernel"),
)
def _recurrence(
  q, k, v, g, beta, initial_state, cu_seqlens,
  *, num_householder, scale, output_final_state, use_qk_l2norm_in_kernel,
):  # fmt: skip
  B, T, H, K = q.shape
  HV, V = v.shape[2:]
  M = num_householder
  N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
  dtype = wide_dtype(q.dtype)

  if g is None:
    g = jnp.zeros((B, T, HV), dtype)
  if initial_state is None:
    initial_state = jnp.zeros((N, HV, K, V), dtype)

  # One token's inputs side by side: the M rows of token t, and query/key heads repeated for the
  # value heads that read them.
  group = HV // H
  xs = dict(
    q=jnp.repeat(q.astype(dtype), group, axis=2),
    k=jnp.repeat(k.astype(dtype), group, axis=2).reshape(B, T, M, HV, K),
    v=v.astype(dtype).reshape(B, T, M, HV, V),
    g=g.astype(dtype),
    beta=beta.astype(dtype).reshape(B, T, M, HV),
  )

  def token(S, x):
    if use_qk_l2norm_in_kernel:
      x = x | dict(q=l2_normalize(x["q"]), k=l2_normalize(x["k"]))
    S = jnp.exp(x["g"])[:, None, None] * S
    for j in range(M):
      k, v, beta = x["k"][j], x["v"][j], x["beta"][j]
      read = jnp.einsum("hkv,hk->hv", S, k, precision="highest")
      S = S + jnp.einsum("hk,hv->hkv", beta[:, None] * k, v - read, precision="highest")
    return S, scale * jnp.einsum("hkv,hk->hv", S, x["q"], precision="highest")

  S0 = initial_state.astype(dtype)
  if cu_seqlens is None:
    final_state, o = jax.vmap(partial(lax.scan, token))(S0, xs)
  else:
    # Every token reads and writes the state of the sequence that it belongs to. Padding, past the
    # last offset, is replaced by zeros before anything is computed from it.
    offsets = metadata.sanitize_cu_seqlens(cu_seqlens, T)
    t = jnp.arange(T)
    valid = t < offsets[-1]
    xs = jax.tree.map(lambda x: jnp.where(_like(valid, x[0]), x[0], 0), xs)
    xs["sequence"] = metadata.sequence_of(t, offsets)
    xs["valid"] = valid

    def packed_token(states, x):
      S, o = token(states[x["sequence"]], x)
      S = jnp.where(x["valid"], S, states[x["sequence"]])
      return states.at[x["sequence"]].set(S), o

    final_state, o = lax.scan(packed_token, S0, xs)
    o = jnp.where(_like(valid, o), o, 0)[None]

  return o.astype(v.dtype), final_state if output_final_state else None


def _like(mask, x):
  return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
