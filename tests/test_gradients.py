"""Gradients: every implementation against autodiff of the recurrence in float64.

The kernels' cases run compiled on a CUDA GPU; elsewhere a few of them run in interpret mode. On a
CPU implementation=None is the kernels' own differentiation rule with the stages in jnp, where "xla"
is plain autodiff of these.
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
  PALLAS,
  QUICK,
  Case,
  assert_close,
  assert_same_bits,
  each,
  make_inputs,
  quick_jit,
)
from cases import oracle as forward_oracle

from gdp_jax import chunk_gated_delta_product, config, kernels, recurrent_gated_delta_product

STREAMS = ("q", "k", "v", "g", "beta")
NAMES = (*STREAMS, "initial_state")
IMPLEMENTATIONS = ("xla", None, "interpret", PALLAS)
RULE = (None, "interpret", PALLAS)  # those with a differentiation rule of their own

# Relative L2 errors against the float64 recurrence, of each tensor and each Householder copy.
# float32: the contract is 1e-4. 1e-6 is measured on weak gates, of which 1e-5 is asked.
# bfloat16: the backward pass rounds as often as the forward one, whose bound is 6e-3: sqrt(2) times
#   that; up to 6e-3 is measured. dg and dbeta are sums of products of rounded tensors with both
#   signs, which cancel in part: twice as much.
# float16: computed in float32. What is left is the rounding of dq, dk and dv, 2e-4.
STRONG = dict.fromkeys(NAMES, 1e-4)
BOUNDS = {
  "float32": dict.fromkeys(NAMES, 1e-5),
  "bfloat16": dict.fromkeys(NAMES, 1e-2) | dict(g=2e-2, beta=2e-2),
  "float16": dict.fromkeys(NAMES, 5e-4),
}

# Tests that are about values share these two shapes: two token chunks, in four row chunks of which
# the last is empty; and sequences of 3, 0, 0, 67 and 0 tokens before ten of padding.
BASE = Case("base", T=70)
PACKED = Case("packed", T=80, cu_seqlens=(0, 3, 3, 3, 70, 70))
SMALL = Case("small", B=1, T=20, H=1, HV=2, K=16, V=24)
base = functools.partial(dataclasses.replace, BASE)
packed = functools.partial(dataclasses.replace, PACKED)


def on_stream(name, case, tokens):
  """A number of tokens as a number of rows, for the tensors that have M rows a token."""
  return tokens if name in ("q", "g") else tokens * case.M


def make_cotangents(case):
  """Of o, in v's dtype, and of the final state."""
  rng = np.random.default_rng(case.seed + 1000)
  do = rng.standard_normal((case.B, case.T, case.HV, case.V))
  dfinal_state = rng.standard_normal((case.N, case.HV, case.K, case.V))
  return do.astype(jnp.dtype(case.dtype)), dfinal_state.astype(np.float32)


def operator(case, implementation):
  """(inputs, cu_seqlens) -> (o, final_state). `implementation` may also be "recurrence"."""

  def f(inputs, cu_seqlens):
    kwargs = dict(
      num_householder=case.M, use_qk_l2norm_in_kernel=case.l2norm, output_final_state=True,
      cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if implementation == "recurrence":
      return recurrent_gated_delta_product(**inputs, **kwargs)
    kwargs["num_segments"] = case.num_segments
    return chunk_gated_delta_product(**inputs, **kwargs, implementation=implementation)

  return f


def offsets(case):
  return None if case.cu_seqlens is None else np.array(case.cu_seqlens, np.int32)


@functools.cache
def pullback(M, l2norm, num_segments, implementation):
  """The compiled (inputs, offsets, cotangents) -> cotangents of the inputs."""
  static = Case("static", M=M, l2norm=l2norm, num_segments=num_segments)
  f = operator(static, implementation)

  def g(inputs, cu_seqlens, cotangents):
    # The integer offsets are an argument like the others here.
    dinputs, dcu_seqlens = jax.vjp(f, inputs, cu_seqlens)[1](cotangents)
    assert cu_seqlens is None or dcu_seqlens.dtype == jax.dtypes.float0
    return dinputs

  # Compiled for a CPU, whatever else there is.
  return jax.jit(g, compiler_options=QUICK) if implementation == "recurrence" else quick_jit(g)


def gradients(case, implementation, inputs=None, cotangents=None):
  """{name: gradient} of the inputs that there are, for a case's own cotangents or others."""
  inputs = make_inputs(case) if inputs is None else inputs
  cotangents = make_cotangents(case) if cotangents is None else cotangents
  pull = pullback(case.M, case.l2norm, case.num_segments, implementation)
  if implementation != "recurrence":
    return to_numpy(pull(inputs, offsets(case), cotangents))
  with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (inputs, cotangents))
    return to_numpy(pull(wide[0], offsets(case), wide[1]))


