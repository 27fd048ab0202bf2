"""From a projection's output to the operator's arguments, for prefill and decode alike."""

from functools import partial

import jax

from gdp_jax import inputs, kernels, xla
from gdp_jax.kernels.pallas import dispatch


def prepare(
  x: jax.Array,
  A_log: jax.Array | None = None,
  dt_bias: jax.Array | None = None,
  *,
  num_heads: int,
  head_k_dim: int,
  head_v_dim: int,
  num_v_heads: int | None = None,
  num_householder: int = 1,
  allow_neg_eigval: bool = False,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array]:
  """Splits one projection into q, k, v, g and beta.

  The projection's channels are, one after the other, q [H, K], k [M, H, K], v [M, HV, V],
  b [M, HV] and, with a forget gate, a [HV]; then

      beta = sigmoid(b), doubled with allow_neg_eigval;   g = -exp(A_log) softplus(a + dt_bias)

  in fp32, finite with finite gradients at every logit.

  Args:
    x: [B, T, D] with D = H*K + M*H*K + M*HV*V + M*HV + HV (the last only with a forget gate).
    A_log: log of the decay's rate [HV], or None for no forget gate: then there is no a, and g is
      None.
    dt_bias: [HV], or None for 0.
    num_heads: H.
    head_k_dim: K.
    head_v_dim: V.
    num_v_heads: HV, a multiple of H; default H.
    num_householder: M.
    allow_neg_eigval: step sizes up to 2, so that a step may reflect.
    implementation: "pallas", "xla", "interpret" or None, as for `chunk_gated_delta_product`; when
      differentiated it is plain jnp.

  Returns:
    q [B, T, H, K], k [B, T*M, H, K], v [B, T*M, HV, V] with x's dtype, g [B, T, HV] or None and
    beta [B, T*M, HV] in fp32: what `chunk_gated_delta_product` and
    `fused_recurrent_gated_delta_product` take.

  Raises:
    ValueError: x has another number of channels, or A_log or dt_bias another shape.

  Example:
    >>> import jax.numpy as jnp
    >>> from gdp_jax import prepare
    >>> x = jnp.ones((2, 5, 2 * 8 + 3 * 2 * 8 + 3 * 4 * 16 + 3 * 4 + 4))
    >>> q, k, v, g, beta = prepare(x, jnp.zeros(4), num_heads=2, num_v_heads=4, head_k_dim=8,
    ...                            head_v_dim=16, num_householder=3)
    >>> q.shape, k.shape, v.shape, g.shape, beta.shape
    ((2, 5, 2, 8), (2, 15, 2, 8), (2, 15, 4, 16), (2, 5, 4), (2, 15, 4))

  Source: Gated Delta Networks, arXiv 2412.06464; `core.ssm.ops.gdp` of Megatron Core.
  """
  inputs.check_implementation(implementation, 1)
  inputs.check_not_explicit(inputs.STAGE_SPLIT, x=x, A_log=A_log, dt_bias=dt_bias)
  H, K, V, M = num_heads, head_k_dim, head_v_dim, num_householder
  HV = H if num_v_heads is None else num_v_heads
  counts = dict(num_heads=H, head_k_dim=K, head_v_dim=V, num_v_heads=HV, num_householder=M)
  for name, count in counts.items():
    if count < 1:
      raise ValueError(f"{name} must be at least 1, got {count}")
  if HV % H:
    raise ValueError(f"num_v_heads must be a multiple of num_heads, got {HV} and {H}")
  sizes = [H * K, M * H * K, M * HV * V, M * HV] + ([] if A_log is None else [HV])
  if x.ndim != 3 or x.shape[-1] != sum(sizes):
    raise ValueError(f"x must have shape [B, T, D] with D = {' + '.join(map(str, sizes))} ="
                     f" {sum(sizes)}, got {x.shape}")  # fmt: skip
  for name, p in (("A_log", A_log), ("dt_bias", dt_bias)):
    if p is not None and p.shape != (HV,):
      raise ValueError(f"{name} must have shape [HV] = {(HV,)}, got {p.shape}")
  if A_log is None and dt_bias is not None:
    raise ValueError("dt_bias needs A_log: without it there is no forget gate")

  B, T, D = x.shape
  static = (implementation, tuple(sizes), bool(allow_neg_eigval))
  q, k, v, beta, g = _prepare(static, x.reshape(B * T, D), A_log, dt_bias)
  return (
    q.reshape(B, T, H, K),
    k.reshape(B, T * M, H, K),
    v.reshape(B, T * M, HV, V),
    None if g is None else g.reshape(B, T, HV),
    beta.reshape(B, T * M, HV),
  )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _prepare(static, *args):
  implementation, *rest = static
  plain = lambda *args: xla.prepare_fwd(*args, *rest)

  def kernel(implementation):
    return lambda *args: kernels.prepare_fwd(*args, *rest, implementation=implementation)

  advice = f'{inputs.STAGE_SPLIT}; implementation="xla" is divided'
  return dispatch(implementation, kernel, plain, *args, advice=advice)


@_prepare.defjvp
def _prepare_jvp(static, primals, tangents):
  return jax.jvp(lambda *args: xla.prepare_fwd(*args, *static[1:]), primals, tangents)
