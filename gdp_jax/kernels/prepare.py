"""The split of a projection's output, and the gates."""

import jax
import jax.numpy as jnp

from gdp_jax import config, inputs
from gdp_jax.kernels import pallas
from gdp_jax.xla import log_decay, step_size


def prepare_fwd(
  x: jax.Array,
  A_log: jax.Array | None,
  dt_bias: jax.Array | None,
  sizes: tuple[int, ...],
  allow_neg_eigval: bool = False,
  *,
  implementation: str = "pallas",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """One launch for what XLA makes five of: three copies and two gates.

  Args:
    x: projection [L, D].
    A_log, dt_bias: [HV] each, or None; see `gdp_jax.prepare`.
    sizes: channels of q, k, v and b, and with A_log of a; their sum is D.
    allow_neg_eigval: double the step sizes.
    implementation: "pallas" or "interpret".

  Returns:
    q, k, v [L, channels] with x's dtype, beta [L, channels of b] and g [L, HV] or None in fp32.

  Source: `core.ssm.ops.gdp` of Megatron Core.
  """
  L = inputs.check_stage(x=(x, "L D"), A_log=(A_log, "HV"), dt_bias=(dt_bias, "HV"))["L"]
  cfg = config.choose("prepare_fwd", sizes[0], sizes[2], x.dtype)
  copies = [jax.ShapeDtypeStruct((L, size), x.dtype) for size in sizes[:3]]
  gates = [jax.ShapeDtypeStruct((L, size), jnp.float32) for size in sizes[3:]]
  pieces = sum(-(-size // cfg.block_v) for size in sizes)
  return pallas.call(
    _prepare_kernel,
    x,
    A_log,
    dt_bias,
    grid=(L, pieces),
    out_shape=(*copies, gates[0], None if A_log is None else gates[1]),
    config=cfg,
    implementation=implementation,
    name="gdp_prepare_fwd",
    allow_neg_eigval=allow_neg_eigval,
    block=cfg.block_v,
  )


def _prepare_kernel(
  x_ref,  # [L, D]
  A_log_ref,  # [HV] or None
  dt_bias_ref,  # [HV] or None
  q_ref,  # [L, channels], as
  k_ref,
  v_ref,
  beta_ref,
  g_ref,  # or None
  *,
  allow_neg_eigval,
  block,
):
  """A program owns one token, and one block of the channels of one result."""
  row, piece = pallas.program_id(0), pallas.program_id(1)

  def compute(ref, x, cols, exists):
    if ref is beta_ref:
      return step_size(x, allow_neg_eigval)
    if ref is g_ref:
      dt_bias = 0.0 if dt_bias_ref is None else pallas.load(dt_bias_ref.at[cols], exists)
      return log_decay(x, pallas.load(A_log_ref.at[cols], exists), dt_bias)
    return x

  first = offset = 0
  for ref in (q_ref, k_ref, v_ref, beta_ref, g_ref):
    if ref is None:
      continue
    size = ref.shape[1]
    count = -(-size // block)

    @pallas.when((piece >= first) & (piece < first + count))
    def _(ref=ref, size=size, first=first, offset=offset):
      cols = (piece - first) * block + jnp.arange(block, dtype=jnp.int32)
      exists = cols < size
      x = pallas.load(x_ref.at[row, offset + cols], exists)
      pallas.store(ref.at[row, cols], compute(ref, x, cols, exists), exists)

    first, offset = first + count, offset + size
