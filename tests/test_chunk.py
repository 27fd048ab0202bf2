"""The operator: every implementation against the recurrence, and the contracts it states.

The kernels' cases run compiled on a CUDA GPU; elsewhere a few of them run in interpret mode.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
  BOUNDS,
  IMPLEMENTATIONS,
  KERNELS,
  Case,
  assert_close,
  assert_same_bits,
  check,
  each,
  make_inputs,
  options,
  oracle,
  relative_error,
  run,
)

from gdp_jax import chunk_gated_delta_product, recurrent_gated_delta_product

STREAMS = ("q", "k", "v", "g", "beta")

# Compiling is what takes time here. Tests that are about values share these two shapes: three
# chunks, the last partial; and room for five sequences in four chunks and more.
BASE = Case("base", B=1, T=130)
PACKED = Case("packed", T=256, cu_seqlens=(0, 20, 90, 90, 190, 250))
base = functools.partial(dataclasses.replace, BASE)


def packed(*cu_seqlens, **changed):
  """PACKED with these offsets, the last one repeated."""
  padded = cu_seqlens + cu_seqlens[-1:] * (PACKED.N + 1 - len(cu_seqlens))
  return dataclasses.replace(PACKED, cu_seqlens=padded, **changed)


def on_stream(name, case, tokens):
  """A number of tokens as a number of rows, for the tensors that have M rows a token."""
  return tokens if name in ("q", "g") else tokens * case.M


def cut(inputs, case, start, stop):
  """The inputs of tokens start to stop."""
  pieces = {
    name: inputs[name][:, on_stream(name, case, start) : on_stream(name, case, stop)]
    for name in STREAMS
    if inputs[name] is not None
  }
  return inputs | pieces


# Numerics

VALUES = [
  base(name="weak"),
  *(base(name=f"gate{gate}", gate=float(gate)) for gate in (-1, -6, -20, -100)),
  base(name="strong", gate="strong"),
  base(name="spike", gate="spike"),
  base(name="zero-keys", keys="zero"),
  base(name="correlated", keys="correlated"),
]


@each(VALUES, interpret={case.name for case in VALUES})
def test_values(case, implementation):
  check(case, implementation)


# However L = I + A is inverted, the error may be eps |L^-1| |L| |L^-1| (Higham, Accuracy and
# Stability of Numerical Algorithms, section 14.2). Without decay nothing dampens what each of the
# five row chunks adds. An inverse in bf16 or tf32 would exceed this a hundredfold.
@pytest.mark.parametrize("beta", [1.0, 1.9, 2.0])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_identical_keys(implementation, beta):
  case = base(name=f"identical-beta{beta}", gate=0.0, keys="identical", beta=beta)
  L = np.eye(64) + np.tril(np.full((64, 64), beta), -1)
  inverse = np.linalg.inv(L)
  amplified = np.linalg.norm(abs(inverse) @ L @ abs(inverse)) / np.linalg.norm(inverse)
  row_chunks = -(-case.T * case.M // 64)
  bound = BOUNDS["float32"] + row_chunks * 2**-24 * amplified
  check(case, implementation, bound)


# A reset adds 152 to the sums of log2 decays, whose last bit is then 1.5e-5, and 6e-5 after four in
# one chunk: what is left of the weak gates beside them.
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_resets(implementation):
  check(base(name="reset", gate="reset"), implementation, bound=5e-5)


MORE_VALUES = [
  # Correlated keys amplify whatever precision the inverse lacks: bf16 or tf32 would show here.
  Case("correlated-M4", B=1, T=256, M=4, keys="correlated", K=64, V=32),
  base(name="no-gate-no-state", gate=None, initial_state=False),
]


@each(MORE_VALUES)
def test_more_values(case, implementation):
  check(case, implementation)


@pytest.mark.parametrize("implementation", ["xla", KERNELS[1]])
def test_correlated_keys_in_half_precision(implementation):
  # Ti has large entries of both signs here, whose rounding to bf16 is amplified: 1.3e-2 measured.
  case = Case("correlated", B=1, T=1024, keys="correlated", K=64, V=32, dtype="bfloat16")
  check(case, implementation, bound=2e-2)


DTYPES = [
  Case(f"{dtype}-M{M}", T=130, M=M, dtype=dtype)
  for dtype in ("bfloat16", "float16")
  for M in (1, 2, 4)
]


@each(DTYPES, xla={"bfloat16-M2", "float16-M1"}, interpret={"bfloat16-M2"})
def test_dtypes(case, implementation):
  check(case, implementation)


@pytest.mark.parametrize(
  ("implementation", "M"),
  [("xla", 2), *(pytest.param("pallas", M, marks=pytest.mark.gpu) for M in (1, 2, 4))],
)
def test_half_of_the_gates_are_0(implementation, M):
  for seed in range(20):
    check(base(name=f"half-zero-M{M}-{seed}", M=M, gate="half_zero", seed=seed), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_gate_equals_gates_of_0(implementation):
  zeros = run(base(gate=0.0), implementation)
  assert_close(run(base(gate=None), implementation), zeros, 1e-6, "g = None")


@pytest.mark.parametrize("implementation", ["xla", KERNELS[1]])
def test_l2norm(implementation):
  """Large vectors in bf16; and a zero key, a zero query, a key whose square underflows."""
  case = base(name="l2norm", l2norm=True, dtype="bfloat16")
  inputs = make_inputs(case)
  inputs["q"] *= 1000
  inputs["k"] *= 1000
  inputs["q"][:, 3] = inputs["k"][:, 7] = 0
  inputs["k"][:, 70] = 1e-20
  wide = inputs | {name: inputs[name].astype(np.float32) for name in "qkv"}
  expected = run(case, "recurrence", wide)
  chex.assert_tree_all_finite(expected)
  assert_close(run(case, implementation, inputs), expected, BOUNDS["bfloat16"], case.name)


# Shapes

LENGTHS = [
  Case(f"T{T}-M{M}", B=2, T=T, M=M) for T in (1, 2, 15, 17, 63, 65, 127) for M in (1, 2, 3)
]


@each(
  LENGTHS,
  xla={"T1-M1", "T15-M2", "T63-M3", "T127-M1"},
  interpret={"T65-M3"},
)
def test_lengths(case, implementation):
  check(case, implementation)


# Segments: of 128, 72 and 0 tokens; of whole chunks; with a reset in the second; of large heads.
SEGMENTS = [
  Case("three", T=200, num_segments=3),
  Case("no-gate", T=128, M=3, gate=None, initial_state=False, num_segments=2),
  Case("reset", T=128, M=1, gate="reset", dtype="bfloat16", num_segments=2),
  Case("float16", T=256, dtype="float16", l2norm=True, num_segments=4),
  Case("wide", B=1, T=128, H=1, HV=2, K=256, V=512, dtype="bfloat16", num_segments=2),
  Case("long", B=1, T=4096, K=128, V=128, gate=-0.01, dtype="bfloat16", num_segments=8),
]


@each(SEGMENTS, xla={"three", "no-gate", "float16"}, interpret={"three", "reset"})
def test_segments(case, implementation):
  check(case, implementation)


@pytest.mark.parametrize("implementation", ["xla", KERNELS[1]])
def test_chunk_states_of_segments(implementation):
  """The states at chunks' starts, of which there are as many as without segments."""
  case = Case("states", T=200, M=1)
  h, whole = (
    chunk_gated_delta_product(
      **make_inputs(case), output_chunk_states=True, num_segments=n, implementation=implementation
    )[2]
    for n in (3, 1)
  )
  assert_close(dict(h=h), dict(h=whole), BOUNDS["float32"], case.name)


