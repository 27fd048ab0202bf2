"""Which tokens belong to which sequence, and every error about that.

Sequences come one a row, [B, T], or packed into one row, [1, T] with `cu_seqlens` [N+1].
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdp_jax import inputs, metadata


def check_x(x: Any, features: int, name: str) -> jax.Array:
  """Raises unless x is a floating-point array [B, T, features]; `name` is what the layer calls it.

  Returns:
    x on the device.
  """
  if not isinstance(x, (jax.Array, np.ndarray)):
    raise TypeError(f"x must be a JAX or NumPy array, got {type(x).__name__}")
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"x must have a floating-point dtype, got {x.dtype}")
  if x.ndim != 3 or x.shape[-1] != features:
    raise ValueError(f"x must have shape [B, T, {name}] with {name}={features}, got {x.shape}")
  return jnp.asarray(x)


def check_cu_seqlens(cu_seqlens: Any, B: int, T: int) -> tuple[jax.Array | None, int]:
  """Raises unless cu_seqlens is None or offsets of one row of T tokens.

  Returns:
    cu_seqlens on the device, and the number of sequences.
  """
  if cu_seqlens is None:
    return None, B
  if B != 1:
    raise ValueError(f"cu_seqlens packs sequences into one batch row: x must have B=1, got B={B}")
  offsets = inputs.check_cu_seqlens(cu_seqlens, B, T)
  return offsets, offsets.shape[0] - 1


def check_state_indices(state_indices: Any, N: int, S: int) -> jax.Array:
  """Raises unless state_indices names a slot for each of N sequences in a pool of S states.

  Returns:
    The slots on the device, int32 [N].
  """
  # The operator's own check of a pool, of which only the size matters here.
  pool = np.broadcast_to(np.float32(0), (S, 1, 1, 1))
  slots = inputs.check_pool(pool, state_indices, N, (1, 1, 1))
  assert slots is not None  # there is a pool
  return slots


def live_tokens(
  B: int, T: int, cu_seqlens: jax.Array | None, slots: jax.Array | None, S: int
) -> jax.Array | None:
  """Which tokens are not padding: bool [B, T], or None where there can be no padding.

  Padding is what lies behind the last offset, and the sequences whose slot is none of the S.
  """
  keep = None
  if slots is not None:
    live, _ = metadata.pool_slots(slots, S)
    keep = metadata.on_tokens(live, T, cu_seqlens)
  if cu_seqlens is not None:
    valid = (jnp.arange(T) < metadata.sanitize_cu_seqlens(cu_seqlens, T)[-1])[None]
    keep = valid if keep is None else valid & keep
  return keep


def where_tokens(keep: jax.Array | None, x: jax.Array) -> jax.Array:
  """x [B, T, D] with zeros where not keep [B, T]."""
  return x if keep is None else metadata.where_tokens(x, keep)


def check_segment_ids_alone(segment_ids: Any, max_segments: Any, **others: Any) -> None:
  """Raises if segment_ids comes with another way to tell sequences apart, or max_segments alone."""
  if segment_ids is None:
    if max_segments is not None:
      raise ValueError("max_segments needs segment_ids, whose documents it counts")
    return
  for name, other in others.items():
    if other is not None:
      raise ValueError(f"segment_ids cannot be combined with {name}: pass cu_seqlens instead, see"
                       " gdp_jax.segment_ids_to_cu_seqlens")  # fmt: skip


def pack_segment_ids(
  segment_ids: Any, max_segments: Any, B: int, T: int
) -> tuple[jax.Array, jax.Array]:
  """Offsets of the segments of all rows, put one behind the other, [1, B*T].

  A segment ends with its row. Padding, id 0, continues the segment in front of it: being behind
  it, it changes nothing in it, and needs no offsets of its own.

  Returns:
    cu_seqlens [max_segments + 1], and which tokens are not padding, bool [B, T].
  """
  if max_segments is None:
    raise ValueError(
      "segment_ids needs max_segments, the most segments that all rows together have"
    )
  if not hasattr(segment_ids, "dtype") or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
    raise TypeError(f"segment_ids must be an integer array, got {type(segment_ids).__name__}"
                    f" of dtype {getattr(segment_ids, 'dtype', None)}")  # fmt: skip
  if segment_ids.shape != (B, T):
    raise ValueError(f"segment_ids must have shape [B, T] = {(B, T)}, got {segment_ids.shape}")
  xp = np if isinstance(segment_ids, np.ndarray) else jnp  # NumPy's are checked
  first = xp.ones((B, min(T, 1)), bool)
  changes = xp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
  valid = segment_ids != 0
  segments = xp.cumsum((changes & valid).reshape(-1), dtype=np.int32)
  return metadata.segment_ids_to_cu_seqlens(segments, max_segments), jnp.asarray(valid)
