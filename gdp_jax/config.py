"""The one place that chooses block sizes, warps and pipeline stages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Config:
  """How one kernel is cut and compiled.

  Attributes:
    block_k: columns of K that one matrix product takes, a power of two of at least 16.
    block_v: columns of V that one program works on, likewise.
    num_warps: warps of 32 threads of a program.
    num_stages: depth of the loads' software pipeline.
    unroll: row chunks that a sweep takes in one step; divides M, or is a multiple of it.
  """

  block_k: int = 64
  block_v: int = 64
  num_warps: int = 4
  num_stages: int = 2
  unroll: int = 1


def block(size: int, most: int) -> int:
  """A power of two in [16, most]: the largest that covers `size` with the fewest idle columns.

  96 is three blocks of 32, 100 is one of 128 (if `most` allows): idle columns cost as much as full
  ones, and so does each further block, so a block may idle an eighth of what it covers.
  """
  best = 16
  while best < min(size, most):
    best *= 2
  while best > 32 and -(-size // best) * best > size * 1.125:
    best //= 2
  return best


SWEEPS = (
  "chunk_gated_delta_product_bwd_h",
  "chunk_gated_delta_product_effects",
  "chunk_gated_delta_product_fwd_h",
  "chunk_gated_delta_product_fwd_wy_h",
)


@functools.cache
def device_limits() -> tuple[int, int]:
  """Multiprocessors, and bytes of shared memory that a program may have: of the first GPU, or of an
  H200 where there is none."""
  device = jax.devices()[0]
  if device.platform != "gpu":
    return 132, 232_448
  capability = getattr(device, "compute_capability", "")
  most = {"8.0": 166_912, "9.0": 232_448, "10.0": 232_448, "10.3": 232_448}
  return getattr(device, "core_count", 132), most.get(capability, 101_376)


def choose(stage: str, K: int, V: int, dtype, streams: int = 1, num_householder: int = 1) -> Config:
  """The Config of a stage for heads of K and V channels, in bf16 or fp16 or fp32.

  `streams` (sequences times value heads) and `num_householder` are for the sweeps. A sequence's
  bits must not depend on its company, so nothing may follow from `streams` but block_v: the columns
  of a state do not mix.
  """
  wide = jnp.dtype(dtype).itemsize == 4
  if stage == "chunk_local_cumsum":
    return Config(num_warps=2)
  if stage == "solve_tril":
    return Config(num_warps=1)  # its products are 16x16: more warps would only wait for each other
  if stage == "chunk_scaled_dot_kkt_fwd":
    most = 64 if wide else 128
    return Config(block(K, most), block(V, most), num_warps=8 if K > 64 and not wide else 4)
  if stage == "recompute_w_u_fwd":
    most = 64 if wide else 128
    return Config(block(K, most), block(V, most))
  if stage in SWEEPS:
    return _sweep(stage, K, V, wide, streams, num_householder)
  if stage == "chunk_gated_delta_product_fwd_o":
    if wide:
      return Config(block(K, 64), block(V, 64), num_stages=2 if K <= 128 else 1)
    return Config(block(K, 128), block(V, 128), num_stages=2 if K <= 128 else 1)
  if stage == "chunk_gated_delta_product_bwd_o":
    if wide:
      return Config(block(K, 64), block(V, 64), num_stages=1)
    if K <= 128:
      return Config(block(K, 128), block(V, 128), num_stages=1)
    # With one block of V the innermost loop is that over the copies: too much to pipeline.
    return Config(block(K, 64), block(V, 64), num_stages=3 if V > 64 else 1)
  if stage == "chunk_gated_delta_product_bwd_wy":
    if wide:
      return Config(block(K, 64), block(V, 32), num_stages=1)
    # The kernel says why no load may serve both a wgmma, which needs 64 rows, and something else.
    block_k = block(K, 64)
    return Config(block_k, block(V, 64), num_stages=3 if block_k == 64 else 1)
  if stage == "chunk_gated_delta_product_states":
    if wide:
      return Config(block(K, 64), block(V, 64), num_stages=1)
    blocks = block(K, 128), block(V, 128)
    return Config(*blocks, num_warps=8 if blocks == (128, 128) else 4)
  if stage == "prepare_fwd":
    return Config(block_v=1024)
  if stage == "fused_recurrent_gated_delta_product_fwd":
    # All of K in one tile: a column of the state is read, and written, by one program.
    whole_k = max(16, 1 << (K - 1).bit_length())
    return Config(whole_k, block(V, 64), num_warps=4, num_stages=1)
  raise ValueError(f"stage must be one of the kernels' names, got {stage!r}")


def _sweep(stage, K, V, wide, streams, M):
  """A sweep is a chain of small products: it waits, and a program alone on its multiprocessor waits
  least. So the narrowest block_v with which each program has one for itself; where there are too
  many streams for that, the widest, which does most in a step. The state tile [K, block_v] lives in
  registers, in fp32.
  """
  multiprocessors, shared_memory = device_limits()
  widest = 64 if not wide else 32 if K <= 128 else 16
  narrow = [v for v in (16, 32) if v < widest and streams * -(-V // v) <= multiprocessors]
  block_v = block(V, narrow[0] if narrow else widest)
  if wide:
    # fp32 products split their operands in shared memory: with K > 128 no pipeline fits.
    return Config(block(K, 64), block_v, num_stages=2 if K <= 128 else 1)
  block_k = block(K, 128)
  if K > 128:
    return Config(block_k, block_v, num_warps=8 if block_v == 64 else 4, num_stages=2)
  # Two row chunks a step save the second one what only a token chunk's first one does, and half of
  # the waiting between steps; if the loads of all steps, 64 rows of 2 bytes, have room.
  unroll = 2 if M == 1 or M % 2 == 0 else 1
  columns = -(-K // block_k) * block_k
  w_or_Ti = columns if stage == "chunk_gated_delta_product_fwd_h" else 64
  loads = unroll * (columns + w_or_Ti + block_v)
  if stage == "chunk_gated_delta_product_bwd_h":
    loads += max(1, unroll // M) * (columns + block_v)
  # Where nothing but products reads the state, the last step's may still be on its way.
  steps = 4 if stage == "chunk_gated_delta_product_effects" else 3
  if steps * 128 * loads > shared_memory - 16_000:  # the rest is for results on their way
    unroll = 1
  return Config(block_k, block_v, num_stages=3, unroll=unroll)