# Widths meet gates nowhere: without them there is less to compile.
WIDTHS = [
  Case(f"K{K}-V{V}", B=1, T=127, H=1, HV=2, K=K, V=V, gate=None)
  for K in (16, 48, 60, 96, 100, 160, 192, 256)
  for V in (16, 60, 64, 128)
]
# Between them these meet every choice of `gdp_jax.config`.
WIDTHS += [
  Case(f"K{K}-V{V}-{dtype}", B=1, T=127, H=1, HV=2, K=K, V=V, dtype=dtype)
  for dtype in ("float32", "bfloat16")
  for K, V in ((8, 8), (32, 256), (64, 128), (128, 64), (128, 128), (256, 256), (256, 512))
]


# XLA knows no blocks.
@each(
  WIDTHS,
  xla={"K48-V16", "K100-V60", "K256-V512-float32"},
  interpret={"K100-V60"},
)
def test_widths(case, implementation):
  check(case, implementation)


AXES = [
  *(Case(f"T{T}-H{H}", T=T, H=H, HV=H) for T, H in ((4, 8), (8, 4), (8, 8))),
  Case("T3-M3-K8-V8", T=3, M=3, K=8, V=8),
  Case("square", B=1, T=8, M=1, H=8, HV=8, K=16, V=16),
]


