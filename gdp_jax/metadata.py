"""From cu_seqlens to chunk descriptors: plain jnp, static shapes, no host synchronisation.

A stream is an array's second axis: T tokens, or R = T*M rows. Kernels see it flat, [B*T, ...], cut
into chunks of C that never cross a sequence's border. Example, C = 4, T = 12, three sequences and
two rows of padding:

    cu_seqlens        0           5   6       10        (12)
    stream            a a a a | a | b | c c c c | . .
    chunk_indices     (0,0)   (0,1) (1,0) (2,0)   (3,0)  (3,1) ...

The sequence N = 3 stands for the padding behind the last offset: its chunks hold no valid row, and
are there so that somebody writes zeros to them. How many chunks there are depends on the offsets'
values, so the table has room for the most that can be, `num_chunks`; the entries left over are
chunks of the padding that lie past the stream's end, so nothing is read or written for them.
"""

import jax
import jax.numpy as jnp
import numpy as np

CHUNK_SIZE = 64


def num_chunks(length: int, num_sequences: int, chunk_size: int = CHUNK_SIZE) -> int:
  """The most chunks that `num_sequences` sequences of `length` rows in all can have.

  sum ceil(L_i / C) <= length // C + num_sequences, and no chunk is empty.
  """
  return min(length // chunk_size + num_sequences, length)


def sanitize_cu_seqlens(cu_seqlens: jax.Array, length: int) -> jax.Array:
  """Makes any offsets safe: int32, never decreasing, within [0, length]; good ones stay."""
  offsets = jnp.clip(cu_seqlens, 0, length).astype(jnp.int32)
  # Offsets on the device are not read back to be checked, so a bad one must be made harmless.
  return jax.lax.cummax(offsets)


def sequence_of(positions: jax.Array, ends_or_offsets: jax.Array) -> jax.Array:
  """For each position the sequence [offsets[n], offsets[n+1]) that holds it; the last beyond that.

  Args:
    positions: int32 [P].
    ends_or_offsets: int32 [N+1], never decreasing, from 0.

  Returns:
    int32 [P] in [0, N-1].
  """
  # Comparing with every offset is one fused kernel; a binary search is a loop of small ones, worth
  # it only for very many sequences.
  method = "compare_all" if ends_or_offsets.shape[0] <= 4096 else "scan_unrolled"
  found = jnp.searchsorted(ends_or_offsets, positions, side="right", method=method) - 1
  return jnp.clip(found, 0, ends_or_offsets.shape[0] - 2).astype(jnp.int32)


def prepare_chunk_indices(
  cu_seqlens: jax.Array, length: int, chunk_size: int = CHUNK_SIZE
) -> jax.Array:
  """Chunk descriptors of a packed stream, for the stages' `chunk_indices`.

  Args:
    cu_seqlens: int [N+1], offsets in the stream.
    length: rows of the stream, padding included.
    chunk_size: rows of a chunk.

  Returns:
    int32 [num_chunks(length, N+1, chunk_size), 2]: sequence, and chunk within the sequence, in
    stream order. Sequence N is the padding behind the last offset.

  Example:
    >>> import jax.numpy as jnp
    >>> prepare_chunk_indices(jnp.array([0, 5, 6, 10]), 12, 4).tolist()
    [[0, 0], [0, 1], [1, 0], [2, 0], [3, 0], [3, 1], [3, 2]]
  """
  first = _first_chunks(_with_padding(sanitize_cu_seqlens(cu_seqlens, length), length), chunk_size)
  index = jnp.arange(num_chunks(length, cu_seqlens.shape[0], chunk_size), dtype=jnp.int32)
  sequence = sequence_of(index, first)
  return jnp.stack([sequence, index - first[sequence]], axis=1)


def _with_padding(offsets, length):
  """Offsets [N+2] of the N sequences and of the padding behind them."""
  return jnp.concatenate([offsets, jnp.full((1,), length, jnp.int32)])


def _first_chunks(offsets, chunk_size):
  """First chunk of each sequence, and how many chunks there are in all: int32, as the offsets."""
  counts = -(-jnp.diff(offsets) // chunk_size)
  return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts).astype(jnp.int32)])


