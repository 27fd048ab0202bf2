"""Chunk descriptors against plain Python, for offsets good and bad."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp_jax import metadata, segment_ids_to_cu_seqlens

# (length, N, C): few, since each is compiled once.
SHAPES = [(1, 1, 4), (7, 3, 4), (12, 1, 4), (33, 6, 16)]
M = 3

modest = settings(max_examples=40, deadline=None)
indices = jax.jit(metadata.prepare_chunk_indices, static_argnums=(1, 2))
bounds = jax.jit(metadata.chunk_bounds, static_argnums=(0, 1, 2))
sequences = jax.jit(metadata.sequence_bounds, static_argnums=(0, 1, 2, 3))


@st.composite
def good_offsets(draw):
  """A shape and offsets in order: empty sequences, repeated last offsets and tails among them."""
  length, N, C = draw(st.sampled_from(SHAPES))
  rest = draw(st.lists(st.integers(0, length), min_size=N, max_size=N))
  return length, C, [0, *sorted(rest)]


@st.composite
def any_offsets(draw):
  length, N, C = draw(st.sampled_from(SHAPES))
  value = st.integers(-5, length + 5) | st.integers(-(2**31), 2**31 - 1)
  return length, C, draw(st.lists(value, min_size=N + 1, max_size=N + 1))


def by_hand(offsets, length, C):
  """(sequence, chunk, first row, end of valid rows, end of rows to write), padding last."""
  chunks = []
  N, ends = len(offsets) - 1, [*offsets, length]
  for n in range(N + 1):
    for c, start in enumerate(range(ends[n], ends[n + 1], C)):
      stop = min(start + C, ends[n + 1])
      chunks.append((n, c, start, stop if n < N else start, stop))
  return chunks


def offsets_array(offsets):
  return jnp.asarray(np.array(offsets, np.int32))


@modest
@given(good_offsets())
def test_num_chunks_has_room(case):
  length, C, offsets = case
  real = sum(-(-(b - a) // C) for a, b in itertools.pairwise(offsets))
  assert real <= metadata.num_chunks(length, len(offsets) - 1, C) <= length


@modest
@given(good_offsets())
def test_chunks_of_a_packed_stream(case):
  length, C, offsets = case
  expected = np.array(by_hand(offsets, length, C), np.int32).reshape(-1, 5)
  table = np.asarray(indices(offsets_array(offsets), length, C))
  rows = np.asarray(bounds(1, length, C, offsets_array(offsets)))
  assert table.shape[0] == rows.shape[0] == metadata.num_chunks(length, len(offsets), C)
  used = len(expected)
  np.testing.assert_array_equal(table[:used], expected[:, :2])
  np.testing.assert_array_equal(rows[:used], expected[:, 2:])
  # What is left over belongs to the padding and is empty.
  assert np.all(table[used:, 0] == len(offsets) - 1)
  np.testing.assert_array_equal(rows[used:], length)


@pytest.mark.parametrize(("B", "length", "C"), [(1, 1, 4), (3, 9, 4), (2, 8, 4), (2, 0, 4)])
def test_chunks_of_a_batch(B, length, C):
  rows = metadata.chunk_bounds(B, length, C)
  expected = [
    (b * length + start, b * length + stop, b * length + stop)
    for b in range(B)
    for _, _, start, _, stop in by_hand([0], length, C)
  ]
  np.testing.assert_array_equal(rows, np.array(expected, np.int32).reshape(-1, 3))
  first = -(-length // C) * np.arange(B)
  starts = length * M * np.arange(B)
  expected = np.stack([starts, starts + length * M, starts + length * M, first], axis=1)
  np.testing.assert_array_equal(metadata.sequence_bounds(B, length * M, M, C), expected)


@modest
@given(good_offsets())
def test_sequences_of_a_packed_stream(case):
  length, C, offsets = case
  N, ends, first, expected = len(offsets) - 1, [*offsets, length], 0, []
  for n in range(N + 1):
    start, write_stop = ends[n] * M, ends[n + 1] * M
    expected.append((start, write_stop if n < N else start, write_stop, first))
    first += -(-(ends[n + 1] - ends[n]) // C)
  actual = sequences(1, length * M, M, C, M * offsets_array(offsets))
  np.testing.assert_array_equal(actual, expected)


def assert_in_order_and_within(rows, length):
  rows = np.asarray(rows)
  assert rows.min(initial=0) >= 0 and rows.max(initial=0) <= length
  assert np.all(rows[:, 0] <= rows[:, 1]) and np.all(rows[:, 1] <= rows[:, 2])


@modest
@given(any_offsets())
def test_bad_offsets_stay_within_the_arrays(case):
  length, C, offsets = case
  rows = np.asarray(bounds(1, length, C, offsets_array(offsets)))
  assert_in_order_and_within(rows, length)
  # No row is written by two programs.
  assert np.sum(rows[:, 2] - rows[:, 0]) <= length
  # In the row stream, where they need not be multiples of M.
  N = len(offsets) - 1
  for_states = np.asarray(sequences(1, length * M, M, C, offsets_array(offsets)))
  assert_in_order_and_within(for_states[:, :3], length * M)
  last = for_states[:N, 3] + (-(-(for_states[:N, 1] - for_states[:N, 0]) // C) - 1) // M
  assert for_states.min() >= 0
  assert last.max() < metadata.num_chunks(length, N, C)


@modest
@given(any_offsets(), st.integers(0, 2**32 - 1))
def test_bad_chunk_indices_stay_within_the_arrays(case, seed):
  length, C, offsets = case
  shape = (metadata.num_chunks(length, len(offsets), C), 2)
  table = np.random.default_rng(seed).integers(-(2**31), 2**31, shape, np.int32)
  assert_in_order_and_within(
    bounds(1, length, C, offsets_array(offsets), jnp.asarray(table)), length
  )


def test_one_trace_and_no_transfer():
  traces = []

  @jax.jit
  def describe(offsets, ids):
    traces.append(1)
    return (
      metadata.prepare_chunk_indices(offsets, 64, 16),
      metadata.chunk_bounds(1, 64, 16, offsets),
      metadata.sequence_bounds(1, 64 * M, M, 16, offsets * M),
      segment_ids_to_cu_seqlens(ids, 5),
    )

  rng = np.random.default_rng(0)
  values = [
    jax.device_put((np.sort(rng.integers(0, 65, 5)), rng.integers(0, 3, 64))) for _ in range(20)
  ]
  with jax.transfer_guard("disallow"):
    jax.block_until_ready([describe(*value) for value in values])
  assert len(traces) == 1


def test_worked_example():
  offsets = jnp.array([0, 5, 6, 10])
  table = [[0, 0], [0, 1], [1, 0], [2, 0], [3, 0], [3, 1], [3, 2]]
  assert metadata.prepare_chunk_indices(offsets, 12, 4).tolist() == table


# Segment ids

to_offsets = jax.jit(segment_ids_to_cu_seqlens, static_argnums=1)


def offsets_by_hand(ids, N):
  end = max((i + 1 for i, x in enumerate(ids) if x), default=0)
  starts = [i for i in range(end) if i == 0 or ids[i] != ids[i - 1]]
  offsets = [*starts, end][: N + 1]
  return offsets + [offsets[-1]] * (N + 1 - len(offsets)), len(starts)


@modest
@given(
  st.sampled_from([1, 8]).flatmap(lambda n: st.lists(st.integers(-1, 2), min_size=n, max_size=n)),
  st.sampled_from([1, 3, 9]),
)
def test_segment_ids(ids, N):
  expected, runs = offsets_by_hand(ids, N)
  host = np.array(ids, np.int32)
  # Under jit, and [1, T]: further runs become padding.
  actual = to_offsets(jnp.asarray(host[None]), N)
  assert actual.dtype == jnp.int32
  np.testing.assert_array_equal(actual, expected)
  if runs > N:
    with pytest.raises(ValueError, match=f"segment_ids has {runs} sequences, max_segments is {N}"):
      segment_ids_to_cu_seqlens(host, N)
  elif len(ids) == 8:
    np.testing.assert_array_equal(segment_ids_to_cu_seqlens(host, N), expected)


def test_no_segment_ids():
  assert segment_ids_to_cu_seqlens(np.zeros(0, np.int32), 2).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
  ("ids", "max_segments", "error", "parts"),
  [
    ([1, 1, 2], 3, TypeError, ["segment_ids", "integer array", "list"]),
    (np.ones(3), 3, TypeError, ["segment_ids", "integer array", "float64"]),
    (np.ones((2, 3), int), 3, ValueError, ["segment_ids", "[T] or [1, T]", "(2, 3)"]),
    (np.ones((1, 1, 3), int), 3, ValueError, ["segment_ids", "[T] or [1, T]", "(1, 1, 3)"]),
    (np.ones(3, int), 0, ValueError, ["max_segments", ">= 1", "0"]),
    (np.ones(3, int), 2.0, ValueError, ["max_segments", "int", "2.0"]),
    (np.ones(3, int), True, ValueError, ["max_segments", "int", "True"]),
  ],
)
def test_segment_ids_errors(ids, max_segments, error, parts):
  with pytest.raises(error) as raised:
    segment_ids_to_cu_seqlens(ids, max_segments)
  for part in parts:
    assert part in str(raised.value)