@each(AXES, xla={"T8-H8", "T3-M3-K8-V8", "square"}, interpret={"T3-M3-K8-V8"})
def test_axes(case, implementation):
  check(case, implementation)


@pytest.mark.parametrize("implementation", ["xla", KERNELS[1]])
def test_each_value_head_reads_its_key_head(implementation):
  case = Case("gva", B=1, T=20, H=2, HV=6)
  inputs = make_inputs(case)
  inputs["v"] *= np.arange(1, 7, dtype=np.float32)[:, None]
  actual, expected = run(case, implementation, inputs), run(case, "recurrence", inputs)
  for i in range(case.HV):  # one by one, or the large ones hide the small
    head = lambda x, i=i: dict(o=x["o"][:, :, i], final_state=x["final_state"][:, i])
    assert_close(head(actual), head(expected), BOUNDS["float32"], f"value head {i}")


@pytest.mark.parametrize("implementation", [None, "xla", "interpret", KERNELS[1]])
@pytest.mark.parametrize("initial_state", [True, False])
def test_nothing_to_do(implementation, initial_state):
  for case in (
    Case("T0", T=0, initial_state=initial_state),
    Case("B0", B=0, initial_state=initial_state),
    Case("T0-packed", T=0, cu_seqlens=(0, 0, 0), initial_state=initial_state),
  ):
    inputs = make_inputs(case)
    o, final_state = chunk_gated_delta_product(
      **inputs, **options(case), implementation=implementation
    )
    chex.assert_shape(o, (case.B, case.T, case.HV, case.V))
    if inputs["initial_state"] is None:
      inputs["initial_state"] = np.zeros((case.N, case.HV, case.K, case.V), np.float32)
    chex.assert_trees_all_equal(final_state, inputs["initial_state"])


# Choosing an implementation


def test_the_default_under_jit():
  f = jax.jit(lambda inputs, **kw: chunk_gated_delta_product(**inputs, **options(BASE), **kw))
  check_against = "xla" if jax.default_backend() == "cpu" else "pallas"
  o, final_state = f(make_inputs(BASE))
  expected = run(BASE, check_against)
  assert_same_bits(dict(o=o, final_state=final_state), expected, "implementation=None")


def test_the_default_takes_wide_heads():
  case = Case("K300", B=1, T=20, H=1, HV=1, K=300, V=20)
  o, final_state = chunk_gated_delta_product(**make_inputs(case), **options(case))
  assert_close(dict(o=o, final_state=final_state), oracle(case), BOUNDS["float32"], case.name)


def test_the_final_state_is_optional():
  case = AXES[3]
  kwargs = options(case) | dict(output_final_state=False)
  o, final_state = chunk_gated_delta_product(**make_inputs(case), **kwargs, implementation="xla")
  assert final_state is None
  assert_close(dict(o=o), dict(o=oracle(case)["o"]), BOUNDS["float32"], case.name)


@pytest.mark.parametrize("implementation", ["xla", KERNELS[1]])
def test_mixed_dtypes_and_a_scale(implementation):
  case = Case("mixed", T=20, B=1, dtype="bfloat16")
  inputs = make_inputs(case)
  for name, dtype in (("g", np.float16), ("beta", jnp.bfloat16), ("initial_state", jnp.bfloat16)):
    inputs[name] = inputs[name].astype(dtype)
  kwargs = options(case) | dict(scale=0.7)
  o, state = chunk_gated_delta_product(**inputs, **kwargs, implementation=implementation)
  chex.assert_type([o, state], [jnp.bfloat16, jnp.float32])
  wide = {name: x.astype(np.float32) for name, x in inputs.items()}
  o_expected, state_expected = recurrent_gated_delta_product(**wide, **kwargs)
  expected = dict(o=o_expected, final_state=state_expected)
  assert_close(dict(o=o, final_state=state), expected, BOUNDS["bfloat16"], case.name)


def test_strict_dtype_promotion():
  case = Case("strict", B=1, T=20, dtype="bfloat16", l2norm=True)
  with jax.numpy_dtype_promotion("strict"):
    check(case, "xla")


