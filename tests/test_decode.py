"""Serving: decode token by token, the pool of states, prefill into it, speculation.

B batch, N requests, S slots, T tokens, M Householder copies, HV value heads, K and V head dims.

The kernels' cases run compiled on a CUDA GPU; elsewhere a few of them run in interpret mode.
"""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
  BOUNDS,
  IMPLEMENTATIONS,
  KERNELS,
  PALLAS,
  Case,
  assert_close,
  assert_raises,
  assert_same_bits,
  each,
  make_inputs,
  quick_jit,
)
from lowering import count_kernels, lower_for_cuda

from gdp_jax import (
  chunk_gated_delta_product,
  fused_recurrent_gated_delta_product,
  kernels,
  recurrent_gated_delta_product,
  rollback,
)

# Relative L2 errors of o, which is rounded once, by at most 2^-8 in bf16 and 2^-11 in fp16. States
# are computed and returned in fp32 whatever the inputs' dtype.
O_BOUNDS = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 5e-4}

# Compiling is what takes time here, so most tests share these: four requests over four slots, and a
# row of 200 tokens for them.
DRAFT = Case("draft", B=4, T=4, initial_state=False)
ROW = Case("row", B=1, T=200, initial_state=False)
SMALL = Case("small", B=3, T=2, H=1, HV=2, K=16, V=24, initial_state=False)


def streams(case):
  """The inputs without an initial state."""
  return {name: x for name, x in make_inputs(case).items() if name != "initial_state"}


def make_pool(case, dtype="float32", S=4):
  rng = np.random.default_rng(case.seed + 1000)
  return jnp.asarray(rng.standard_normal((S, case.HV, case.K, case.V)), dtype)