def to_numpy(gradients):
  return {name: np.array(x) for name, x in gradients.items() if x is not None}


@functools.cache
def oracle(case):
  return gradients(case, "recurrence")


def assert_gradients(actual, expected, case, bounds=None):
  """Each gradient is as expected: of k, v and beta also each Householder copy's alone."""
  bounds = BOUNDS[case.dtype] if bounds is None else bounds
  assert actual.keys() == expected.keys()
  for name in expected:
    parts = [
      {f"d{name}{part}": y for part, y in copies(name, x[name], case.M).items()}
      for x in (actual, expected)
    ]
    # exp(-100) is 0 in fp32.
    parts[1] = {part: np.where(np.abs(y) < 1e-30, 0, y) for part, y in parts[1].items()}
    assert_close(*parts, bounds[name], case.name)


def copies(name, x, M):
  if name not in ("k", "v", "beta") or M == 1:
    return {"": x}
  return {"": x} | {f" of copy {j}": x[:, j::M] for j in range(M)}


def check(case, implementation, bounds=None, inputs=None):
  """A case's gradients, or those of other inputs of its shape, after a look at their dtypes."""
  inputs = make_inputs(case) if inputs is None else inputs
  actual = gradients(case, implementation, inputs)
  chex.assert_trees_all_equal_dtypes(actual, to_numpy(inputs))
  expected = gradients(case, "recurrence", inputs)
  assert_gradients(actual, expected, case, bounds)
  return actual


# Numerics

WEAK = [
  base(name="weak"),
  base(name="half-zero", gate="half_zero"),
  base(name="gate0", gate=0.0),
  base(name="gate-1", gate=-1.0),
  base(name="zero-keys", keys="zero"),
]


@each(WEAK, default={case.name for case in WEAK}, interpret={case.name for case in WEAK})
def test_weak_gates(case, implementation):
  check(case, implementation)


HARD = [
  base(name="gate-6", gate=-6.0),
  base(name="gate-20", gate=-20.0),
  base(name="gate-100", gate=-100.0),
  base(name="strong", gate="stronger"),
  base(name="spike", gate="spike"),
  base(name="correlated", keys="correlated"),
  base(name="identical", keys="identical", beta=1.9, gate=0.0),
]