# Packing

OFFSETS = [
  (0, 0, 64),
  (0, 128, 128, 256),
  (0, 3, 3, 3, 70, 70),
  (0, 0, 0),
  (0, 57, 59, 64),
  (0, 1, 2, 65, 193, 256),
  (0, 64, 127, 128, 192),
]
OFFSETS = [packed(*x, name="-".join(map(str, x))) for x in OFFSETS]


@each(OFFSETS, interpret={case.name for case in OFFSETS})
def test_offsets(case, implementation):
  actual = check(case, implementation)
  assert not np.any(actual["o"][:, case.valid_tokens :])


MORE_PACKED = [
  Case("short", T=64, M=3, cu_seqlens=(0, 57, 59, 64)),
  Case("no-gate", T=150, M=1, cu_seqlens=(0, 64, 65, 129), gate=None, initial_state=False),
  Case("strong-bf16", T=150, cu_seqlens=(0, 20, 64, 150), gate="strong", dtype="bfloat16"),
]


@each(MORE_PACKED, interpret={"no-gate"})
def test_more_packed(case, implementation):
  check(case, implementation)


MANY = [
  Case("2048-of-1", T=2048, M=1, H=32, HV=32, K=16, V=16, cu_seqlens=tuple(range(2049))),
  Case("100-of-1", T=100, M=1, H=4, HV=4, K=16, V=16, cu_seqlens=tuple(range(101))),
  Case("32-of-1-and-4096", T=4128, M=1, H=1, HV=2, K=64, V=32, cu_seqlens=(*range(33), 4128)),
]


@each(MANY, xla={"100-of-1"})
def test_many_sequences(case, implementation):
  check(case, implementation)