def cut(inputs, start, stop):
  """The streams of tokens start to stop; some of them have M rows a token."""
  T = inputs["q"].shape[1]
  rows = lambda x: x[:, start * (x.shape[1] // T) : stop * (x.shape[1] // T)]
  return {name: None if x is None else rows(x) for name, x in inputs.items()}


def with_nan(inputs, n):
  """The streams of several requests, NaN in those numbered n."""
  inputs = {name: None if x is None else x.copy() for name, x in inputs.items()}
  for x in inputs.values():
    if x is not None:
      x[n] = np.nan
  return inputs


def decoding(case, implementation, **options):
  """The decode operator with these static arguments, of arrays named by keywords."""
  return functools.partial(
    fused_recurrent_gated_delta_product, num_householder=case.M,
    use_qk_l2norm_in_kernel=case.l2norm, implementation=implementation, **options,
  )  # fmt: skip


def prefilling(case, implementation, **options):
  return functools.partial(
    chunk_gated_delta_product, num_householder=case.M, use_qk_l2norm_in_kernel=case.l2norm,
    implementation=implementation, **options,
  )  # fmt: skip


@functools.cache
def compiled(operator, *static, **options):
  return quick_jit(operator(*static, **options))


def call(operator, inputs, case, implementation, kwargs):
  arrays = {name: x for name, x in kwargs.items() if isinstance(x, (jax.Array, np.ndarray))}
  options = {name: x for name, x in kwargs.items() if name not in arrays}
  case = Case("static", M=case.M, l2norm=case.l2norm)  # the rest is in the shapes
  return compiled(operator, case, implementation, **options)(**inputs, **arrays)


def decode(inputs, case, implementation, **kwargs):
  """What the jitted operator returns; as elsewhere, `inputs` are arrays by name."""
  return call(decoding, inputs, case, implementation, kwargs)


def prefill(inputs, case, implementation, **kwargs):
  return call(prefilling, inputs, case, implementation, kwargs)


@functools.cache
def reference(M, l2norm):
  options = dict(use_qk_l2norm_in_kernel=l2norm, output_final_state=True)
  return quick_jit(functools.partial(recurrent_gated_delta_product, num_householder=M, **options))


def recurrence(inputs, case, state=None, rounded_to="float32"):
  """The recurrence in fp32 and the state after each token: o, final_state and states.

  With `rounded_to` the state is rounded after each token, as a pool of that dtype does.
  """
  inputs = {name: None if x is None else x.astype(np.float32) for name, x in inputs.items()}
  o, states = [], []
  for t in range(inputs["q"].shape[1]):
    token, state = reference(case.M, case.l2norm)(**cut(inputs, t, t + 1), initial_state=state)
    state = np.asarray(state.astype(rounded_to).astype(np.float32))
    o.append(token)
    states.append(state)
  return dict(o=np.concatenate(o, axis=1), final_state=state, states=np.stack(states, axis=1))


def assert_slots_untouched(pool, before, slots, what):
  """Every slot but these has the bits that it had."""
  others = np.setdiff1d(np.arange(before.shape[0]), slots)
  untouched = lambda x: dict(pool=np.asarray(x)[others])
  assert_same_bits(untouched(pool), untouched(before), what)


def assert_same(actual, expected, implementation, what):
  """The same bits; but XLA on a GPU chooses its products anew for each program."""
  if implementation == "xla" and jax.default_backend() == "gpu":
    wide = lambda tree: {name: np.asarray(x, np.float32) for name, x in tree.items()}
    bound = max(BOUNDS[jnp.dtype(x.dtype).name] for x in expected.values())
    assert_close(wide(actual), wide(expected), bound, what)
  else:
    assert_same_bits(actual, expected, what)


# The dtype of the pool: in bf16 states are rounded as well.
each_pool = pytest.mark.parametrize(
  ("implementation", "dtype"),
  [
    ("xla", "float32"),
    ("xla", "bfloat16"),
    ("interpret", "bfloat16"),
    pytest.param("pallas", "float32", marks=pytest.mark.gpu),
    pytest.param("pallas", "bfloat16", marks=pytest.mark.gpu),
  ],
)


# Decode against the recurrence

VALUES = [
  *(Case(f"T{T}-M{M}", B=3, T=T, M=M) for T in (1, 2, 5) for M in (1, 2, 3)),
  Case("no-gate", B=3, T=2, gate=None),
  Case("no-state", B=3, T=2, initial_state=False),
  Case("no-gate-no-state", B=1, T=5, M=1, gate=None, initial_state=False),
  Case("strong", T=5, gate="strong"),
  Case("reset", T=2, gate="reset"),
  Case("zero-keys", T=2, keys="zero"),
  Case("l2norm", B=3, T=2, l2norm=True),
  *(Case(f"{d}-M{M}", T=5, M=M, dtype=d) for d in ("bfloat16", "float16") for M in (1, 3)),
  *(Case(f"l2norm-{d}", T=2, l2norm=True, dtype=d) for d in ("bfloat16", "float16")),
  Case("T4-H8", B=8, T=4, M=1, H=8, HV=8, K=16, V=16),
  Case("T8-H4", B=4, T=8, M=1, H=4, HV=4, K=8, V=8),
  Case("group-of-3", B=2, T=2, H=2, HV=6),
]  # fmt: skip
WIDTHS = [
  Case(f"K{K}-V{V}-{dtype}", B=2, T=2, H=1, HV=2, K=K, V=V, dtype=dtype)
  for K, V in ((1, 1), (8, 8), (16, 300), (60, 100), (128, 128), (192, 96), (256, 512))
  for dtype in ("float32", "bfloat16")
]


@each(
  VALUES + WIDTHS,
  xla={
    "T1-M1", "T2-M3", "T5-M2", "no-gate", "no-gate-no-state", "strong", "reset", "zero-keys",
    "l2norm", "bfloat16-M3", "float16-M1", "l2norm-bfloat16", "T4-H8", "K60-V100-float32",
  },
  interpret={
    "T1-M1", "T2-M3", "T5-M2", "no-gate-no-state", "l2norm-bfloat16", "float16-M1", "group-of-3",
    "K60-V100-bfloat16",
  },
)  # fmt: skip
def test_values(case, implementation):
  inputs = make_inputs(case)
  o, final_state, states = decode(
    inputs, case, implementation, output_final_state=True, output_intermediate_states=True
  )
  chex.assert_type([o, final_state, states], [jnp.dtype(case.dtype), jnp.float32, jnp.float32])
  expected = recurrence(streams(case), case, inputs["initial_state"])
  assert_close(dict(o=o), dict(o=expected.pop("o")), O_BOUNDS[case.dtype], case.name)
  actual = dict(final_state=final_state, states=states)
  assert_close(actual, expected, BOUNDS["float32"], case.name)
  assert_same_bits(dict(last=states[:, -1]), dict(last=final_state), case.name)


@pytest.mark.parametrize("implementation", ["xla", PALLAS])
def test_l2norm_of_large_and_tiny_vectors(implementation):
  case = Case("l2norm", T=5, l2norm=True, dtype="bfloat16", initial_state=False)
  inputs = streams(case)
  inputs["q"] *= 1000
  inputs["k"] *= 1000
  inputs["q"][:, 3] = inputs["k"][:, 2] = 0
  inputs["k"][:, 4] = 1e-20
  o, final_state = decode(inputs, case, implementation, output_final_state=True)
  expected = recurrence(inputs, case)
  chex.assert_tree_all_finite((o, final_state))
  assert_close(dict(o=o), dict(o=expected["o"]), O_BOUNDS["bfloat16"], case.name)


@pytest.mark.parametrize("implementation", ["xla", PALLAS])
def test_mixed_dtypes_a_scale_and_no_final_state(implementation):
  case = Case("mixed", T=2, dtype="bfloat16")
  inputs = make_inputs(case)
  for name, dtype in (("g", np.float16), ("beta", jnp.bfloat16), ("initial_state", jnp.bfloat16)):
    inputs[name] = inputs[name].astype(dtype)
  o, final_state = decode(inputs, case, implementation, scale=0.7)
  assert o.dtype == jnp.bfloat16
  assert final_state is None
  state = inputs.pop("initial_state").astype(np.float32)
  expected = recurrence(inputs, case, state)["o"] * 0.7 * case.K**0.5
  assert_close(dict(o=o), dict(o=expected), O_BOUNDS["bfloat16"], case.name)


def test_the_default_implementation():
  inputs, pool = streams(DRAFT), make_pool(DRAFT)
  kwargs = dict(state=pool, state_indices=jnp.arange(4))
  names = ("o", "pool")
  actual = decode(inputs, DRAFT, None, **kwargs)
  check_against = "xla" if jax.default_backend() == "cpu" else "pallas"
  expected = decode(inputs, DRAFT, check_against, **kwargs)
  actual, expected = (dict(zip(names, x, strict=True)) for x in (actual, expected))
  assert_same_bits(actual, expected, "implementation=None")


def test_the_default_takes_wide_heads():
  case = Case("K300", T=2, H=1, HV=1, K=300, V=20, initial_state=False)
  o, final_state = decode(streams(case), case, None, output_final_state=True)
  expected = recurrence(streams(case), case)
  del expected["states"]
  assert_close(dict(o=o, final_state=final_state), expected, BOUNDS["float32"], case.name)


def test_no_requests():
  case = dataclasses.replace(SMALL, B=0)
  pool, inputs = make_pool(case), streams(case)
  for implementation in ("xla", None, "interpret"):
    kwargs = dict(state=pool, state_indices=np.zeros(0, np.int32))
    o, after = decode(inputs, case, implementation, **kwargs)
    chex.assert_shape(o, (0, case.T, case.HV, case.V))
    assert_same_bits(dict(pool=after), dict(pool=pool), "no requests")


def test_strict_dtype_promotion():
  case = dataclasses.replace(SMALL, dtype="bfloat16", l2norm=True)
  pool, slots = make_pool(case, "bfloat16"), jnp.array([2, -1, 0])
  with jax.numpy_dtype_promotion("strict"):
    _, pool, states = decode(
      streams(case), case, "xla", state=pool, state_indices=slots, output_intermediate_states=True
    )
    rollback(pool, states, slots, jnp.array([1, 0, 2]))


# The pool


@each_pool
def test_padding_in_the_pool(implementation, dtype):
  slots, live = np.array([2, -1, 0, -1]), [0, 2]
  inputs, pool = streams(DRAFT), make_pool(DRAFT, dtype)
  o, after, states = decode(
    with_nan(inputs, [1, 3]), DRAFT, implementation, state=pool, state_indices=slots,
    output_intermediate_states=True,
  )  # fmt: skip
  chex.assert_type([o, after, states], [jnp.float32, pool.dtype, pool.dtype])
  assert not np.any(o[np.array([1, 3])])
  assert not np.any(states[np.array([1, 3])])
  assert_slots_untouched(after, pool, [2, 0], "padding")

  state = np.asarray(pool.astype(np.float32))[slots[live]]
  of_live = {name: x[live] for name, x in inputs.items()}
  expected = recurrence(of_live, DRAFT, state, rounded_to=dtype)
  pick = lambda x, n: np.asarray(x.astype(np.float32))[n]
  actual = dict(o=pick(o, live), final_state=pick(after, slots[live]), states=pick(states, live))
  # Where two fp32 results are rounded to bf16 they may end up on two sides.
  assert_close(actual, expected, BOUNDS[dtype], f"a pool of {dtype}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_outside_the_pool_are_padding(implementation):
  """Slots on the device are not looked at by the host."""
  inputs, pool = streams(DRAFT), make_pool(DRAFT)
  slots = jnp.array([4, 1, 2**31 - 1, -(2**31)])
  kwargs = dict(state=pool, state_indices=slots, output_intermediate_states=True)
  o, after, states = decode(with_nan(inputs, [0, 2, 3]), DRAFT, implementation, **kwargs)
  expected = recurrence(cut(inputs, 0, 4), DRAFT, jnp.tile(pool[1:2], (4, 1, 1, 1)))
  assert_close(dict(o=o[1]), dict(o=expected["o"][1]), BOUNDS["float32"], "the slot inside")
  for n in (0, 2, 3):
    assert not np.any(o[n])
    assert not np.any(states[n])
  assert_slots_untouched(after, pool, [1], "slots outside the pool")

  rolled = rollback(pool, states, slots, jnp.array([4, 4, 4, 4]))
  assert_same_bits(dict(pool=rolled), dict(pool=after), "slots outside the pool, rolled back")
  rolled = rollback(pool, states, slots, jnp.array([4, -1, 4, 4]))
  assert_same_bits(dict(pool=rolled), dict(pool=pool), "accepted fewer than none")


@each_pool
def test_one_call_equals_one_token_a_call(implementation, dtype):
  slots = jnp.array([3, 0, -1, 2])
  inputs, pool = streams(DRAFT), make_pool(DRAFT, dtype)
  o, after = decode(inputs, DRAFT, implementation, state=pool, state_indices=slots)
  actual = dict(o=o, pool=after)
  o = []
  for t in range(DRAFT.T):
    token = cut(inputs, t, t + 1)
    o_t, pool = decode(token, DRAFT, implementation, state=pool, state_indices=slots)
    o.append(o_t)
  expected = dict(o=np.concatenate(o, axis=1), pool=pool)
  assert_same(actual, expected, implementation, f"{DRAFT.T} tokens, a pool of {dtype}")


@each_pool
def test_a_pool_that_is_not_updated(implementation, dtype):
  """It comes back as it was; outputs and states are those of a pool that is updated."""
  slots = jnp.array([3, 0, -1, 2])
  inputs, pool = streams(DRAFT), make_pool(DRAFT, dtype)
  run = functools.partial(decode, inputs, DRAFT, implementation, state=pool, state_indices=slots)
  o, updated, states = run(output_intermediate_states=True)
  draft_o, same, draft_states = run(output_intermediate_states=True, update_state=False)
  assert_same_bits(dict(pool=same), dict(pool=pool), "update_state=False")
  expected = dict(o=o, states=states)
  actual = dict(o=draft_o, states=draft_states)
  assert_same(actual, expected, implementation, "update_state=False")
  live, at = np.array([0, 1, 3]), slots[np.array([0, 1, 3])]
  assert_same_bits(dict(last=states[live, -1]), dict(last=updated[at]), "states after each token")
  draft_o, same = run(update_state=False)
  assert_same_bits(dict(pool=same), dict(pool=pool), "nothing but o")
  assert_same(dict(o=draft_o), dict(o=o), implementation, "nothing but o")


@pytest.mark.parametrize("implementation", KERNELS)
def test_bits_do_not_depend_on_the_company(implementation):
  """Request 2 alone in a pool of one, and among others in a pool of four."""
  inputs, pool = streams(DRAFT), make_pool(DRAFT)
  slots = jnp.array([1, -1, 3, 0])
  o, after = decode(inputs, DRAFT, implementation, state=pool, state_indices=slots)
  alone = {name: x[2:3] for name, x in inputs.items()}
  kwargs = dict(state=pool[3:], state_indices=jnp.array([0]))
  expected = dict(zip(("o", "pool"), decode(alone, DRAFT, implementation, **kwargs), strict=True))
  assert_same_bits(dict(o=o[2:3], pool=after[3:]), expected, "a request among others")


# Prefill

# Tokens of each prefill, and how many are decoded after that.
PLANS = {
  "64+136": ([64, 136], 0),
  "1+199": ([1, 199], 0),
  "63+1+136": ([63, 1, 136], 0),
  "196+ones": ([196, 1, 1, 1, 1], 0),
  "150+decode": ([150], 50),
  "decode": ([], 200),
}


def prefill_row(row, offsets, slots, pool, implementation, output_chunk_states=True):
  """Prefills the row's four sequences: o, the pool and the states at the chunks' starts."""
  return prefill(
    row, ROW, implementation, cu_seqlens=np.array(offsets), state_indices=np.array(slots),
    state=pool, output_chunk_states=output_chunk_states,
  )  # fmt: skip


def prefill_request(inputs, pool, implementation, dtype="float32"):
  """Prefills one request of up to 200 tokens, in slot 2, among three that are skipped."""
  n = inputs["q"].shape[1]
  empty = streams(dataclasses.replace(ROW, dtype=dtype))
  row = {name: np.full_like(x, np.nan) for name, x in empty.items()}
  for name, x in inputs.items():
    row[name][:, : x.shape[1]] = x
  o, pool, _ = prefill_row(row, [0, 0, n, n, n], [-1, 2, -1, -1], pool, implementation)
  assert not np.any(o[:, n:])
  return o[:, :n], pool


@functools.cache
def whole_request(implementation):
  """The request in one call, or in the recurrence."""
  inputs, pool = streams(ROW), make_pool(ROW)
  if implementation == "recurrence":
    expected = recurrence(inputs, ROW, pool[2:3])
    return dict(o=expected["o"], state=expected["final_state"][0])
  o, pool = prefill_request(inputs, pool, implementation)
  return dict(o=o, state=pool[2])


@pytest.mark.parametrize(("pieces", "decoded"), PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pieces_equal_one_call(implementation, pieces, decoded):
  inputs, before = streams(ROW), make_pool(ROW)
  start, pool, o = 0, before, []
  for n in pieces:
    o_piece, pool = prefill_request(cut(inputs, start, start + n), pool, implementation)
    o.append(o_piece)
    start += n
  # [1, 200, M or 1, ...] -> one token of four requests, of which three are padding of NaN
  by_token = {name: x.reshape(1, 200, -1, *x.shape[2:]) for name, x in inputs.items()}
  for t in range(start, start + decoded):
    token = {}
    for name, x in by_token.items():
      token[name] = np.full((4, *x.shape[2:]), np.nan, x.dtype)
      token[name][1] = x[0, t]
    slots = jnp.array([-1, 2, -1, -1])
    o_token, pool = decode(token, ROW, implementation, state=pool, state_indices=slots)
    o.append(o_token[1:2])
  actual = dict(o=np.concatenate(o, axis=1), state=pool[2])
  for other in (implementation, "recurrence"):
    what = f"{pieces[:3]}, {decoded} decoded, against {other}"
    assert_close(actual, whole_request(other), BOUNDS["float32"], what)
  assert_slots_untouched(pool, before, [2], "prefill and decode")


@pytest.mark.parametrize(
  ("implementation", "dtype"),
  [
    ("xla", "float32"),
    ("xla", "bfloat16"),
    ("interpret", "float32"),
    pytest.param("pallas", "float32", marks=pytest.mark.gpu),
    pytest.param("pallas", "bfloat16", marks=pytest.mark.gpu),
  ],
)
def test_mixed_lengths(implementation, dtype):
  """Requests of 1, 65, 40 (skipped) and 90 tokens, four of padding; then a token for each."""
  offsets, slots = np.array([0, 1, 66, 106, 196]), np.array([3, 0, -1, 1])
  inputs, before = streams(ROW), make_pool(ROW, dtype)
  row = {name: x.copy() for name, x in inputs.items()}
  for start, stop in ((66, 106), (196, 200)):
    for x in cut(row, start, stop).values():  # views of the row's arrays
      x[:] = np.nan
  o, pool, h = prefill_row(row, offsets, slots, before, implementation)
  assert pool.dtype == before.dtype
  assert not np.any(o[:, 66:106])
  assert not np.any(o[:, 196:])
  assert_slots_untouched(pool, before, [3, 0, 1], "mixed lengths")
  # The requests' chunks: one of the first, then two, one (skipped), two.
  for chunk, slot in ((0, 3), (1, 0), (4, 1)):
    start = dict(h=before[slot].astype(np.float32))
    assert_close(dict(h=h[0, chunk]), start, 0, f"chunk {chunk}")
  assert np.any(h[0, 2])
  assert np.any(h[0, 5])
  assert not np.any(h[0, np.array([3, 6])])

  wide = before.astype(np.float32)
  o_expected, expected = reference(ROW.M, ROW.l2norm)(
    **inputs, initial_state=wide[jnp.asarray(slots)], cu_seqlens=offsets
  )
  for n in (0, 1, 3):
    part = slice(offsets[n], offsets[n + 1])
    assert_close(dict(o=o[:, part]), dict(o=o_expected[:, part]), BOUNDS["float32"], f"request {n}")
    actual = dict(state=pool[slots[n]].astype(np.float32))
    assert_close(actual, dict(state=expected[n]), BOUNDS[dtype], f"request {n}")

  order = np.array([3, 2, 0, 1])  # of the requests, in the next step's batch
  token = cut(streams(DRAFT), 0, 1)
  o, pool = decode(token, ROW, implementation, state=pool, state_indices=slots[order])
  next_expected = recurrence(token, ROW, np.asarray(expected)[order])
  assert not np.any(o[1])
  for i in (0, 2, 3):
    actual = dict(o=o[i], state=pool[slots[order[i]]].astype(np.float32))
    state = next_expected["final_state"][i]
    assert_close(actual, dict(o=next_expected["o"][i], state=state), BOUNDS[dtype], f"token {i}")
  assert_slots_untouched(pool, before, [3, 0, 1], "decode after mixed lengths")


@pytest.mark.parametrize("implementation", ["xla", PALLAS])
def test_prefill_of_a_batch_then_decode(implementation):
  case = Case("K32-V64", B=3, T=20, M=2, H=1, HV=2, K=32, V=64, initial_state=False)
  inputs, pool = streams(case), make_pool(case)
  slots, live = jnp.array([3, -1, 1]), np.array([0, 2])
  expected = recurrence(inputs, case, pool[slots])
  inputs, before, outputs = with_nan(inputs, 1), pool, []
  o, pool = prefill(cut(inputs, 0, 17), case, implementation, state=pool, state_indices=slots)
  outputs.append(o)
  for start, stop in ((17, 18), (18, 20)):
    piece = cut(inputs, start, stop)
    o, pool = decode(piece, case, implementation, state=pool, state_indices=slots)
    outputs.append(o)
  o = np.concatenate(outputs, axis=1)
  assert not np.any(o[1])
  actual = dict(o=o[live], state=pool[slots[live]])
  expected = dict(o=expected["o"][live], state=expected["final_state"][live])
  assert_close(actual, expected, BOUNDS["float32"], case.name)
  assert_slots_untouched(pool, before, [3, 1], case.name)


def test_prefill_of_slots_outside_the_pool():
  inputs, before = streams(ROW), make_pool(ROW)
  offsets, slots = [0, 50, 100, 150, 200], [4, 1, 2**31 - 1, -(2**31)]
  o, pool, _ = prefill_row(inputs, offsets, slots, before, "xla")
  assert not np.any(np.delete(o, np.s_[50:100], axis=1))
  assert_slots_untouched(pool, before, [1], "slots outside the pool")
  assert np.any(pool[1] != before[1])


def test_empty_and_absent_requests_leave_the_pool():
  """Every request is empty, or there are no tokens at all; also in a pool of bf16."""
  before = make_pool(ROW, "bfloat16")
  for T in (200, 0):
    row = cut(streams(ROW), 0, T)
    o, pool, _ = prefill_row(row, [0] * 5, [2, 0, -1, 3], before, "xla")
    assert not np.any(o)
    assert_same_bits(dict(pool=pool), dict(pool=before), f"{T} tokens of padding")


@pytest.mark.parametrize("implementation", [None, PALLAS])
def test_gradients_through_a_pool(implementation):
  """They are those with the slots as initial states, and 0 where a request is skipped."""
  case = Case("gradients", B=3, T=20, H=1, HV=2, K=16, V=24, l2norm=True)
  inputs, pool = make_inputs(case), make_pool(case)
  slots, live = jnp.array([2, -1, 0]), np.array([0, 2])
  shape = (case.B, case.T, case.HV, case.V)
  do = np.random.default_rng(2).standard_normal(shape).astype(np.float32)

  def with_pool(inputs, pool):
    o, after = prefilling(case, implementation)(**inputs, state=pool, state_indices=slots)
    return jnp.sum(o * do) + jnp.sum(after**2)

  def with_states(inputs):
    o, final_state = prefilling(case, implementation, output_final_state=True)(**inputs)
    return jnp.sum(o * do[live]) + jnp.sum(final_state**2)

  del inputs["initial_state"]
  actual, dpool = quick_jit(jax.grad(with_pool, argnums=(0, 1)))(with_nan(inputs, 1), pool)
  chex.assert_tree_all_finite((actual, dpool))
  states = {name: x[live] for name, x in inputs.items()} | dict(initial_state=pool[slots[live]])
  expected = quick_jit(jax.grad(with_states))(states)
  for name, dx in actual.items():
    assert not np.any(dx[1]), name
    assert_close({name: dx[live]}, {name: expected[name]}, 1e-5, "gradients")
  actual = dict(initial_state=dpool[slots[live]])
  assert_close(actual, dict(initial_state=expected["initial_state"]), 1e-5, "gradients")


# Speculation


def server_steps(case, implementation):
  """What a server jits: functions of a pool and other arrays, which return the pool and o."""
  decode, prefill = decoding(case, implementation), prefilling(case, implementation)
  options = dict(output_intermediate_states=True, update_state=False)
  draft = decoding(case, implementation, **options)

  def decode_step(pool, inputs, slots):
    return decode(**inputs, state=pool, state_indices=slots)[::-1]

  def prefill_step(pool, inputs, slots, offsets=None):
    return prefill(**inputs, state=pool, state_indices=slots, cu_seqlens=offsets)[::-1]

  def speculate_step(pool, inputs, slots, accepted):
    o, pool, states = draft(**inputs, state=pool, state_indices=slots)
    return rollback(pool, states, slots, accepted), o

  return dict(decode=decode_step, prefill=prefill_step, speculate=speculate_step)


@each_pool
def test_speculation_and_rollback(implementation, dtype):
  """Equals never having speculated, to the bit."""
  slots = np.array([2, 0, -1, 3])
  inputs, before = streams(DRAFT), make_pool(DRAFT, dtype)
  token = cut(streams(dataclasses.replace(DRAFT, seed=1)), 0, 1)
  run = functools.partial(decode, case=DRAFT, implementation=implementation)
  speculate = quick_jit(server_steps(DRAFT, implementation)["speculate"])

  for accepted in ([0, 1, 4, 2], [4, 3, 0, 0]):
    pool, draft_o = speculate(before, inputs, slots, np.array(accepted))
    after_draft, _ = run(token, state=pool, state_indices=slots)

    expected = before
    for t in range(DRAFT.T):
      accepting = np.where(np.array(accepted) > t, slots, -1)
      o, expected = run(cut(inputs, t, t + 1), state=expected, state_indices=accepting)
      at = accepting >= 0
      what = f"accepted {accepted}, token {t}"
      if np.any(at):
        assert_same(dict(o=draft_o[at, t]), dict(o=o[at, 0]), implementation, what)
    assert_same(dict(pool=pool), dict(pool=expected), implementation, f"accepted {accepted}")
    o, _ = run(token, state=expected, state_indices=slots)
    what = f"after {accepted} accepted"
    assert_same(dict(o=after_draft), dict(o=o), implementation, what)


def test_rollback_takes_numpy_arrays():
  pool, states = np.zeros((4, 1, 2, 2), np.float32), np.ones((2, 3, 1, 2, 2), np.float32)
  for slots in (np.array([2, -1]), [2, -1]):
    rolled = rollback(pool, states, slots, np.array([1, 3]))
    assert np.asarray(rolled)[:, 0, 0, 0].tolist() == [0, 0, 1, 0]


# States at the chunks' starts, for prefix caching


def states_every_64_tokens(inputs, case, state):
  """The recurrence's states at tokens 0, 64, .. of a batch [B, T]: a list of [B, HV, K, V]."""
  states = [state] if inputs["q"].shape[1] else []
  for t in range(64, inputs["q"].shape[1], 64):
    _, state = reference(case.M, case.l2norm)(**cut(inputs, t - 64, t), initial_state=state)
    states.append(state)
  return states


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunk_states(implementation, dtype):
  """Of 0, 20 and 130 tokens and none, then padding; and the last 66 from a state of them."""
  case = dataclasses.replace(ROW, dtype=dtype)
  inputs, pool = streams(case), make_pool(case)
  offsets, slots = [0, 0, 20, 150, 150], [3, 2, 1, 0]
  o, after, h = prefill_row(inputs, offsets, slots, pool, implementation)
  actual = dict(o=o, pool=after)
  o, after = prefill_row(inputs, offsets, slots, pool, implementation, output_chunk_states=False)
  assert_same(actual, dict(o=o, pool=after), implementation, "output_chunk_states")

  assert h.dtype == jnp.dtype(dtype)
  wide = {name: x.astype(np.float32) for name, x in inputs.items()}
  expected = []
  for n, (start, stop) in enumerate(itertools.pairwise(offsets)):
    at = slots[n]
    expected += states_every_64_tokens(cut(wide, start, stop), case, pool[at : at + 1])
  used = len(expected)
  bound = BOUNDS[dtype]
  assert_close(dict(h=h[:, :used]), dict(h=np.stack(expected, axis=1)), bound, "packed")
  assert not np.any(h[:, used:])

  third = h[0, 2].astype(jnp.float32)  # where 84 tokens of the row are over
  pool = pool.at[2].set(third)
  resumed, _ = prefill_request(cut(inputs, 84, 150), pool, implementation, dtype)
  assert_close(dict(o=resumed), dict(o=o[:, 84:150]), 2 * bound, "resumed")


@pytest.mark.parametrize("implementation", ["xla", PALLAS])
def test_chunk_states_of_a_batch(implementation):
  case = Case("fixed", T=130)
  inputs = make_inputs(case)
  _, _, h = prefill(inputs, case, implementation, output_final_state=True, output_chunk_states=True)
  state = inputs.pop("initial_state")
  expected = np.stack(states_every_64_tokens(inputs, case, state), axis=1)
  assert_close(dict(h=h), dict(h=expected), BOUNDS["float32"], case.name)


def test_chunk_states_of_fp16():
  """They are fp32: a state may exceed fp16's range where the output does not."""
  case = dataclasses.replace(ROW, dtype="float16")
  run = prefilling(case, None, output_chunk_states=True)
  o, _, h = jax.eval_shape(lambda x: run(**x), streams(case))
  chex.assert_type([o, h], [jnp.float16, jnp.float32])


# Running


@pytest.mark.parametrize("implementation", ["xla", PALLAS])
def test_one_trace_and_no_transfer(implementation):
  """A server's three steps, with other slots, lengths and numbers of accepted tokens."""
  traces = []
  N, row = SMALL.B, dataclasses.replace(SMALL, B=1, T=20)

  def traced(name, f):
    def g(*args):
      traces.append(name)
      return f(*args)

    return quick_jit(g)

  steps = {name: traced(name, f) for name, f in server_steps(SMALL, implementation).items()}

  rng = np.random.default_rng(0)
  plans = []
  for _ in range(10):
    offsets = np.array([0, *np.sort(rng.integers(0, 21, N))], np.int32)
    slots = rng.permutation(np.array([-1, -1, 0, 1, 2, 3], np.int32))[:N]
    plans.append((offsets, slots, rng.integers(0, SMALL.T + 1, N).astype(np.int32)))
  before = make_pool(SMALL)
  inputs, tokens = streams(row), streams(SMALL)
  on_device = jax.device_put((inputs, tokens, plans))
  outputs = []
  with jax.transfer_guard("disallow"):
    pool = before
    x_row, x, plans_on_device = on_device
    for offsets, slots, accepted in plans_on_device:
      pool, o_row = steps["prefill"](pool, x_row, slots, offsets)
      pool, o = steps["decode"](pool, x, slots)
      pool, draft_o = steps["speculate"](pool, x, slots, accepted)
      outputs.append((o_row, o, draft_o))
    jax.block_until_ready(outputs)
  assert traces == ["prefill", "decode", "speculate"]

  expected = np.array(before)
  for (offsets, slots, accepted), (o_row, o, draft_o) in zip(plans, outputs, strict=True):
    live = slots >= 0
    expected_row, states = reference(row.M, row.l2norm)(
      **inputs, initial_state=expected[slots], cu_seqlens=offsets
    )
    skipped = np.concatenate([np.repeat(~live, np.diff(offsets)), np.ones(20 - offsets[-1], bool)])
    expected_row = np.where(skipped[None, :, None, None], 0, expected_row)
    assert_close(dict(o=o_row), dict(o=expected_row), BOUNDS["float32"], f"prefill {offsets}")
    decoded = recurrence(tokens, SMALL, states)
    drafted = recurrence(tokens, SMALL, decoded["final_state"])
    after = np.concatenate([decoded["final_state"][:, None], drafted["states"]], axis=1)
    expected[slots[live]] = after[np.arange(N), accepted][live]
    for name, actual, outputs_of in (("decode", o, decoded), ("draft", draft_o, drafted)):
      zeroed = np.where(live[:, None, None, None], outputs_of["o"], 0)
      assert_close({name: actual}, {name: zeroed}, BOUNDS["float32"], f"slots {slots}")
  assert_close(dict(pool=pool), dict(pool=expected), BOUNDS["float32"], "the pool in the end")


def test_slots_of_the_host_are_sent_explicitly():
  inputs, pool = jax.device_put((streams(SMALL), make_pool(SMALL)))
  with jax.transfer_guard("disallow"):
    for slots in ([2, -1, 0], (1, 2, 3), np.array([-1, -1, 3])):
      decoding(SMALL, "xla")(**inputs, state=pool, state_indices=slots)


@pytest.mark.parametrize("step", ["decode", "prefill", "speculate"])
@pytest.mark.parametrize("implementation", ["xla", PALLAS])
def test_donated_pool(implementation, step):
  # On a GPU large beside all else that a step holds, so that a copy of it would show.
  on_gpu = jax.default_backend() == "gpu"
  before = np.asarray(make_pool(SMALL, "bfloat16", S=4096 if on_gpu else 4))
  f = server_steps(SMALL, implementation)[step]
  args = [streams(SMALL), np.array([2, -1, 0], np.int32)]
  args += [np.array([2, 1, 0])] if step == "speculate" else []
  args = jax.device_put(args)
  names = ("pool", "o")
  expected = dict(zip(names, quick_jit(f)(before, *args), strict=True))

  pool = jax.block_until_ready(jnp.array(before))
  pointer = pool.unsafe_buffer_pointer()
  donating = quick_jit(f, donate_argnums=0)
  actual = dict(zip(names, donating(pool, *args), strict=True))
  assert pool.is_deleted()
  assert_same(actual, expected, implementation, "a donated pool")
  if on_gpu:
    assert actual["pool"].unsafe_buffer_pointer() == pointer
    memory = donating.lower(actual["pool"], *args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < before.nbytes // 2, "the pool is copied"


@pytest.mark.parametrize("implementation", KERNELS)
def test_vmap(implementation):
  """Over inputs, slots and pools at once, and over inputs and states without a pool."""
  cases = [dataclasses.replace(SMALL, seed=seed, initial_state=True) for seed in range(2)]
  inputs = [make_inputs(case) for case in cases]
  pools = np.stack([make_pool(case) for case in cases])
  stacked = {name: np.stack([x[name] for x in inputs]) for name in inputs[0]}
  f = decoding(SMALL, implementation, output_final_state=True)
  o, final_state = quick_jit(jax.vmap(lambda inputs: f(**inputs)))(stacked)
  for i, x in enumerate(inputs):
    expected = recurrence(cut(streams(cases[i]), 0, SMALL.T), SMALL, x["initial_state"])
    actual = dict(o=o[i], final_state=final_state[i])
    del expected["states"]
    assert_close(actual, expected, BOUNDS["float32"], f"vmap, {i}")

  del stacked["initial_state"]
  slots = np.array([[2, -1, 0], [-1, 1, 3]], np.int32)
  f = server_steps(SMALL, implementation)["decode"]
  after, o = quick_jit(jax.vmap(f))(pools, stacked, slots)
  for i, case in enumerate(cases):
    actual = dict(o=o[i], pool=after[i])
    args = pools[i], streams(case), slots[i]
    expected = dict(zip(("pool", "o"), quick_jit(f)(*args), strict=True))
    assert_close(actual, expected, BOUNDS["float32"], f"vmap over pools, {i}")


@pytest.mark.parametrize("implementation", ["xla", None, "interpret", PALLAS])
def test_no_gradient(implementation):
  inputs, pool = streams(SMALL), make_pool(SMALL)
  slots = jnp.array([2, -1, 0])

  def loss(v, **kwargs):
    return jnp.sum(decoding(SMALL, implementation)(**inputs | dict(v=v), **kwargs)[0])

  for f in (loss, functools.partial(loss, state=pool, state_indices=slots)):
    for g in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.checkpoint(f))):
      with pytest.raises(NotImplementedError, match="train with chunk_gated_delta_product"):
        g(inputs["v"])
    with pytest.raises(NotImplementedError, match="train with chunk_gated_delta_product"):
      jax.jvp(f, (inputs["v"],), (inputs["v"],))


@pytest.mark.gpu
def test_30_runs_give_the_same_bits():
  case = Case("runs", B=32, T=4, H=4, HV=8, K=128, V=128, dtype="bfloat16", initial_state=False)
  inputs, pool = jax.device_put((streams(case), make_pool(case, S=40)))
  slots = jnp.arange(32)[::-1]
  run = lambda: decode(inputs, case, "pallas", state=pool, state_indices=slots)
  expected = dict(zip(("o", "pool"), run(), strict=True))
  for i in range(30):
    assert_same_bits(dict(zip(("o", "pool"), run(), strict=True)), expected, f"run {i}")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_a_pool_of_more_than_2_31_elements(implementation):
  """16400 slots of 8 heads of 128 x 128: the last ones against a pool that holds only these."""
  case = Case("large", B=3, T=4, H=4, HV=8, K=128, V=128, dtype="bfloat16", initial_state=False)
  S = 16400
  inputs = jax.device_put(streams(case))
  small = make_pool(case, "bfloat16", S=2)
  assert S * small[0].size > 2**31
  fill = jax.jit(lambda x: jnp.zeros((S, *x.shape[1:]), x.dtype).at[S - 2 :].set(x))
  untouched = jax.jit(lambda pool: ~jnp.any(pool[:-2]))
  steps = server_steps(case, implementation)

  @functools.partial(jax.jit, donate_argnums=0)
  def serve(pool, slots):
    pool, o = steps["prefill"](pool, inputs, slots)
    pool, o_next = steps["decode"](pool, inputs, slots)
    pool, draft_o = steps["speculate"](pool, inputs, slots, jnp.array([2, 4, 3]))
    return pool, dict(o=o, o_next=o_next, draft_o=draft_o)

  pool, actual = serve(fill(small), jnp.array([S - 1, -1, S - 2]))
  assert untouched(pool)
  small, expected = serve(small, jnp.array([1, -1, 0]))
  assert np.any(expected["draft_o"][0])
  actual, expected = actual | dict(pool=pool[-2:]), expected | dict(pool=small)
  assert_same(actual, expected, implementation, "the last slots")


# Lowering

LOWERED = {
  "float32": (Case("K128-V128", B=4, T=2, K=128, V=128), "float32"),
  "bfloat16": (
    Case("K128-V128", B=4, T=1, K=128, V=128, dtype="bfloat16", l2norm=True),
    "bfloat16",
  ),
  "K24-V40": (Case("K24-V40", B=4, T=2, K=24, V=40, gate=None), "float32"),
  "K256-V512": (Case("K256-V512", B=4, T=2, K=256, V=512, dtype="float16"), "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["pallas", None])
@pytest.mark.parametrize(("case", "dtype"), LOWERED.values(), ids=LOWERED.keys())
def test_lowering(case, dtype, implementation):
  shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  inputs = shapes(make_inputs(case))
  pool, slots = shapes((make_pool(case, dtype), jnp.arange(4)))
  run = decoding(case, implementation, output_intermediate_states=True)
  alone = lambda inputs: run(**inputs, output_final_state=True)
  assert count_kernels(lower_for_cuda(alone, inputs)) == 1

  del inputs["initial_state"]
  in_place = "output_operand_alias"
  step = lambda inputs, pool, slots: run(**inputs, state=pool, state_indices=slots)
  text = lower_for_cuda(step, inputs, pool, slots)
  assert count_kernels(text) == 1
  assert in_place in text
  draft = functools.partial(run, update_state=False)
  step = lambda inputs, pool, slots: draft(**inputs, state=pool, state_indices=slots)
  text = lower_for_cuda(step, inputs, pool, slots)
  assert count_kernels(text) == 1
  assert in_place not in text


def test_lowering_of_prefill():
  shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  args = shapes((streams(ROW), make_pool(ROW, "bfloat16"), jnp.arange(4), jnp.arange(5)))
  run = prefilling(ROW, None, output_chunk_states=True)
  f = lambda x, pool, slots, offsets: run(**x, state=pool, state_indices=slots, cu_seqlens=offsets)
  assert count_kernels(lower_for_cuda(f, *args)) == 6


# Errors

ERRORS = Case("errors", B=2, T=4, M=2, H=2, HV=4, K=8, V=16, initial_state=False)
DECODE, PREFILL = fused_recurrent_gated_delta_product, chunk_gated_delta_product


def zeros(*shape, dtype=np.float32):
  return np.zeros(shape, dtype)


POOL = zeros(3, 4, 8, 16)
BAD_POOLS = {
  "no-slots": (dict(state_indices=None), ValueError, ["state and state_indices", "only state"]),
  "no-pool": (dict(state=None), ValueError, ["state and state_indices", "only state_indices"]),
  "two-states": (
    dict(initial_state=zeros(2, 4, 8, 16)),
    ValueError,
    ["initial_state cannot be combined with state"],
  ),
  "final-state": (
    dict(output_final_state=True),
    ValueError,
    ["output_final_state cannot be combined with state"],
  ),
  "list": (dict(state=[0.0]), TypeError, ["state must be a JAX or NumPy array", "list"]),
  "float16": (
    dict(state=POOL.astype(np.float16)),
    TypeError,
    ["state must have dtype float32 or bfloat16", "float16"],
  ),
  "int": (dict(state=POOL.astype(np.int32)), TypeError, ["state must have dtype", "int32"]),
  "float64": (dict(state=POOL.astype(np.float64)), TypeError, ["state must have", "float64"]),
  "3d": (dict(state=POOL[0]), ValueError, ["state must", "[S, HV, K, V]", "(4, 8, 16)"]),
  "no-slot": (dict(state=POOL[:0]), ValueError, ["state must", "S >= 1", "(0, 4, 8, 16)"]),
  "swapped": (
    dict(state=zeros(3, 4, 16, 8)),
    ValueError,
    ["state must", "[HV, K, V] = (4, 8, 16)", "(3, 4, 16, 8)"],
  ),
  "slots-number": (
    dict(state_indices=1),
    TypeError,
    ["state_indices must be an array, list or tuple", "1", "int"],
  ),
  "slots-float": (
    dict(state_indices=[0.0, 1.0]),
    TypeError,
    ["state_indices must have a signed integer dtype", "float64"],
  ),
  "slots-unsigned": (
    dict(state_indices=np.array([0, 1], np.uint32)),
    TypeError,
    ["state_indices must have a signed integer dtype", "uint32"],
  ),
  "slots-shape": (
    dict(state_indices=jnp.arange(3)),
    ValueError,
    ["state_indices must have shape [N] = (2,)", "(3,)"],
  ),
  "slots-2d": (dict(state_indices=[[0, 1]]), ValueError, ["state_indices", "(2,)", "(1, 2)"]),
  "slot-3": (
    dict(state_indices=[0, 3]),
    ValueError,
    ["state_indices must be -1 or in [0, S) with S=3", "3"],
  ),
  "slot-minus-2": (dict(state_indices=(-2, 0)), ValueError, ["state_indices must be -1", "-2"]),
  "slot-twice": (
    dict(state_indices=np.array([2, 2])),
    ValueError,
    ["state_indices must not name a slot twice", "[2, 2]"],
  ),
}


@pytest.mark.parametrize("operator", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize(("changed", "error", "parts"), BAD_POOLS.values(), ids=BAD_POOLS.keys())
def test_bad_pool(operator, changed, error, parts):
  kwargs = streams(ERRORS) | dict(num_householder=ERRORS.M, state=POOL, state_indices=[0, 1])
  assert_raises(error, parts, operator, **kwargs | changed)


def test_slots_of_packed_sequences():
  """There are as many as sequences, not as batch rows."""
  case = dataclasses.replace(ERRORS, B=1)
  kwargs = streams(case) | dict(num_householder=case.M, state=POOL, cu_seqlens=[0, 1, 4])
  parts = ["state_indices must have shape [N] = (2,)", "(1,)"]
  assert_raises(ValueError, parts, PREFILL, **kwargs, state_indices=[0])


BAD_DECODES = {
  "T0": (
    streams(dataclasses.replace(ERRORS, T=0)),
    ValueError,
    ["q must have at least one token", "(2, 0, 2, 8)"],
  ),
  "not-updated": (dict(update_state=False), ValueError, ["update_state=False needs state"]),
  "M": (dict(num_householder=3), ValueError, ["k must have shape", "num_householder=3"]),
  "M-kind": (dict(num_householder=2.0), TypeError, ["num_householder must be a Python int"]),
  "scale": (dict(scale=float("nan")), ValueError, ["scale must be finite", "nan"]),
  "dtype": (dict(v=zeros(2, 8, 4, 16, dtype=np.float16)), TypeError, ["v must have q's dtype"]),
  "g": (dict(g=zeros(2, 8, 4)), ValueError, ["g must have shape", "(2, 4, 4)", "(2, 8, 4)"]),
  "beta": (dict(beta=zeros(2, 4, 4)), ValueError, ["beta must have shape", "(2, 8, 4)"]),
  "initial-state": (
    dict(initial_state=zeros(1, 4, 8, 16)),
    ValueError,
    ["initial_state must have shape", "(2, 4, 8, 16)", "(1, 4, 8, 16)"],
  ),
  "implementation": (dict(implementation="cuda"), ValueError, ["implementation", "'cuda'"]),
  "wide-heads": (
    dict(q=zeros(2, 4, 2, 257), k=zeros(2, 8, 2, 257), implementation="interpret"),
    NotImplementedError,
    ["K=256", "K=257", "'interpret'"],
  ),
}


@pytest.mark.parametrize(
  ("changed", "error", "parts"), BAD_DECODES.values(), ids=BAD_DECODES.keys()
)
def test_bad_decode(changed, error, parts):
  kwargs = streams(ERRORS) | dict(num_householder=ERRORS.M)
  assert_raises(error, parts, DECODE, **kwargs | changed)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without a GPU")
def test_pallas_without_a_gpu_does_not_fall_back():
  kwargs = streams(ERRORS) | dict(num_householder=ERRORS.M, implementation="pallas")
  assert_raises(ValueError, ["interpret"], DECODE, **kwargs)


BAD_ROLLBACKS = {
  "states-4d": (
    dict(intermediate_states=zeros(2, 4, 8, 16)),
    ValueError,
    ["intermediate_states must have shape [N, T, HV, K, V]", "(2, 4, 8, 16)"],
  ),
  "states-list": (dict(intermediate_states=[0.0]), TypeError, ["intermediate_states", "list"]),
  "state-shape": (
    dict(state=zeros(3, 4, 16, 8)),
    ValueError,
    ["state must have shape", "(4, 8, 16)", "(3, 4, 16, 8)"],
  ),
  "no-pool": (dict(state=None), ValueError, ["state and state_indices"]),
  "slots-shape": (dict(state_indices=[0]), ValueError, ["state_indices", "(2,)", "(1,)"]),
  "slot-3": (dict(state_indices=[0, 3]), ValueError, ["state_indices", "S=3", "3"]),
  "slot-twice": (dict(state_indices=[1, 1]), ValueError, ["state_indices", "twice", "[1, 1]"]),
  "accepted-number": (dict(num_accepted=2), TypeError, ["num_accepted must be an array", "int"]),
  "accepted-float": (
    dict(num_accepted=zeros(2)),
    ValueError,
    ["num_accepted must be an integer array of shape [N] = (2,)", "float32"],
  ),
  "accepted-shape": (
    dict(num_accepted=np.array([1, 2, 3])),
    ValueError,
    ["num_accepted must be an integer array of shape [N] = (2,)", "(3,)"],
  ),
  "accepted-6": (dict(num_accepted=np.array([1, 6])), ValueError, ["num_accepted", "5", "6"]),
  "accepted-minus-1": (dict(num_accepted=np.array([-1, 5])), ValueError, ["num_accepted", "-1"]),
}


@pytest.mark.parametrize(
  ("changed", "error", "parts"), BAD_ROLLBACKS.values(), ids=BAD_ROLLBACKS.keys()
)
def test_bad_rollback(changed, error, parts):
  kwargs = dict(state=jnp.asarray(POOL), intermediate_states=zeros(2, 5, 4, 8, 16))
  kwargs |= dict(state_indices=[0, 1], num_accepted=np.array([1, 2]))
  assert_raises(error, parts, rollback, **kwargs | changed)


def test_the_stage_checks_its_arrays():
  x = streams(ERRORS)
  stage = functools.partial(
    kernels.fused_recurrent_gated_delta_product_fwd, scale=1.0, num_householder=ERRORS.M
  )
  slots = jnp.array([0, 1])
  assert_raises(
    ValueError, ["k must have shape", "N, R, H, K"], stage, **x | dict(k=x["k"][:, :, :1])
  )
  assert_raises(ValueError, ["state must have shape", "(3, 4, 16, 8)"], stage, **x,
                state=zeros(3, 4, 16, 8), state_indices=slots)  # fmt: skip
  assert_raises(ValueError, ["state must have shape", "(3, 4, 8, 16)"], stage, **x, state=POOL)
  assert_raises(ValueError, ["state_indices must have shape", "(3,)"], stage, **x, state=POOL,
                state_indices=jnp.arange(3))  # fmt: skip
  parts = ["implementation", "'xla'"]
  assert_raises(
    ValueError, parts, stage, **x, state=POOL, state_indices=slots, implementation="xla"
  )
