"""Decode: one or a few tokens a request, over a pool of states.

N requests, S slots, T tokens, M Householder copies, H query/key heads, HV value heads, K and V head
dims.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from gdp_jax import inputs, kernels, metadata, xla
from gdp_jax.kernels.pallas import dispatch


def fused_recurrent_gated_delta_product(
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
  state: jax.Array | None = None,
  state_indices: jax.Array | np.ndarray | None = None,
  output_intermediate_states: bool = False,
  update_state: bool = True,
  implementation: str | None = None,
) -> tuple[jax.Array, ...]:
  """The gated delta product token by token, for requests of one or a few tokens each.

  With `state` and `state_indices` each request reads its state from a slot of a pool and writes it
  back. Under `jax.jit` with the pool donated this happens in place, and other requests, slots or
  lengths of padding recompile nothing. There is no gradient: train with
  `gdp_jax.chunk_gated_delta_product`.

  Args:
    q, k, v, g, beta, num_householder, scale, use_qk_l2norm_in_kernel: as for
      `gdp_jax.chunk_gated_delta_product`, with a request for a batch row: q [N, T, H, K], T >= 1.
    initial_state: [N, HV, K, V], any float dtype; default zeros. Not with state.
    output_final_state: whether to return the final state [N, HV, K, V], fp32. Not with state.
    state: pool of states [S, HV, K, V], fp32 or bf16. Arithmetic is fp32; after each token the
      state is rounded to the pool's dtype, so several tokens in one call give the same states as
      one by one: from the kernel the same bits.
    state_indices: int32 [N], the slot of each request. -1 is padding: it reads nothing and writes
      nothing, and its output is 0, whatever its inputs hold. No other slot may occur twice.
    output_intermediate_states: whether to return the state after each token as well, for
      speculative decoding.
    update_state: False leaves the pool as it was: for a draft of which the accepted part is
      written by `gdp_jax.rollback`.
    implementation: "pallas" (CUDA GPUs), "xla" (any device), "interpret" (the Pallas kernel without
      a GPU, slowly), or None: Pallas where the code is lowered for CUDA and K <= 256, else XLA.

  Returns:
    (o, state), where o is [N, T, HV, V] with v's dtype and state the pool, or without a pool the
    final state or None. With output_intermediate_states also the states after each token
    [N, T, HV, K, V], in the pool's dtype (fp32 without a pool); 0 for padding.

  Raises:
    TypeError, ValueError: naming the argument, what was expected and what was given.
    NotImplementedError: differentiated; or implementation="pallas" with K > 256.

  Example:
    >>> import jax.numpy as jnp
    >>> from gdp_jax import fused_recurrent_gated_delta_product
    >>> q = k = v = jnp.ones((3, 1, 2, 8))
    >>> g, beta = jnp.full((3, 1, 2), -0.1), jnp.full((3, 1, 2), 0.5)
    >>> pool = jnp.zeros((10, 2, 8, 8))
    >>> o, pool = fused_recurrent_gated_delta_product(
    ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True,
    ...     state=pool, state_indices=jnp.array([7, -1, 0]))
    >>> [int(slot) for slot in jnp.flatnonzero(jnp.any(pool, axis=(1, 2, 3)))]
    [0, 7]

  Source: DeltaProduct, arXiv 2502.10297; `core.ssm.ops.gdp` of Megatron Core.
  """
  state_indices = inputs.check_decode(
    q, k, v, g, beta, num_householder, scale, initial_state, output_final_state, state,
    state_indices, update_state,
  )  # fmt: skip
  implementation = inputs.check_implementation(implementation, q.shape[-1])
  if implementation != "xla":
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, state=state)
    inputs.check_not_explicit(inputs.DECODE_SPLIT, **arrays)
  return _fused_recurrent(
    q, k, v, g, beta, initial_state if state is None else state, state_indices,
    num_householder=int(num_householder),
    scale=inputs.default_scale(scale, q.shape[-1]),
    use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
    output_state=bool(output_final_state or (state is not None and update_state)),
    output_intermediate_states=bool(output_intermediate_states),
    implementation=implementation,
  )  # fmt: skip


@partial(
  jax.jit,
  static_argnames=(
    "num_householder", "scale", "use_qk_l2norm_in_kernel", "output_state",
    "output_intermediate_states", "implementation",
  ),
)  # fmt: skip
def _fused_recurrent(
  q, k, v, g, beta, state, state_indices,
  *, num_householder, scale, use_qk_l2norm_in_kernel, output_state, output_intermediate_states,
  implementation,
):  # fmt: skip
  def run(stage, q, k, v, g, beta, state, state_indices):
    return stage(
      q, k, v, g, beta, scale, state, state_indices, num_householder, use_qk_l2norm_in_kernel,
      output_state, output_intermediate_states,
    )  # fmt: skip

  def kernel(implementation):
    stage = kernels.fused_recurrent_gated_delta_product_fwd
    return partial(run, partial(stage, implementation=implementation))

  @jax.custom_jvp
  def no_gradient(*args):
    plain = partial(run, xla.fused_recurrent_gated_delta_product_fwd)
    advice = inputs.DECODE_SPLIT + inputs.XLA_SPLIT
    return dispatch(implementation, kernel, plain, *args, advice=advice)

  @no_gradient.defjvp
  def _(primals, tangents):
    raise NotImplementedError(
      "fused_recurrent_gated_delta_product has no gradient: train with chunk_gated_delta_product"
    )

  o, new_state, states = no_gradient(q, k, v, g, beta, state, state_indices)
  if state_indices is not None and not output_state:
    new_state = state
  return (o, new_state, states) if output_intermediate_states else (o, new_state)


def rollback(
  state: jax.Array,
  intermediate_states: jax.Array,
  state_indices: jax.Array | np.ndarray,
  num_accepted: jax.Array | np.ndarray,
) -> jax.Array:
  """Ends a speculation: writes each request's state after its last accepted token to the pool.

  Args:
    state: the pool [S, HV, K, V], as it was before the draft: the draft ran with
      `update_state=False`.
    intermediate_states: states after each draft token [N, T, HV, K, V].
    state_indices: int [N], the slot of each request; -1 is padding.
    num_accepted: int [N], in 0..T (checked for a NumPy array). 0 leaves the slot as it was.

  Returns:
    The pool; in place under `jax.jit` if donated.

  Raises:
    TypeError, ValueError: naming the argument, what was expected and what was given.

  Example:
    >>> import jax.numpy as jnp
    >>> from gdp_jax import rollback
    >>> pool, drafts = jnp.zeros((4, 1, 2, 2)), jnp.arange(2 * 3 * 4.).reshape(2, 3, 1, 2, 2)
    >>> pool = rollback(pool, drafts, jnp.array([2, -1]), jnp.array([1, 3]))
    >>> pool[:, 0, 1, 1].tolist()
    [0.0, 0.0, 3.0, 0.0]
  """
  if not isinstance(intermediate_states, (jax.Array, np.ndarray)):
    raise TypeError(
      f"intermediate_states must be an array, got {type(intermediate_states).__name__}"
    )
  if intermediate_states.ndim != 5 or intermediate_states.shape[1] < 1:
    raise ValueError("intermediate_states must have shape [N, T, HV, K, V] with T >= 1, got"
                     f" {intermediate_states.shape}")  # fmt: skip
  N, T, HV, K, V = intermediate_states.shape
  slots = inputs.check_pool(state, state_indices, N, (HV, K, V))
  assert slots is not None  # a pool without its slots was an error
  if not isinstance(num_accepted, (jax.Array, np.ndarray)):
    raise TypeError(f"num_accepted must be an array, got {type(num_accepted).__name__}")
  if not jnp.issubdtype(num_accepted.dtype, jnp.integer) or num_accepted.shape != (N,):
    raise ValueError(f"num_accepted must be an integer array of shape [N] = {(N,)}, got"
                     f" {num_accepted.dtype} {num_accepted.shape}")  # fmt: skip
  if isinstance(num_accepted, np.ndarray) and ((num_accepted < 0) | (num_accepted > T)).any():
    raise ValueError(f"num_accepted must lie in 0..T with T={T}, got {num_accepted.tolist()}")
  state, states = jnp.asarray(state), jnp.asarray(intermediate_states)
  _, slots = metadata.pool_slots(slots, state.shape[0])
  last = jnp.clip(num_accepted - 1, 0, T - 1)
  accepted = states[jnp.arange(N), last].astype(state.dtype)
  slots = jnp.where(num_accepted > 0, slots, state.shape[0])
  return state.at[slots].set(accepted, mode="drop")