@pytest.mark.parametrize("implementation", ["xla", KERNELS[1]])
def test_repeated_last_offset_adds_empty_sequences(implementation):
  case = packed(0, 16, 40)
  inputs = make_inputs(case)
  actual = run(case, implementation, inputs)
  two = cut(inputs, case, 0, 40) | dict(initial_state=inputs["initial_state"][:2])
  expected = run(Case("two", T=40, cu_seqlens=(0, 16, 40)), implementation, two)
  for name, x in (("o", actual["o"][:, :40]), ("final_state", actual["final_state"][:2])):
    assert_close({name: x}, {name: expected[name]}, 1e-6, "repeated offsets")
  chex.assert_trees_all_equal(actual["final_state"][2:], inputs["initial_state"][2:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_may_hold_nan(implementation):
  case = packed(0, 50)
  inputs = make_inputs(case)
  expected = run(case, implementation, inputs)
  for name in STREAMS:
    inputs[name][:, on_stream(name, case, 50) :] = np.nan
  actual = run(case, implementation, inputs)
  assert_same_bits(actual, expected, "padding of NaN")
  assert not np.any(actual["o"][:, 50:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequences_do_not_touch_each_other(implementation):
  """Sequence 1 turns into NaN; the others keep their bits."""
  start, stop = PACKED.cu_seqlens[1:3]
  inputs = make_inputs(PACKED)
  expected = run(PACKED, implementation, inputs)
  for name in STREAMS:
    inputs[name][:, on_stream(name, PACKED, start) : on_stream(name, PACKED, stop)] = np.nan
  actual = run(PACKED, implementation, inputs)
  assert np.all(np.isnan(actual["o"][:, start:stop]))
  for outputs in (actual, expected):
    outputs["o"] = np.delete(outputs["o"], np.s_[start:stop], axis=1)
    outputs["final_state"] = np.delete(outputs["final_state"], 1, axis=0)
  assert_same_bits(actual, expected, "sequences beside one of NaN")


@pytest.mark.parametrize(
  ("implementation", "dtype"),
  [
    ("interpret", "float32"),
    pytest.param("pallas", "float32", marks=pytest.mark.gpu),
    pytest.param("pallas", "bfloat16", marks=pytest.mark.gpu),
  ],
)
@pytest.mark.parametrize("T", [130, 128])
def test_bits_do_not_depend_on_the_company(implementation, dtype, T):
  """A sequence alone, batched with another, and packed at offsets 1 and 63.

  Of 128 tokens, alone, all chunks are whole, and nothing is masked that packed is.
  """
  alone = base(dtype=dtype, T=T)
  inputs, other = make_inputs(alone), make_inputs(base(dtype=dtype, T=T, seed=1))
  expected = run(alone, implementation, inputs)

  batched = {name: np.concatenate([other[name], inputs[name]]) for name in inputs}
  actual = run(base(dtype=dtype, T=T, B=2), implementation, batched)
  assert_same_bits({name: x[1:] for name, x in actual.items()}, expected, "batched")

  for offset in (1, 63):
    stop = offset + alone.T
    case = packed(0, offset, stop, 256, dtype=dtype)
    row = make_inputs(case)
    for name in STREAMS:
      row[name][:, on_stream(name, case, offset) : on_stream(name, case, stop)] = inputs[name]
    row["initial_state"][1] = inputs["initial_state"][0]
    actual = run(case, implementation, row)
    actual = dict(o=actual["o"][:, offset:stop], final_state=actual["final_state"][1:2])
    assert_same_bits(actual, expected, f"packed at {offset}")


# State

SPLITS = {"64+136": [64, 136], "1+199": [1, 199], "63+1+136": [63, 1, 136], "ones": [1] * 200}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pieces_equal_one_call(implementation, split):
  # Each piece stands alone at the start of a buffer of NaN: one shape for all of them.
  whole = packed(0, 200)
  inputs = make_inputs(whole)
  start, state, o = 0, inputs["initial_state"], []
  for n in split:
    piece = {name: np.full_like(x, np.nan) for name, x in inputs.items()}
    for name, x in cut(inputs, whole, start, start + n).items():
      piece[name][:, : x.shape[1]] = x
    piece["initial_state"] = state
    outputs = run(packed(0, n), implementation, piece)
    o.append(outputs["o"][:, :n])
    start, state = start + n, outputs["final_state"]
  actual = dict(o=np.concatenate(o, axis=1), final_state=state)
  for expected in (run(whole, implementation), oracle(whole)):
    expected = expected | dict(o=expected["o"][:, :200])
    assert_close(actual, expected, BOUNDS["float32"], f"pieces of {split[:3]}")


@pytest.mark.parametrize("implementation", ["xla", KERNELS[1]])
def test_pieces_of_a_batch_equal_one_call(implementation):
  whole = base(B=2)
  half = base(B=2, T=65)
  inputs = make_inputs(whole)
  first = run(half, implementation, cut(inputs, whole, 0, 65))
  rest = cut(inputs, whole, 65, 130) | dict(initial_state=first["final_state"])
  second = run(half, implementation, rest)
  o = np.concatenate([first["o"], second["o"]], axis=1)
  actual = dict(o=o, final_state=second["final_state"])
  assert_close(actual, oracle(whole), BOUNDS["float32"], "two halves of a batch")


# Causality


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_causality(implementation):
  inputs, other = make_inputs(BASE), make_inputs(base(seed=1, gate="strong"))
  expected = run(BASE, implementation, inputs)["o"]
  for t in (1, 15, 63, 64, 100):
    changed = {name: x.copy() for name, x in inputs.items()}
    for name in STREAMS:
      start = on_stream(name, BASE, t)
      changed[name][:, start:] = other[name][:, start:]
    actual = run(BASE, implementation, changed)["o"]
    assert_same_bits(dict(o=actual[:, :t]), dict(o=expected[:, :t]), f"inputs changed from {t} on")
    assert np.all(np.any(actual[:, t:] != expected[:, t:], axis=(2, 3)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_passes_a_reset(implementation):
  """After a gate of -inf nothing depends on what was before, not even on large values."""
  for t in (1, 40, 64, 129):
    inputs, other = make_inputs(BASE), make_inputs(base(seed=1))
    inputs["g"][:, t] = -np.inf
    expected = run(BASE, implementation, inputs)
    for name in ("q", "k", "v", "beta"):
      stop = on_stream(name, BASE, t)
      inputs[name][:, :stop] = other[name][:, :stop]
    inputs["v"][:, : on_stream("v", BASE, t)] *= 1e6
    inputs["initial_state"] = 1e6 * other["initial_state"]
    actual = run(BASE, implementation, inputs)
    for outputs in (actual, expected):
      outputs["o"] = outputs["o"][:, t:]
    assert_same_bits(actual, expected, f"a reset at {t}")
    # Gates before it, in the same chunk, share a cumulative sum with those after it, and so move
    # the last bits.
    inputs["g"][:, :t] = -5
    actual = run(BASE, implementation, inputs)
    actual["o"] = actual["o"][:, t:]
    assert_close(actual, expected, 5e-5, f"other gates before a reset at {t}")


# Running

SMALL = Case("small", B=1, T=20, H=1, HV=2, K=16, V=16)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_trace_and_no_transfer(implementation):
  case = dataclasses.replace(SMALL, T=40, cu_seqlens=(0, 40, 40, 40, 40))
  traces = []

  @jax.jit
  def f(inputs, cu_seqlens):
    traces.append(1)
    kwargs = options(case) | dict(cu_seqlens=cu_seqlens)
    return chunk_gated_delta_product(**inputs, **kwargs, implementation=implementation)

  rng = np.random.default_rng(0)
  values = [np.array([0, *np.sort(rng.integers(0, 41, 4))], np.int32) for _ in range(20)]
  inputs, on_device = jax.device_put((make_inputs(case), values))
  with jax.transfer_guard("disallow"):
    outputs = jax.block_until_ready([f(inputs, offsets) for offsets in on_device])
  assert len(traces) == 1
  for offsets, (o, final_state) in zip(values, outputs, strict=True):
    same = dataclasses.replace(case, cu_seqlens=tuple(offsets.tolist()))
    actual = dict(o=o, final_state=final_state)
    expected = run(same, "recurrence", inputs)
    assert_close(actual, expected, BOUNDS["float32"], f"offsets {offsets}")


def test_a_list_of_offsets_is_sent_explicitly():
  case = dataclasses.replace(SMALL, cu_seqlens=(0, 5, 5, 20))
  inputs = jax.device_put(make_inputs(case))
  with jax.transfer_guard("disallow"):
    for offsets in ([0, 5, 5, 20], (0, 1, 2, 3), np.array([0, 0, 10, 20])):
      kwargs = options(case) | dict(cu_seqlens=offsets)
      jax.block_until_ready(chunk_gated_delta_product(**inputs, **kwargs, implementation="xla"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_30_runs_give_the_same_bits(dtype):
  case = Case("runs", B=2, T=1000, H=4, HV=8, K=128, V=64, dtype=dtype)
  inputs = jax.device_put(make_inputs(case))
  expected = run(case, "pallas", inputs)
  for i in range(30):
    assert_same_bits(run(case, "pallas", inputs), expected, f"run {i}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap(implementation):
  """Over inputs and offsets at once."""
  offsets = np.array([[0, 5, 20], [0, 0, 17], [0, 20, 20]], np.int32)
  cases = [
    dataclasses.replace(SMALL, seed=seed, cu_seqlens=tuple(x.tolist()))
    for seed, x in enumerate(offsets)
  ]
  inputs = [make_inputs(case) for case in cases]
  stacked = {name: np.stack([x[name] for x in inputs]) for name in inputs[0]}

  def f(inputs, cu_seqlens):
    kwargs = options(cases[0]) | dict(cu_seqlens=cu_seqlens, implementation=implementation)
    return chunk_gated_delta_product(**inputs, **kwargs)

  o, final_state = jax.jit(jax.vmap(f))(stacked, offsets)
  for i, case in enumerate(cases):
    actual = dict(o=o[i], final_state=final_state[i])
    assert_close(actual, oracle(case), BOUNDS["float32"], f"vmap, {offsets[i]}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_over_layers_with_remat(implementation):
  inputs = make_inputs(SMALL)
  layers = np.array([0.5, 2.0], np.float32)

  @jax.checkpoint
  def layer(v, factor):
    o, _ = chunk_gated_delta_product(
      **inputs | dict(v=jnp.repeat(v, SMALL.M, axis=1) * factor), **options(SMALL),
      implementation=implementation,
    )  # fmt: skip
    return o, o

  _, outputs = jax.jit(lambda v: jax.lax.scan(layer, v, layers))(inputs["v"][:, :: SMALL.M])
  v = inputs["v"][:, :: SMALL.M]
  for i, factor in enumerate(layers):
    x = inputs | dict(v=np.repeat(v, SMALL.M, axis=1) * factor)
    v = run(SMALL, "recurrence", x)["o"]
    assert relative_error(outputs[i], v) < BOUNDS["float32"], f"layer {i}"