def pool_slots(state_indices: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
  """Which of the slots [N] lie in a pool of `size` states, and the slots with `size` for the rest.

  `size` is nowhere, for gathers that fill and scatters that drop; -1 would be the pool's end.
  """
  live = (state_indices >= 0) & (state_indices < size)
  return live, jnp.where(live, state_indices, size)


def chunk_bounds(
  batch: int,
  length: int,
  chunk_size: int = CHUNK_SIZE,
  cu_seqlens: jax.Array | None = None,
  chunk_indices: jax.Array | None = None,
) -> jax.Array:
  """Where each chunk lies in the flat stream.

  Returns:
    int32 [NC, 3]: first row, end of the valid rows, end of the rows to be written. Rows between
    the last two are padding, to be written as zeros. Always within [0, batch * length].
  """
  if cu_seqlens is None:
    starts = np.arange(0, length, chunk_size)
    stops = np.minimum(starts + chunk_size, length)
    row = np.arange(batch)[:, None] * length
    table = np.stack([row + starts, row + stops, row + stops], axis=-1)
    return jnp.asarray(table.reshape(-1, 3), jnp.int32)
  _check_batch(batch)
  if chunk_indices is None:
    chunk_indices = prepare_chunk_indices(cu_seqlens, length, chunk_size)
  N = cu_seqlens.shape[0] - 1
  ends = _with_padding(sanitize_cu_seqlens(cu_seqlens, length), length)
  sequence = jnp.clip(chunk_indices[:, 0], 0, N)
  chunk = jnp.clip(chunk_indices[:, 1], 0, length)
  # min before the product: an entry past the end must not overflow int32.
  chunk = jnp.minimum(chunk, length // chunk_size + 1)
  start = jnp.minimum(ends[sequence] + chunk * chunk_size, ends[sequence + 1])
  write_stop = jnp.minimum(start + chunk_size, ends[sequence + 1])
  stop = jnp.where(sequence < N, write_stop, start)
  return jnp.stack([start, stop, write_stop], axis=1).astype(jnp.int32)


def sequence_bounds(
  batch: int,
  length: int,
  num_householder: int = 1,
  chunk_size: int = CHUNK_SIZE,
  cu_seqlens: jax.Array | None = None,
) -> jax.Array:
  """Where each sequence lies in the flat row stream, and where its states are stored.

  Args:
    batch, length: shape of the row stream, [B, R].
    num_householder: rows of a token, M.
    chunk_size: tokens of a token chunk, and rows of a row chunk.
    cu_seqlens: offsets in the row stream, or None.

  Returns:
    int32 [N, 4] (fixed length) or [N+1, 4] (packed; the last is the padding): first row, end of
    the valid rows, end of the rows to be written, first token chunk.
  """
  tokens = length // num_householder
  if cu_seqlens is None:
    chunks = -(-tokens // chunk_size)
    n = np.arange(batch)
    table = np.stack([n * length, (n + 1) * length, (n + 1) * length, n * chunks], axis=1)
    return jnp.asarray(table, jnp.int32)
  _check_batch(batch)
  offsets = sanitize_cu_seqlens(cu_seqlens, length)
  first = _first_chunks(_with_padding(offsets // num_householder, tokens), chunk_size)
  ends = _with_padding(offsets, length)
  stop = ends[1:].at[-1].set(offsets[-1])
  return jnp.stack([ends[:-1], stop, ends[1:], first[:-1]], axis=1)


def _check_batch(batch):
  if batch != 1:
    raise ValueError(f"cu_seqlens packs sequences into one batch row: B must be 1, got {batch}")


def segment_ids_to_cu_seqlens(segment_ids: jax.Array | np.ndarray, max_segments: int) -> jax.Array:
  """Offsets of packed sequences from segment ids, the packing habit of JAX input pipelines.

  A sequence is a run of equal ids. Id 0 is padding: the run of zeros at the end belongs to no
  sequence (zeros anywhere else count as a sequence of their own). Runs under jit: the result's
  shape depends on `max_segments` alone, and unused entries repeat the last offset, which makes
  empty sequences.

  Args:
    segment_ids: int [T] or [1, T].
    max_segments: N, the most sequences there may be. Tokens of further ones become padding; for a
      NumPy array that is an error.

  Returns:
    cu_seqlens, int32 [N+1].

  Raises:
    TypeError: segment_ids is not an integer array.
    ValueError: its shape is another, max_segments is below 1, or a NumPy array has more runs.

  Example:
    >>> import numpy as np
    >>> segment_ids_to_cu_seqlens(np.array([1, 1, 1, 2, 2, 0]), 3).tolist()
    [0, 3, 5, 5]
  """
  if not hasattr(segment_ids, "dtype") or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
    raise TypeError(f"segment_ids must be an integer array, got {type(segment_ids).__name__}"
                    f" of dtype {getattr(segment_ids, 'dtype', None)}")  # fmt: skip
  shape = segment_ids.shape
  if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1):
    raise ValueError(f"segment_ids must have shape [T] or [1, T], got {shape}")
  if isinstance(max_segments, bool) or not isinstance(max_segments, int) or max_segments < 1:
    raise ValueError(f"max_segments must be an int >= 1, got {max_segments!r}")

  def starts_and_end(xp, ids):
    starts = xp.concatenate([xp.ones(min(1, ids.size), bool), ids[1:] != ids[:-1]])
    end = xp.max(xp.where(ids != 0, xp.arange(1, ids.size + 1), 0), initial=0)
    return starts & (xp.arange(ids.size) < end), end

  if isinstance(segment_ids, np.ndarray):
    runs = int(starts_and_end(np, segment_ids.reshape(-1))[0].sum())
    if runs > max_segments:
      raise ValueError(f"segment_ids has {runs} sequences, max_segments is {max_segments}")

  starts, end = starts_and_end(jnp, jnp.asarray(segment_ids).reshape(-1))
  # The start of run N+1, if there is one, ends run N.
  return jnp.nonzero(starts, size=max_segments + 1, fill_value=end)[0].astype(jnp.int32)


def all_whole(length: int, chunk_size: int, cu_seqlens: jax.Array | None) -> bool:
  """Whether shapes say that no row of any chunk lies past its sequence's end."""
  return cu_seqlens is None and length % chunk_size == 0


def on_tokens(of_sequence: jax.Array, T: int, cu_seqlens: jax.Array | None) -> jax.Array:
  """Values of the sequences [N] on their tokens: [B, T]."""
  if cu_seqlens is None:
    return jnp.broadcast_to(of_sequence[:, None], (of_sequence.shape[0], T))
  offsets = sanitize_cu_seqlens(cu_seqlens, T)
  return of_sequence[sequence_of(jnp.arange(T), offsets)][None]


def where_tokens(x: jax.Array, keep: jax.Array) -> jax.Array:
  """x [B, T or R, ...] with zeros where not keep [B, T]."""
  keep = jnp.repeat(keep, x.shape[1] // max(keep.shape[1], 1), axis=1)
  return jnp.where(keep.reshape(*keep.shape, *[1] * (x.ndim - 2)), x, 0)


def pad_rows(x: jax.Array | None, rows: int) -> jax.Array | None:
  """A stream [B, T or R, ...], or None, with so many rows of zeros behind it.

  Zeros in all of q, k, v, g and beta are tokens that change no state.
  """
  if x is None:
    return None
  return jnp.pad(x, ((0, 0), (0, rows), *((0, 0),) * (x.ndim - 2)))