@each(HARD, default={case.name for case in HARD}, interpret={case.name for case in HARD})
def test_strong_gates_and_similar_keys(case, implementation):
  if implementation == "xla" and case.gate == -20:
    # Autodiff sums terms of either sign, of pairs of rows with no decay between them, to a dg of
    # 1e-9. The rule leaves them out.
    actual, expected = gradients(case, "xla"), oracle(case)
    chex.assert_trees_all_close(actual["g"], expected["g"].astype(np.float32), rtol=0, atol=1e-6)
    actual["g"] = expected["g"]
    assert_gradients(actual, expected, case, STRONG)
  else:
    check(case, implementation, STRONG)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_resets(implementation):
  """Nothing comes through a gate of -inf, and its own gradient is exactly 0."""
  case = base(name="reset", gate="reset")
  actual = check(case, implementation, STRONG)
  dg, reset = actual["g"], np.isneginf(make_inputs(case)["g"])
  assert not np.any(dg[reset])
  assert not np.any(actual["initial_state"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_gate_equals_gates_of_0(implementation):
  zeros = gradients(base(gate=0.0), implementation)
  del zeros["g"]
  actual = check(base(name="no-gate", gate=None), implementation)
  assert_gradients(actual, zeros, BASE, dict.fromkeys(NAMES, 2e-6))


@pytest.mark.parametrize("implementation", [None, PALLAS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_l2norm(implementation, dtype):
  """A zero key and query, a key whose square underflows; in bf16, the others a thousand long."""
  case = Case("l2norm", B=1, T=20, M=1, dtype=dtype, l2norm=True)
  inputs = make_inputs(case)
  if dtype == "bfloat16":
    inputs["q"] *= 1000
    inputs["k"] *= 1000
  inputs["q"][:, 3] = 0
  inputs["k"][:, 5] = 0
  inputs["k"][:, 7] = 1e-20
  actual = check(case, implementation, inputs=inputs)
  assert all(np.all(np.isfinite(x)) for x in actual.values())


DTYPES = [
  base(name="bfloat16", dtype="bfloat16"),
  base(name="bfloat16-strong", dtype="bfloat16", gate="stronger"),
  base(name="float16", dtype="float16"),
  *(base(name=f"bfloat16-M{M}", T=130, M=M, dtype="bfloat16") for M in (1, 3, 4)),
]


@each(
  DTYPES,
  xla={"bfloat16", "bfloat16-strong"},
  default={"bfloat16", "bfloat16-strong", "float16"},
  interpret={"bfloat16", "bfloat16-strong"},
)
def test_dtypes(case, implementation):
  check(case, implementation)


@pytest.mark.parametrize("implementation", ["xla", None, PALLAS])
def test_mixed_dtypes(implementation):
  """Each gradient has its primal's dtype; half precision of g, beta and the state is exact."""
  case = Case("mixed", B=1, T=20, dtype="bfloat16")
  inputs = make_inputs(case)
  for name, dtype in (("g", np.float16), ("beta", jnp.bfloat16), ("initial_state", jnp.bfloat16)):
    inputs[name] = inputs[name].astype(dtype)
  check(case, implementation, inputs=inputs)


# Shapes

LENGTHS = [
  Case("T1-M1", T=1, M=1),
  Case("T17-M3", T=17, M=3, gate=None, initial_state=False),
  Case("T63-M2", T=63),
  Case("T64-M1", T=64, M=1),
  Case("T65-M4", T=65, M=4),
  Case("T200-M3", T=200, M=3),
]


@each(LENGTHS, xla={"T17-M3"}, default={"T1-M1", "T65-M4"}, interpret={"T17-M3"})
def test_lengths(case, implementation):
  check(case, implementation)


# Between them these meet every block size, and each width meets both dtypes.
WIDTHS = [
  Case(f"K{K}-V{V}", B=1, T=127, H=1, HV=2, K=K, V=V, dtype=("float32", "bfloat16")[(i + j) % 2])
  for i, K in enumerate((16, 48, 60, 96, 100, 160, 192, 256))
  for j, V in enumerate((16, 60, 64, 128))
]
WIDTHS += [
  Case(f"K256-V{V}-{dtype}", B=1, T=127, H=1, HV=2, K=256, V=V, dtype=dtype)
  for V in (256, 512)
  for dtype in ("float32", "bfloat16")
]
WIDTHS += [Case("K80-V20", B=1, T=20, H=1, HV=3, K=80, V=20)]


@each(WIDTHS, xla=(), interpret={"K80-V20"})
def test_widths(case, implementation):
  check(case, implementation)


@pytest.mark.parametrize("implementation", [None, PALLAS])
def test_each_value_head_reads_its_key_head(implementation):
  case = Case("gva", B=1, T=20, H=2, HV=6)
  inputs = make_inputs(case)
  inputs["v"] *= np.arange(1, 7, dtype=np.float32)[:, None]
  actual, expected = (gradients(case, i, inputs) for i in (implementation, "recurrence"))
  for i in range(case.HV):  # one by one, or the large ones hide the small
    heads = dict.fromkeys(("v", "g", "beta"), i) | dict(q=i // 3, k=i // 3)
    one = [
      {name: x[:, :, heads[name]] for name, x in tree.items() if name in heads}
      | dict(initial_state=tree["initial_state"][:, i])
      for tree in (actual, expected)
    ]
    assert_gradients(*one, dataclasses.replace(case, name=f"value head {i}"))


@pytest.mark.parametrize("implementation", ["xla", None, "interpret", PALLAS])
@pytest.mark.parametrize("case", [Case("T0", T=0), Case("T0-packed", T=0, cu_seqlens=(0, 0, 0))])
def test_nothing_to_do(implementation, case):
  actual = gradients(case, implementation)
  chex.assert_trees_all_equal(actual.pop("initial_state"), make_cotangents(case)[1])
  assert all(x.size == 0 for x in actual.values())


@pytest.mark.parametrize("implementation", RULE)
def test_copies_with_beta_0_do_nothing(implementation):
  case = Case("beta-0", B=1, T=20, M=3)
  inputs = make_inputs(case)
  inputs["beta"][:, 1::3] = inputs["beta"][:, 2::3] = 0
  actual = check(case, implementation, inputs=inputs)
  one = inputs | {name: inputs[name][:, ::3] for name in ("k", "v", "beta")}
  expected = gradients(dataclasses.replace(case, M=1), "recurrence", one)
  for name in ("k", "v"):
    assert not np.any(actual[name][:, 1::3]) and not np.any(actual[name][:, 2::3])
  actual |= {name: actual[name][:, ::3] for name in ("k", "v", "beta")}
  assert_gradients(actual, expected, dataclasses.replace(case, M=1))


SEGMENTS = [
  Case("three", T=200, num_segments=3),
  Case("no-gate", B=1, T=128, M=3, gate=None, initial_state=False, num_segments=2),
  base(name="strong", T=128, M=1, gate="stronger", num_segments=2),
  Case("bfloat16", T=256, dtype="bfloat16", l2norm=True, num_segments=4),
  Case("wide", B=1, T=128, H=1, HV=2, K=256, V=512, dtype="bfloat16", num_segments=2),
]


@each(SEGMENTS, xla={"three"}, default={"three", "no-gate", "bfloat16"}, interpret={"no-gate"})
def test_segments(case, implementation):
  check(case, implementation, STRONG if case.gate == "stronger" else None)


# So many sequences and heads that a program takes many columns; without gates, which lets Triton
# keep more loads in shared memory than with.
ungated = functools.partial(
  Case, B=4, T=70, H=9, HV=9, K=128, V=128, gate=None, initial_state=False, dtype="bfloat16"
)
UNGATED = [
  *(ungated(f"M{M}", M=M) for M in (1, 2, 3)),
  ungated("K96", K=96),
  ungated("segments", T=128, num_segments=2),
  ungated("segments-M1", T=128, M=1, num_segments=2),
]


@each(UNGATED, xla=())
def test_many_streams_without_gates(case, implementation):
  check(case, implementation)


# Packing

OFFSETS = [
  (0, 3, 3, 3, 70, 70),
  (0, 0, 0, 0, 0, 0),
  (0, 16, 40, 40, 40, 40),
  (0, 64, 65, 66, 80, 80),
  (0, 1, 2, 66, 79, 80),
]
OFFSETS = [packed(name="-".join(map(str, x)), cu_seqlens=x) for x in OFFSETS]


@each(OFFSETS, default={case.name for case in OFFSETS}, interpret={case.name for case in OFFSETS})
def test_offsets(case, implementation):
  actual = check(case, implementation)
  empty = np.diff(case.cu_seqlens) == 0
  dfinal_state = make_cotangents(case)[1]
  chex.assert_trees_all_equal(actual["initial_state"][empty], dfinal_state[empty])


MORE_PACKED = [
  packed(name="M1-no-gate", M=1, gate=None, initial_state=False),
  packed(name="M3-bf16", M=3, dtype="bfloat16"),
  packed(name="M4-strong", M=4, gate="strong"),
  Case("100-of-1", T=100, M=1, H=4, HV=4, K=16, V=16, cu_seqlens=tuple(range(101))),
]


@each(MORE_PACKED, xla=(), default={"M1-no-gate"}, interpret={"M3-bf16"})
def test_more_packed(case, implementation):
  check(case, implementation, STRONG if case.gate == "strong" else None)


def poison(case, inputs, cotangents, start, stop):
  """NaN in everything of tokens start to stop."""
  for name in STREAMS:
    inputs[name][:, on_stream(name, case, start) : on_stream(name, case, stop)] = np.nan
  cotangents[0][:, start:stop] = np.nan


@pytest.mark.parametrize("case", [PACKED, packed(name="l2norm", l2norm=True)], ids=lambda c: c.name)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_may_hold_nan(implementation, case):
  if case.l2norm and implementation == "interpret":
    pytest.skip("the norm is outside the kernels")
  expected = gradients(case, implementation)
  inputs, cotangents = make_inputs(case), make_cotangents(case)
  poison(case, inputs, cotangents, case.valid_tokens, case.T)
  actual = gradients(case, implementation, inputs, cotangents)
  for name in STREAMS:
    assert not np.any(actual[name][:, on_stream(name, case, case.valid_tokens) :]), f"d{name}"
  assert_same_bits(actual, expected, "padding of NaN")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequences_do_not_touch_each_other(implementation):
  """Sequence 1 and its cotangents turn into NaN; the others' gradients keep their bits."""
  case = packed(cu_seqlens=(0, 20, 50, 50, 75, 75))
  expected = gradients(case, implementation)
  inputs, cotangents = make_inputs(case), make_cotangents(case)
  poison(case, inputs, cotangents, 20, 50)
  cotangents[1][1] = np.nan
  actual = gradients(case, implementation, inputs, cotangents)
  for tree in (actual, expected):
    for name in STREAMS:
      tree[name][:, on_stream(name, case, 20) : on_stream(name, case, 50)] = 0
    tree["initial_state"][1] = 0
  assert_same_bits(actual, expected, "sequences beside one of NaN")


# Cotangents


@pytest.mark.parametrize("case", [BASE, PACKED], ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_zero_cotangents(implementation, case):
  zeros = jax.tree.map(np.zeros_like, make_cotangents(case))
  for name, x in gradients(case, implementation, cotangents=zeros).items():
    assert not np.any(x), f"d{name}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_causality(implementation):
  """Outputs before t have no gradient, to the bit, in inputs at or after t."""
  do, dfinal_state = make_cotangents(BASE)
  for t in (1, 15, 31, 32, 33, 64, 69):
    cotangents = do.copy(), np.zeros_like(dfinal_state)
    cotangents[0][:, t:] = 0
    for name, x in gradients(BASE, implementation, cotangents=cotangents).items():
      if name in STREAMS:
        start = on_stream(name, BASE, t)
        assert not np.any(x[:, start:]), f"d{name} at or after {t}"
        # A token's own decay, key, value and step size are read by its query.
        assert np.all(np.any(x[:, start - 1].reshape(BASE.B, -1), axis=1)), f"d{name} before {t}"


@pytest.mark.parametrize("implementation", RULE)
def test_cotangents_of_a_transpose_a_slice_and_a_sum(implementation):
  case = SMALL
  rng = np.random.default_rng(1)
  wide = rng.standard_normal((case.B, case.HV, case.V, case.T)).astype(np.float32)
  f = operator(case, implementation)

  def loss(inputs):
    o, final_state = f(inputs, None)
    transposed = jnp.sum(jnp.transpose(o, (0, 2, 3, 1)) * wide)
    return transposed + jnp.sum(o[:, 3:9, 1, ::2] ** 2) + jnp.sum(o) + jnp.sum(final_state[:, :, 5])

  def explicit(o, final_state):
    do = np.transpose(wide, (0, 3, 1, 2)) + 1
    do[:, 3:9, 1, ::2] += 2 * o[:, 3:9, 1, ::2]
    dfinal_state = np.zeros_like(final_state)
    dfinal_state[:, :, 5] = 1
    return do, dfinal_state

  inputs = make_inputs(case)
  value, actual = quick_jit(jax.value_and_grad(loss))(inputs)
  o, final_state = jax.tree.map(np.asarray, recurrent_gated_delta_product(
    **inputs, num_householder=case.M, output_final_state=True))  # fmt: skip
  expected_value = np.sum(np.transpose(o, (0, 2, 3, 1)) * wide) + np.sum(o[:, 3:9, 1, ::2] ** 2)
  expected_value += np.sum(o) + np.sum(final_state[:, :, 5])
  chex.assert_trees_all_close(value, expected_value, rtol=1e-4)
  expected = gradients(case, "recurrence", inputs, explicit(o, final_state))
  assert_gradients(to_numpy(actual), expected, case)


@pytest.mark.parametrize("implementation", [None, PALLAS])
def test_no_final_state(implementation):
  case = SMALL
  inputs, (do, dfinal_state) = make_inputs(case), make_cotangents(case)

  def loss(v):
    o, _ = chunk_gated_delta_product(
      **inputs | dict(v=v), num_householder=case.M, implementation=implementation
    )
    return jnp.sum(o * do)

  actual = np.asarray(quick_jit(jax.grad(loss))(inputs["v"]))
  expected = gradients(case, "recurrence", cotangents=(do, np.zeros_like(dfinal_state)))["v"]
  assert_close(dict(dv=actual), dict(dv=expected), 1e-5, "no final state")


# Transformations


def loss_of(case, implementation):
  """inputs -> sum of the outputs times `make_cotangents(case)`."""
  f, cotangents = operator(case, implementation), make_cotangents(case)

  def loss(inputs, cu_seqlens=None):
    outputs = f(inputs, offsets(case) if cu_seqlens is None else cu_seqlens)
    return sum(jnp.sum(x * dx) for x, dx in zip(outputs, cotangents, strict=True))

  return loss


@pytest.mark.parametrize(
  "transform",
  [jax.grad, lambda loss: quick_jit(jax.grad(jax.checkpoint(loss)))],
  ids=["eager", "checkpoint"],
)
@pytest.mark.parametrize("implementation", [None, PALLAS])
def test_eager_and_checkpoint(implementation, transform):
  actual = transform(loss_of(SMALL, implementation))(make_inputs(SMALL))
  assert_gradients(to_numpy(actual), oracle(SMALL), SMALL)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_of_grad(implementation):
  """Over inputs and offsets at once."""
  values = np.array([[0, 5, 20], [0, 0, 17], [0, 20, 20]], np.int32)
  cases = [
    dataclasses.replace(SMALL, seed=seed, cu_seqlens=tuple(x.tolist()), name=f"vmap of {x}")
    for seed, x in enumerate(values)
  ]
  stacked = jax.tree.map(lambda *x: np.stack(x), *(make_inputs(case) for case in cases))
  actual = quick_jit(jax.vmap(jax.grad(loss_of(cases[0], implementation))))(stacked, values)
  cotangents = make_cotangents(cases[0])
  for i, case in enumerate(cases):
    expected = gradients(case, "recurrence", cotangents=cotangents)
    assert_gradients(to_numpy(jax.tree.map(lambda x, i=i: x[i], actual)), expected, case)


@pytest.mark.parametrize("implementation", [None, PALLAS])
def test_scan_over_layers(implementation):
  """Three layers by lax.scan, recomputed in the backward pass, against three calls in float64."""
  inputs = make_inputs(SMALL)
  do, _ = make_cotangents(SMALL)

  def layer(implementation):
    f = operator(SMALL, implementation)

    def apply(x, weight):
      v = jnp.repeat(x * weight, SMALL.M, axis=1)
      o, final_state = f({n: y.astype(v.dtype) for n, y in inputs.items()} | dict(v=v), None)
      return x + o, jnp.mean(final_state)

    return apply

  def scanned(x, weights):
    x, means = jax.lax.scan(jax.checkpoint(layer(implementation)), x, weights)
    return jnp.sum(x * do) + jnp.sum(means)

  def unrolled(x, weights):
    means = 0
    for weight in weights:
      x, mean = layer("recurrence")(x, weight)
      means += mean
    return jnp.sum(x * do) + means

  x = inputs["v"][:, :: SMALL.M]
  weights = np.random.default_rng(2).uniform(0.5, 2, (3, SMALL.V)).astype(np.float32)
  names = ("x", "weights")
  actual = quick_jit(jax.grad(scanned, (0, 1)))(x, weights)
  with jax.enable_x64(True):
    wide = x.astype(np.float64), weights.astype(np.float64)
    expected = quick_jit(jax.grad(unrolled, (0, 1)))(*wide)
    expected = [np.asarray(y) for y in expected]
  actual, expected = dict(zip(names, actual, strict=True)), dict(zip(names, expected, strict=True))
  assert_close(actual, expected, 1e-5, "three layers")


FORWARD_MODE = {
  "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
  "jacfwd": lambda f, x: jax.jacfwd(f)(x),
  "jvp-of-grad": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
  "grad-of-grad": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(x),
  "hessian": lambda f, x: jax.jit(jax.hessian(f))(x),
}


@pytest.mark.parametrize("transform", FORWARD_MODE.values(), ids=FORWARD_MODE.keys())
@pytest.mark.parametrize("implementation", RULE)
def test_forward_mode_and_second_order_are_refused(implementation, transform):
  inputs, loss = make_inputs(SMALL), loss_of(SMALL, implementation)
  with pytest.raises((TypeError, NotImplementedError), match='implementation="xla"'):
    transform(lambda v: loss(inputs | dict(v=v)), inputs["v"])


def test_forward_mode_is_refused_by_jax_itself():
  """What a caller has traced or linearised, JAX refuses to push forward, in words of its own."""
  inputs, loss = make_inputs(SMALL), loss_of(SMALL, None)
  f, v = (lambda v: loss(inputs | dict(v=v))), inputs["v"]
  with pytest.raises(TypeError, match="forward-mode"):
    jax.jvp(jax.jit(f), (v,), (v,))
  with pytest.raises(TypeError, match="forward-mode"):
    jax.linearize(f, v)[1](v)


def test_forward_mode_and_second_order_in_xla():
  case = dataclasses.replace(SMALL, T=5)
  inputs = make_inputs(case)
  direction = make_inputs(dataclasses.replace(case, seed=1))

  def derivative(inputs, direction, loss):
    return jax.jvp(loss, (inputs,), (direction,))[1]

  def forward_over_reverse(inputs, direction, loss):
    gradient = jax.grad(lambda k: loss(inputs | dict(k=k)) ** 2)
    return jax.jvp(gradient, (inputs["k"],), (direction["k"],))[1]

  def reverse_over_reverse(inputs, direction, loss):
    gradient = jax.grad(lambda k: loss(inputs | dict(k=k)) ** 2)
    return jax.grad(lambda k: jnp.vdot(gradient(k), direction["k"]))(inputs["k"])

  for f in (derivative, forward_over_reverse, reverse_over_reverse):
    compiled = functools.partial(quick_jit, static_argnums=2)(f)
    actual = np.asarray(compiled(inputs, direction, loss_of(case, "xla")))
    with jax.enable_x64(True):
      wide = jax.tree.map(lambda x: x.astype(np.float64), (inputs, direction))
      expected = np.asarray(compiled(*wide, loss_of(case, "recurrence")))
    assert_close({f.__name__: actual}, {f.__name__: expected}, 1e-5, case.name)


# What the kernels are given


def equations(jaxpr):
  """Every equation outside the kernels, calls and loops opened, and the jaxprs in it."""
  for eqn in jaxpr.eqns:
    inner = [] if eqn.primitive.name == "pallas_call" else jaxprs_in(eqn)
    yield eqn, inner
    for x in inner:
      yield from equations(x)


def jaxprs_in(eqn):
  """The jaxprs among an equation's parameters: of calls, loops and kernels."""
  is_jaxpr = lambda x: hasattr(x, "eqns")
  values = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)
  return [getattr(x, "jaxpr", x) for x in values if is_jaxpr(x)]


def gradient_jaxpr(case):
  """The operator with its kernels, and its gradients, traced."""
  f = operator(case, "pallas")
  pull = lambda *args: jax.vjp(lambda x: f(x, offsets(case)), args[0])[1](args[1])
  return jax.make_jaxpr(pull)(make_inputs(case), make_cotangents(case)).jaxpr


def test_nothing_of_the_token_stream_is_expanded_to_rows():
  """Of R rows there are k, v, and what belongs to them, each made by a kernel: no q, do or o.

  Known implementations of the gradient fill q and do up with zeros, M-fold.
  """
  case = Case("sizes", B=1, T=20, M=3, H=2, HV=4, K=24, V=40, cu_seqlens=(0, 7, 20))
  rows = case.T * case.M
  made, taken = set(), {}
  for eqn, inner in equations(gradient_jaxpr(case)):
    shapes = [x.aval.shape for x in eqn.outvars if hasattr(x.aval, "shape")]
    of_rows = any(rows in s[:2] and s[-1] in (case.K, case.V) for s in shapes)
    if of_rows and not inner:
      made.add(eqn.primitive.name)
    if eqn.primitive.name == "pallas_call":
      name = str(eqn.params["name"])
      operands = (x.aval.shape for x in eqn.invars)
      taken.setdefault(name, []).append(sorted(s[1:] for s in operands if s[:1] == (rows,)))
  # A flat view, the guard against split arrays, which lowers to nothing, and the sum over the value
  # heads of one key head.
  assert made <= {"pallas_call", "reshape", "gdp_not_partitioned", "reduce_sum"}, made
  H, HV, K, V = case.H, case.HV, case.K, case.V
  assert taken["gdp_chunk_gated_delta_product_bwd_o"] == [[(H, K), (HV, V)]]  # k, v_new
  # beta, g; k, dv; Ti
  assert taken["gdp_chunk_gated_delta_product_bwd_h"] == [
    sorted([(HV,), (HV,), (H, K), (HV, V), (HV, 64)])
  ]


@pytest.mark.parametrize(("K", "V"), [(128, 64), (128, 128), (256, 512)])
def test_no_load_in_a_loop_serves_both_a_product_and_something_else(K, V):
  """Triton's pipeline may overwrite it while the product still reads: see the kernel of bwd_wy."""
  case = Case("loads", B=1, T=128, M=3, K=K, V=V, dtype="bfloat16", num_segments=2)
  kernels_seen, loops = set(), 0

  def look(jaxpr, name, in_loop):
    nonlocal loops
    readers = {}
    for eqn in jaxpr.eqns:
      for x in eqn.invars:
        readers.setdefault(str(x), set()).add(eqn.primitive.name)
    loops += in_loop and "dot_general" in {eqn.primitive.name for eqn in jaxpr.eqns}
    for eqn in jaxpr.eqns:
      if in_loop and eqn.primitive.name == "masked_load":
        [x] = eqn.outvars
        by = readers[str(x)]
        assert by == {"dot_general"} or "dot_general" not in by, f"{name}: {x} is read by {by}"
      for inner in jaxprs_in(eqn):
        look(inner, name, in_loop or eqn.primitive.name in ("scan", "while"))

  for eqn, _ in equations(gradient_jaxpr(case)):
    if eqn.primitive.name == "pallas_call":
      name = str(eqn.params["name"])
      kernels_seen.add(name)
      look(eqn.params["jaxpr"], name, False)
  assert len(kernels_seen) >= 9 and loops >= 5, (kernels_seen, loops)


# On a GPU only


@pytest.mark.gpu
@pytest.mark.parametrize(
  ("K", "V", "dtype"),
  [
    (128, 64, "bfloat16"),
    (128, 64, "float32"),
    (128, 128, "bfloat16"),
    (128, 128, "float32"),
    (256, 512, "bfloat16"),
  ],
)
def test_30_runs_give_the_same_bits(K, V, dtype):
  """Also where a kernel walks over several blocks of K and V, and writes over what it has read."""
  case = Case("runs", B=2, T=1000, H=4, HV=8, K=K, V=V, dtype=dtype)
  inputs, cotangents = jax.device_put((make_inputs(case), make_cotangents(case)))
  expected = gradients(case, "pallas", inputs, cotangents)
  for i in range(30):
    assert_same_bits(gradients(case, "pallas", inputs, cotangents), expected, f"run {i}")


STAGES = [
  stage
  for stage in kernels.__all__
  if stage not in ("fused_recurrent_gated_delta_product_fwd", "prepare_fwd")
]


def rounds(dtype):
  """[{stage: Config}]: each stage has in each round the next of all that it can get."""
  sweeps = list(itertools.product((1, 5, 1000), (2, 3)))
  every = {
    stage: dict.fromkeys(
      config.choose(stage, K, V, jnp.dtype(dtype), streams, M)
      for K in (16, 32, 64, 96, 128, 160, 192, 256)
      for V in (16, 32, 64, 96, 128, 160, 192, 256, 512)
      for streams, M in (sweeps if stage in config.SWEEPS else [(1, 2)])
    )
    for stage in STAGES
  }
  most = max(len(some) for some in every.values())
  return [{s: list(some)[i % len(some)] for s, some in every.items()} for i in range(most)]


@pytest.fixture
def force(monkeypatch):
  """A function that makes every stage take the Config that is named for it."""

  def use(chosen):
    jax.clear_caches()  # what is compiled has its Config inside
    monkeypatch.setattr(config, "choose", lambda stage, *_: chosen[stage])

  yield use
  monkeypatch.undo()
  jax.clear_caches()


@pytest.mark.gpu
@pytest.mark.parametrize(
  ("dtype", "K"), [("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float32", 128)]
)
def test_the_number_of_streams_changes_no_bit(monkeypatch, dtype, K):
  """A batch's size may choose block_v, so the columns of a state must not feel their company."""
  case = Case(f"K{K}", B=1, T=100, H=1, HV=2, K=K, V=128, dtype=dtype)
  choose, results = config.choose, []

  def run(inputs, cotangents):
    outputs, pull = jax.vjp(lambda x: operator(case, "pallas")(x, None), inputs)
    return outputs, pull(cotangents)

  for streams in (1, 20, 1000):
    jax.clear_caches()  # what is compiled has its Config inside
    fixed = lambda *args, streams=streams: choose(*args[:4], streams, *args[5:])
    monkeypatch.setattr(config, "choose", fixed)
    results.append(jax.jit(run)(make_inputs(case), make_cotangents(case)))
  jax.clear_caches()
  chosen = {
    choose(config.SWEEPS[0], K, 128, jnp.dtype(dtype), streams, case.M) for streams in (1, 20, 1000)
  }
  assert len(chosen) > 1, "nothing was chosen by the number of streams"
  for result in results[1:]:
    chex.assert_trees_all_equal(result, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
  ("dtype", "chosen"),
  [
    pytest.param(dtype, chosen, id=f"{dtype}-{i}")
    for dtype in ("bfloat16", "float32")
    for i, chosen in enumerate(rounds(dtype))
  ],
)
def test_every_config(force, dtype, chosen):
  """All agree with the recurrence, also in the stages that the operator has no use for."""
  case = Case(f"{dtype} with {chosen}", B=1, T=100, H=1, HV=2, K=64, V=64, dtype=dtype)
  force(chosen)
  first = check(case, "pallas")
  for i in range(10):
    assert_same_bits(gradients(case, "pallas"), first, f"{case.name}, run {i}")

  def through_w_and_u(q, k, v, g, beta, initial_state):
    del g
    Ti = kernels.solve_tril(kernels.chunk_scaled_dot_kkt_fwd(k, beta=beta))
    w, u = kernels.recompute_w_u_fwd(k, v, beta, Ti)
    h, v_new, final_state = kernels.chunk_gated_delta_product_fwd_h(
      k, w, u, None, initial_state, True, num_householder=case.M
    )
    o = kernels.chunk_gated_delta_product_fwd_o(q, k, v_new, h, num_householder=case.M)
    effects = kernels.chunk_gated_delta_product_effects(k, v, beta, Ti, num_householder=case.M)
    F, P = effects[..., : case.V], effects[..., case.V :]
    through_effects = F + jnp.matmul(P, initial_state, precision="highest")
    return dict(o=o, final_state=final_state), dict(final_state=through_effects)

  case = dataclasses.replace(case, gate=None)
  bound = 1e-5 if dtype == "float32" else 1e-2
  expected = forward_oracle(case)
  actual, effects = jax.jit(through_w_and_u)(**make_inputs(case))
  assert_close(actual, expected, bound, case.name)
  assert_close(effects, dict(final_state=expected["final_state"]), bound, case.name)
