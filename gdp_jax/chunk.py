"""The gated delta product in chunks: check, describe the chunks, run the stages.

B batch, T tokens, M Householder copies, R = T*M rows, H query/key heads, HV value heads, K and V
head dims, N sequences.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdp_jax import inputs, kernels, metadata, xla
from gdp_jax.l2norm import l2_normalize


def chunk_gated_delta_product(
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
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """The gated delta product of a sequence, or of several packed into one, computed in chunks.

  Per head, with a state S [K, V] and r = t*M + j:

      S <- exp(g_t) S
      for j in 0..M-1:   S <- S + beta_r k_r (v_r - S^T k_r)^T
      o_t = scale * S^T q_t

  Value head i reads query/key head i // (HV // H). Everything runs under `jax.jit` with
  `cu_seqlens` traced: sizes depend on shapes alone.

  Args:
    q: queries [B, T, H, K]; bfloat16, float16 or float32.
    k: keys [B, T*M, H, K], q's dtype. Row t*M + j is token t's j-th update. Keys are expected to
      have unit length: see use_qk_l2norm_in_kernel.
    v: values [B, T*M, HV, V], q's dtype; HV is a multiple of H.
    g: natural-log decay [B, T, HV], at most 0, any float dtype; -inf is a reset. None: no decay.
    beta: step sizes in [0, 2], [B, T*M, HV], any float dtype.
    num_householder: M.
    scale: factor of the output; default K**-0.5.
    initial_state: [N, HV, K, V], any float dtype; default zeros. N is B, or the number of packed
      sequences.
    output_final_state: whether to return the final state.
    use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum(x^2) + 1e-6), in fp32.
    cu_seqlens: offsets of packed sequences in tokens, [N+1], int32 or int64; needs B = 1. Starts
      at 0, never decreases, ends at or below T. Equal neighbours are empty sequences; outputs
      behind the last offset are 0. A list, tuple or NumPy array is checked; an array on the device
      is not read back, and a bad one gives wrong numbers, never an access out of bounds.
    implementation: "pallas" (CUDA GPUs), "xla" (any device), "interpret" (the Pallas kernels run
      without a GPU, slowly, for tests), or None: Pallas where the code is lowered for CUDA and
      K <= 256, else XLA.

  Returns:
    o [B, T, HV, V] with v's dtype, and the final state [N, HV, K, V] in fp32, or None.

  Raises:
    TypeError, ValueError: naming the argument, what was expected and what was given.
    NotImplementedError: implementation="pallas" with K > 256.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from gdp_jax import chunk_gated_delta_product
    >>> B, T, M, H, K, V = 1, 100, 2, 2, 16, 32
    >>> kq, kk, kv = jax.random.split(jax.random.key(0), 3)
    >>> q = jax.random.normal(kq, (B, T, H, K))
    >>> k = jax.random.normal(kk, (B, T * M, H, K))
    >>> v = jax.random.normal(kv, (B, T * M, H, V))
    >>> g, beta = jnp.full((B, T, H), -0.1), jnp.full((B, T * M, H), 0.5)
    >>> o, state = chunk_gated_delta_product(
    ...     q, k, v, g, beta, M, use_qk_l2norm_in_kernel=True, output_final_state=True)
    >>> o.shape, state.shape
    ((1, 100, 2, 32), (1, 2, 16, 32))

  Source: DeltaProduct, arXiv 2502.10297; Gated Delta Networks, arXiv 2412.06464; the WY form,
  arXiv 2406.06484.
  """
  inputs.check_implementation(implementation, q.shape[-1] if np.ndim(q) else 0)
  cu_seqlens = inputs.check_arguments(
    q, k, v, g, beta, num_householder, scale, initial_state, cu_seqlens
  )
  return _chunk(
    q, k, v, g, beta, initial_state, cu_seqlens,
    num_householder=int(num_householder),
    scale=inputs.default_scale(scale, q.shape[-1]),
    output_final_state=bool(output_final_state),
    use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
    implementation=implementation,
  )  # fmt: skip


@partial(
  jax.jit,
  static_argnames=(
    "num_householder", "scale", "output_final_state", "use_qk_l2norm_in_kernel", "implementation",
  ),
)  # fmt: skip
def _chunk(
  q, k, v, g, beta, initial_state, cu_seqlens,
  *, num_householder, scale, output_final_state, use_qk_l2norm_in_kernel, implementation,
):  # fmt: skip
  if use_qk_l2norm_in_kernel:
    q, k = l2_normalize(q), l2_normalize(k)
  dtype = v.dtype
  if dtype == jnp.float16:
    # The state and what is read from it may exceed fp16's range where the output does not.
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  args = (q, k, v, g, beta, initial_state, cu_seqlens)
  run = partial(_forward, num_householder=num_householder, scale=scale)
  if 0 in v.shape:
    o, final_state = _nothing(*args)
  elif implementation == "xla" or (implementation is None and q.shape[-1] > 256):
    o, final_state = run(xla, *args)
  elif implementation is None:
    o, final_state = lax.platform_dependent(
      *args, cuda=partial(run, _pallas_stages("pallas")), default=partial(run, xla)
    )
  else:
    o, final_state = run(_pallas_stages(implementation), *args)
  return o.astype(dtype), final_state if output_final_state else None


def _pallas_stages(implementation):
  stages = {name: getattr(kernels, name) for name in kernels.__all__}
  return SimpleNamespace(**{n: partial(f, implementation=implementation) for n, f in stages.items()})


def _forward(stages, q, k, v, g, beta, initial_state, cu_seqlens, *, num_householder, scale):
  """The operator as its list of stages: `gdp_jax.xla`, or the kernels."""
  M = num_householder
  tokens = cu_seqlens
  rows = token_chunks = row_chunks = None
  if cu_seqlens is not None:
    tokens = metadata.sanitize_cu_seqlens(cu_seqlens, q.shape[1])
    rows = tokens * M
    token_chunks = metadata.prepare_chunk_indices(tokens, q.shape[1])
    row_chunks = metadata.prepare_chunk_indices(rows, k.shape[1])
  beta = beta.astype(jnp.float32)
  g_tokens = g_rows = None
  if g is not None:
    g_tokens = stages.chunk_local_cumsum(
      g, cu_seqlens=tokens, chunk_indices=token_chunks
    )
    g_rows = stages.chunk_local_cumsum(
      _on_first_rows(g, M), cu_seqlens=rows, chunk_indices=row_chunks
    )

  A = stages.chunk_scaled_dot_kkt_fwd(
    k, g_rows, beta, cu_seqlens=rows, chunk_indices=row_chunks
  )
  Ti = stages.solve_tril(A, cu_seqlens=rows, chunk_indices=row_chunks, output_dtype=k.dtype)
  w, u = stages.recompute_w_u_fwd(
    k, v, beta, Ti, g_rows, cu_seqlens=rows, chunk_indices=row_chunks
  )
  h, v_new, final_state = stages.chunk_gated_delta_product_fwd_h(
    k, w, u, g_rows, initial_state, output_final_state=True, cu_seqlens=rows, num_householder=M
  )
  o = stages.chunk_gated_delta_product_fwd_o(
    q, k, v_new, h, g_tokens, scale,
    cu_seqlens=tokens, num_householder=M, chunk_indices=token_chunks,
  )  # fmt: skip
  return o, final_state


def _on_first_rows(g, M):
  """[B, T, HV] on the row stream: a token's decay belongs to its first row."""
  B, T, HV = g.shape
  rows = jnp.zeros((B, T, M, HV), g.dtype).at[:, :, 0].set(g)
  return rows.reshape(B, T * M, HV)


def _nothing(q, k, v, g, beta, initial_state, cu_seqlens):
  """No tokens, or no sequences: the state stays as it was."""
  B, T = q.shape[:2]
  HV, V = v.shape[2:]
  N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
  if initial_state is None:
    initial_state = jnp.zeros((N, HV, q.shape[-1], V), jnp.float32)
  return jnp.zeros((B, T, HV, V), v.dtype), initial_state.astype(jnp.float32)
