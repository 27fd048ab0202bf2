"""Every error: its type, and that it names the argument, what was expected and what was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, assert_raises, make_inputs

from gdp_jax import (
  check_inputs,
  chunk_gated_delta_product,
  config,
  kernels,
  recurrent_gated_delta_product,
)

CASE = Case("inputs", B=1, T=4, M=2, H=2, HV=4, K=8, V=16)


def arguments(**changed):
  return make_inputs(CASE) | dict(num_householder=CASE.M) | changed


def zeros(*shape, dtype=np.float32):
  return np.zeros(shape, dtype)


BAD_ARGUMENTS = {
  # Kinds and dtypes.
  "M-float": (dict(num_householder=2.0), TypeError, ["num_householder", "int", "2.0", "float"]),
  "M-bool": (dict(num_householder=True), TypeError, ["num_householder", "int", "True"]),
  "M-array": (dict(num_householder=zeros(1)), TypeError, ["num_householder", "int", "ndarray"]),
  "scale-text": (dict(scale="1"), TypeError, ["scale", "float or None", "'1'", "str"]),
  "scale-bool": (dict(scale=True), TypeError, ["scale", "float", "True"]),
  "scale-array": (dict(scale=zeros(1)), TypeError, ["scale", "float", "ndarray"]),
  "k-list": (dict(k=[1.0]), TypeError, ["k ", "JAX or NumPy array", "list"]),
  "v-none": (dict(v=None), TypeError, ["v ", "JAX or NumPy array", "NoneType"]),
  "g-number": (dict(g=-0.1), TypeError, ["g ", "JAX or NumPy array", "-0.1", "float"]),
  "beta-number": (dict(beta=1.0), TypeError, ["beta", "JAX or NumPy array", "1.0"]),
  "state-list": (dict(initial_state=[]), TypeError, ["initial_state", "array", "list"]),
  "q-int": (
    dict(q=zeros(1, 4, 2, 8, dtype=np.int32)),
    TypeError,
    ["q ", "bfloat16, float16, float32", "int32"],
  ),
  "k-dtype": (
    dict(k=zeros(1, 8, 2, 8, dtype=np.float16)),
    TypeError,
    ["k ", "q's dtype float32", "float16"],
  ),
  "v-dtype": (
    dict(v=zeros(1, 8, 4, 16, dtype=np.float16)),
    TypeError,
    ["v ", "q's dtype float32", "float16"],
  ),
  "g-int": (dict(g=zeros(1, 4, 4, dtype=np.int32)), TypeError, ["g ", "floating", "int32"]),
  "beta-int": (dict(beta=zeros(1, 8, 4, dtype=np.int32)), TypeError, ["beta", "floating", "int32"]),
  "state-int": (
    dict(initial_state=zeros(1, 4, 8, 16, dtype=np.int32)),
    TypeError,
    ["initial_state", "floating", "int32"],
  ),
  # Values and shapes.
  "M-0": (dict(num_householder=0), ValueError, ["num_householder", "at least 1", "0"]),
  "scale-inf": (dict(scale=float("inf")), ValueError, ["scale", "finite", "inf"]),
  "scale-nan": (dict(scale=float("nan")), ValueError, ["scale", "finite", "nan"]),
  "q-3d": (dict(q=zeros(4, 2, 8)), ValueError, ["q ", "[B, T, H, K]", "(4, 2, 8)"]),
  "q-no-heads": (dict(q=zeros(1, 4, 0, 8)), ValueError, ["q ", "at least one", "(1, 4, 0, 8)"]),
  "q-no-channels": (dict(q=zeros(1, 4, 2, 0)), ValueError, ["q ", "at least one", "(1, 4, 2, 0)"]),
  "v-3d": (dict(v=zeros(8, 4, 16)), ValueError, ["v ", "[B, T*M, HV, V]", "(8, 4, 16)"]),
  "v-no-heads": (dict(v=zeros(1, 8, 0, 16)), ValueError, ["v ", "at least one", "(1, 8, 0, 16)"]),
  "v-no-channels": (dict(v=zeros(1, 8, 4, 0)), ValueError, ["v ", "at least one", "(1, 8, 4, 0)"]),
  "v-rows": (
    dict(v=zeros(1, 4, 4, 16)),
    ValueError,
    ["v ", "[B, T*M, HV, V]", "(1, 8, 4, 16)", "(1, 4, 4, 16)"],
  ),
  "k-rows": (
    dict(k=zeros(1, 4, 2, 8)),
    ValueError,
    ["k ", "[B, T*M, H, K]", "(1, 8, 2, 8)", "(1, 4, 2, 8)"],
  ),
  "k-channels": (
    dict(k=zeros(1, 8, 2, 16)),
    ValueError,
    ["k ", "[B, T*M, H, K]", "(1, 8, 2, 8)", "(1, 8, 2, 16)"],
  ),
  "heads": (
    dict(v=zeros(1, 8, 3, 16), beta=zeros(1, 8, 3), g=None, initial_state=None),
    ValueError,
    ["HV % H == 0", "HV=3", "H=2"],
  ),
  "g-shape": (
    dict(g=zeros(1, 8, 4)),
    ValueError,
    ["g ", "[B, T, HV]", "(1, 4, 4)", "(1, 8, 4)"],
  ),
  "beta-shape": (
    dict(beta=zeros(1, 4, 4)),
    ValueError,
    ["beta", "[B, T*M, HV]", "(1, 8, 4)", "(1, 4, 4)"],
  ),
  "state-shape": (
    dict(initial_state=zeros(1, 4, 16, 8)),
    ValueError,
    ["initial_state", "[N, HV, K, V]", "(1, 4, 8, 16)", "(1, 4, 16, 8)"],
  ),
  "state-per-sequence": (
    dict(cu_seqlens=[0, 1, 4]),
    ValueError,
    ["initial_state", "(2, 4, 8, 16)", "N=2 sequences", "(1, 4, 8, 16)"],
  ),
  # Offsets.
  "offsets-number": (dict(cu_seqlens=4), TypeError, ["cu_seqlens", "array, list or tuple", "4"]),
  "offsets-float": (dict(cu_seqlens=[0.0, 4.0]), TypeError, ["cu_seqlens", "int32", "float64"]),
  "offsets-int8": (
    dict(cu_seqlens=np.array([0, 4], np.int8)),
    TypeError,
    ["cu_seqlens", "int32 or int64", "int8"],
  ),
  "offsets-2d": (dict(cu_seqlens=[[0, 4]]), ValueError, ["cu_seqlens", "[N+1]", "(1, 2)"]),
  "offsets-one": (dict(cu_seqlens=[0]), ValueError, ["cu_seqlens", "N >= 1", "(1,)"]),
  "offsets-start": (dict(cu_seqlens=[1, 4]), ValueError, ["cu_seqlens", "start at 0", "1"]),
  "offsets-negative": (dict(cu_seqlens=(-1, 4)), ValueError, ["cu_seqlens", "start at 0", "-1"]),
  "offsets-order": (
    dict(cu_seqlens=np.array([0, 3, 2, 4]), initial_state=None),
    ValueError,
    ["cu_seqlens", "never decrease", "3 before 2", "entry 2"],
  ),
  "offsets-end": (dict(cu_seqlens=[0, 5]), ValueError, ["cu_seqlens", "T=4", "5"]),
}


@pytest.mark.parametrize(
  "operator", [chunk_gated_delta_product, recurrent_gated_delta_product], ids=["chunk", "recurrent"]
)
@pytest.mark.parametrize(
  ("changed", "error", "parts"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys()
)
def test_bad_argument(operator, changed, error, parts):
  assert_raises(error, parts, operator, **arguments(**changed))
  # Shapes and dtypes are checked under jit as well.
  if all(isinstance(x, np.ndarray) and x.ndim > 2 for x in changed.values()):
    f = jax.jit(operator, static_argnames=("num_householder",))
    assert_raises(error, parts, f, **arguments(**changed))


BAD_SEGMENTS = {
  "float": (dict(num_segments=2.0), TypeError, ["num_segments", "int", "2.0", "float"]),
  "bool": (dict(num_segments=True), TypeError, ["num_segments", "int", "True"]),
  "0": (dict(num_segments=0), ValueError, ["num_segments", "at least 1", "0"]),
  "packed": (
    dict(num_segments=2, cu_seqlens=[0, 4]),
    NotImplementedError,
    ["num_segments", "cu_seqlens", "2"],
  ),
}


@pytest.mark.parametrize(
  ("changed", "error", "parts"), BAD_SEGMENTS.values(), ids=BAD_SEGMENTS.keys()
)
def test_bad_segments(changed, error, parts):
  assert_raises(error, parts, chunk_gated_delta_product, **arguments(**changed))


@pytest.mark.parametrize(
  "operator",
  [
    pytest.param(chunk_gated_delta_product, id="chunk"),
    pytest.param(recurrent_gated_delta_product, id="recurrent"),
  ],
)
def test_q_is_no_array(operator):
  assert_raises(TypeError, ["q ", "JAX or NumPy array", "list"], operator, **arguments(q=[1.0]))


def test_float64_is_for_the_reference():
  wide = {name: make_inputs(CASE)[name].astype(np.float64) for name in "qkv"}
  parts = ["q ", "bfloat16, float16, float32, got float64"]
  assert_raises(TypeError, parts, chunk_gated_delta_product, **arguments(**wide))


def test_batch_and_offsets():
  changed = {name: np.repeat(x, 2, axis=0) for name, x in make_inputs(CASE).items()}
  parts = ["cu_seqlens", "q must have B=1", "B=2"]
  kwargs = arguments(**changed, cu_seqlens=[0, 2, 4])
  assert_raises(ValueError, parts, chunk_gated_delta_product, **kwargs)


def test_traced_arguments_that_must_not_be():
  def f(**traced):
    return chunk_gated_delta_product(**arguments(**traced))

  for name, kind in (("num_householder", "int"), ("scale", "float")):
    assert_raises(TypeError, [name, kind, "Tracer"], jax.jit(f), **{name: 2})


def test_too_many_rows():
  T, M = 2**30, 2
  shapes = dict(q=(1, T, 1, 8), k=(1, T * M, 1, 8), v=(1, T * M, 1, 8), beta=(1, T * M, 1))
  args = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
  f = lambda **kwargs: chunk_gated_delta_product(**kwargs, g=None, num_householder=M)
  with pytest.raises(ValueError, match="2147483648 rows, more than 2\\^31 - 1"):
    jax.eval_shape(f, **args)


def test_implementation():
  f = chunk_gated_delta_product
  parts = ["implementation", "pallas", "xla", "interpret", "'cuda'"]
  assert_raises(ValueError, parts, f, **arguments(), implementation="cuda")
  wide = dict(q=zeros(1, 4, 2, 257), k=zeros(1, 8, 2, 257), initial_state=None)
  for implementation in ("pallas", "interpret"):
    parts = ["q and k", "K=256", repr(implementation), "K=257", "xla"]
    kwargs = arguments(**wide, implementation=implementation)
    assert_raises(NotImplementedError, parts, f, **kwargs)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without a GPU")
def test_pallas_without_a_gpu_does_not_fall_back():
  assert_raises(ValueError, ["interpret"], chunk_gated_delta_product, **arguments(),
                implementation="pallas")  # fmt: skip


def test_kernels_and_config():
  f = kernels.chunk_local_cumsum
  parts = ["implementation", '"pallas" or "interpret"', "'xla'"]
  assert_raises(ValueError, parts, f, g=zeros(1, 4, 4), implementation="xla")
  with pytest.raises(ValueError, match="stage must be .*, got 'softmax'"):
    config.choose("softmax", 64, 64, jnp.float32)


# check_inputs


def with_value(name, value, index):
  x = make_inputs(CASE)[name]
  x[index] = value
  return {name: x}


BAD_VALUES = {
  "q-nan": (with_value("q", np.nan, (0, 1, 1, 2)), ["q ", "finite", "nan", "[0, 1, 1, 2]"]),
  "k-inf": (with_value("k", np.inf, (0, 7, 0, 0)), ["k ", "finite", "inf", "[0, 7, 0, 0]"]),
  "v-nan": (with_value("v", np.nan, (0, 0, 3, 2)), ["v ", "finite", "nan", "[0, 0, 3, 2]"]),
  "state-nan": (
    with_value("initial_state", np.nan, (0, 1, 1, 2)),
    ["initial_state", "finite", "nan", "[0, 1, 1, 2]"],
  ),
  "beta-nan": (with_value("beta", np.nan, (0, 1, 1)), ["beta", "finite", "nan", "[0, 1, 1]"]),
  "beta-negative": (with_value("beta", -0.5, (0, 1, 1)), ["beta", "[0, 2]", "-0.5", "[0, 1, 1]"]),
  "beta-large": (with_value("beta", 2.5, (0, 1, 1)), ["beta", "[0, 2]", "2.5", "[0, 1, 1]"]),
  "g-nan": (with_value("g", np.nan, (0, 3, 2)), ["g ", "at most 0", "nan", "[0, 3, 2]"]),
  "g-positive": (with_value("g", 0.25, (0, 3, 2)), ["g ", "at most 0", "0.25", "[0, 3, 2]"]),
  "g-linear": (
    dict(g=np.full((1, 4, 4), 0.95, np.float32)),
    ["g ", "at most 0", "0.95", "[0, 0, 0]", "jnp.log(g)"],
  ),
  "offsets-order": (
    dict(cu_seqlens=jnp.array([0, 3, 2, 4]), initial_state=None),
    ["cu_seqlens", "never decrease", "3 before 2"],
  ),
  "offsets-start": (dict(cu_seqlens=jnp.array([1, 4])), ["cu_seqlens", "start at 0", "1"]),
  "offsets-end": (dict(cu_seqlens=jnp.array([0, 5])), ["cu_seqlens", "T=4", "5"]),
  # And whatever the operators check.
  "g-shape": (dict(g=zeros(1, 8, 4)), ["g ", "[B, T, HV]", "(1, 4, 4)", "(1, 8, 4)"]),
}


@pytest.mark.parametrize(("changed", "parts"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_bad_value(changed, parts):
  assert_raises(ValueError, parts, check_inputs, **arguments(**changed))


def test_no_hint_where_g_is_no_decay():
  with pytest.raises(ValueError) as raised:
    check_inputs(**arguments(**with_value("g", 0.25, (0, 3, 2))))
  assert "jnp.log" not in str(raised.value)


def test_good_values():
  check_inputs(**arguments())
  check_inputs(**arguments(g=None, initial_state=None, cu_seqlens=[0, 2, 2, 4]))
  check_inputs(**arguments(**with_value("g", -np.inf, (0, 3, 2))))
  check_inputs(**arguments(**with_value("beta", 2.0, (0, 3, 2))))
  half = {name: jnp.asarray(make_inputs(CASE)[name], jnp.bfloat16) for name in "qkv"}
  check_inputs(**arguments(**half), scale=0.5)
  # The operator's own arguments, as they are.
  flags = dict(output_final_state=True, use_qk_l2norm_in_kernel=True, implementation="xla")
  check_inputs(**arguments(), **flags)
  # Rows behind the last offset may hold anything.
  padded = make_inputs(CASE)
  for name in ("q", "k", "v", "g", "beta"):
    padded[name][:, 3 if name in ("q", "g") else 6 :] = np.nan
  check_inputs(**arguments(**padded), cu_seqlens=jnp.array([0, 3]))


def test_check_inputs_needs_values():
  def f(q):
    check_inputs(**arguments(q=q))

  assert_raises(TypeError, ["q is a tracer", "outside jit"], jax.jit(f), q=make_inputs(CASE)["q"])


def test_a_smaller_gpu_gets_a_smaller_config(monkeypatch):
  choose = lambda K: config.choose(config.SWEEPS[-1], K, 128, jnp.bfloat16, 64, 2)
  assert choose(128).unroll == 2 and choose(256).unroll == 1
  monkeypatch.setattr(config, "device_limits", lambda: (72, 101_376))
  assert choose(128).unroll == 1
  assert choose(64).block_v == 64
  monkeypatch.setattr(config, "device_limits", lambda: (1000, 232_448))
  assert choose(64).block_v == 16
