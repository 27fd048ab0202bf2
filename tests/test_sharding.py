"""Several devices: the operator split by batch, heads and sequence equals that of one device.

On 8 virtual CPU devices (see conftest.py), and on GPUs where there are two.
"""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
  QUICK,
  Case,
  assert_close,
  assert_raises,
  assert_same_bits,
  make_inputs,
  options,
  quick_jit,
)
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from lowering import AbstractDevice, count_kernels, cuda_target

from gdp_jax import (
  chunk_gated_delta_product,
  fused_recurrent_gated_delta_product,
  kernels,
  prepare,
  rollback,
)
from gdp_jax.nn import (
  GatedDeltaProduct,
  GatedDeltaProductConfig,
  GatedDeltaProductLM,
  next_token_loss,
)
from gdp_jax.sharding import (
  sharded_fused_recurrent_gated_delta_product,
  sharded_gated_delta_product,
)

# Against the same implementation on one device. In fp32 the sums are other sums, 4e-7 measured. In
# bf16 the chunks begin elsewhere, and then it is as far off as either is from the recurrence.
OUTPUTS = {"float32": 1e-5, "bfloat16": 6e-3}
GRADIENTS = {"float32": 1e-4, "bfloat16": 1e-2}

TYPES = [AxisType.Auto, AxisType.Explicit]
both_types = pytest.mark.parametrize("axis_type", TYPES, ids=["auto", "explicit"])


def make_mesh(axis_type=AxisType.Auto, *, gpu=False, **axes):
  """A mesh of CPU devices, or of GPUs, with these axes and sizes."""
  sizes = tuple(axes.values())
  devices = jax.devices() if gpu else jax.devices("cpu")
  if len(devices) < np.prod(sizes):
    pytest.skip(f"needs {np.prod(sizes)} devices, there are {len(devices)}")
  types = (axis_type,) * len(axes)
  return jax.make_mesh(sizes, tuple(axes), axis_types=types, devices=devices[: np.prod(sizes)])


def place(mesh, inputs, *, batch_axis=None, head_axis=None, sequence_axis=None):
  """The inputs as they are to lie on the mesh."""
  stream, states = P(batch_axis, sequence_axis, head_axis), P(batch_axis, head_axis)
  others = dict(initial_state=states, state=states, state_indices=P(batch_axis))
  return {
    name: None if x is None else jax.device_put(x, NamedSharding(mesh, others.get(name, stream)))
    for name, x in inputs.items()
  }


def cotangents(case):
  rng = np.random.default_rng(case.seed + 1)
  do = rng.standard_normal((case.B, case.T, case.HV, case.V))
  dfinal = rng.standard_normal((case.N, case.HV, case.K, case.V))
  return do.astype(jnp.dtype(case.dtype)), dfinal.astype(np.float32)


def place_cotangents(mesh, case, **axes):
  do, dfinal = cotangents(case)
  placed = place(mesh, dict(o=do, initial_state=dfinal), **axes)
  return placed["o"], placed["initial_state"]


def with_gradients(f):
  """f(inputs, *args) -> (o, final_state), as a function that returns these and the gradients."""

  def g(inputs, cotangents, *args):
    out, vjp = jax.vjp(lambda inputs: f(inputs, *args), inputs)
    return out, vjp(cotangents)[0]

  return g


def named(results):
  """As NumPy arrays, in fp32: the outputs, and the gradients."""
  (o, final_state), gradients = jax.tree.map(lambda x: np.asarray(x, np.float32), results)
  gradients = {f"d{name}": dx for name, dx in gradients.items() if dx is not None}
  return dict(o=o, final_state=final_state), gradients


def statics(case):
  kwargs = options(case)
  del kwargs["cu_seqlens"]
  return kwargs


@functools.cache
def operator(M, implementation):
  """The jitted operator and its gradients on one device."""
  f = functools.partial(
    chunk_gated_delta_product, num_householder=M, output_final_state=True,
    implementation=implementation,
  )  # fmt: skip
  run = with_gradients(lambda inputs, cu_seqlens: f(**inputs, cu_seqlens=cu_seqlens))
  return quick_jit(run) if implementation == "xla" else jax.jit(run)


def one_device(case, implementation="xla"):
  cu_seqlens = None if case.cu_seqlens is None else jnp.array(case.cu_seqlens)
  return named(operator(case.M, implementation)(make_inputs(case), cotangents(case), cu_seqlens))


def sharded(case, mesh, implementation="xla", **axes):
  """The jitted operator and its gradients over a mesh."""
  f = functools.partial(
    sharded_gated_delta_product, **statics(case), **axes, mesh=mesh, implementation=implementation
  )
  run = with_gradients(lambda inputs, cu_seqlens=None: f(**inputs, cu_seqlens=cu_seqlens))
  return quick_jit(run) if mesh.devices.flat[0].platform == "cpu" else jax.jit(run)


def check(case, actual, expected):
  for got, want, bounds in zip(actual, expected, (OUTPUTS, GRADIENTS), strict=True):
    assert_close(got, want, bounds[case.dtype], case.name)


def collectives(text):
  """(kind, bytes of the result) of each collective in a compiled module's text."""
  kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
  found = []
  for line in text.splitlines():
    match = re.search(rf" = (.*?) ({kinds})(-start)?\(", line)
    if match:
      arrays = re.findall(r"([a-z]+)(\d+)\[([\d,]*)\]", match[1])
      sizes = [int(bits) // 8 * np.prod([int(d) for d in dims.split(",") if d], dtype=int)
               for _, bits, dims in arrays]  # fmt: skip
      # An asynchronous one has its operands beside the result.
      found.append((match[2], int(max(sizes) if match[3] else sum(sizes))))
  return found


def totals(text):
  """Bytes by kind of collective: the compiler may put several into one."""
  sums = {}
  for kind, size in collectives(text):
    sums[kind] = sums.get(kind, 0) + size
  return sums


# Batch and heads

SPLITS = {
  "batch": (dict(data=4), dict(batch_axis="data")),
  "heads": (dict(model=2), dict(head_axis="model")),
  "both": (dict(data=4, model=2), dict(batch_axis="data", head_axis="model")),
}
BATCH = Case("batch", B=4, T=70)


@pytest.mark.parametrize(("split", "axis_type"), [
  ("batch", AxisType.Auto), ("heads", AxisType.Auto), ("both", AxisType.Explicit),
])  # fmt: skip
def test_batch_and_heads(split, axis_type):
  """Forward and gradient equal those of one device, and nothing moves."""
  sizes, axes = SPLITS[split]
  mesh = make_mesh(axis_type, **sizes)
  inputs = place(mesh, make_inputs(BATCH), **axes)
  cotangent = place_cotangents(mesh, BATCH, **axes)
  compiled = sharded(BATCH, mesh, **axes).lower(inputs, cotangent).compile()
  assert collectives(compiled.as_text()) == []
  results = compiled(inputs, cotangent)
  check(BATCH, named(results), one_device(BATCH))
  batch, head = axes.get("batch_axis"), axes.get("head_axis")
  (o, final_state), gradients = results
  for x, spec in [(o, P(batch, None, head)), (final_state, P(batch, head)),
                  (gradients["k"], P(batch, None, head))]:  # fmt: skip
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


def test_packed_sequences_split_by_heads():
  case = Case("packed-heads", T=96, cu_seqlens=(0, 20, 20, 70))
  mesh = make_mesh(model=2)
  run = sharded(case, mesh, head_axis="model")
  inputs = place(mesh, make_inputs(case), head_axis="model")
  compiled = run.lower(inputs, cotangents(case), jnp.array(case.cu_seqlens)).compile()
  assert collectives(compiled.as_text()) == []
  results = run(inputs, cotangents(case), jnp.array(case.cu_seqlens))
  check(case, named(results), one_device(case))


# One sequence on several devices

FIXED = Case("fixed", T=128)
SEQUENCES = [
  (FIXED, 8),
  (Case("bfloat16", T=128, dtype="bfloat16"), 8),
  (Case("strong-gates", T=64, B=1, M=3, H=1, HV=1, V=130, gate="strong"), 4),
  (Case("last-shorter", T=30, B=1, gate=None, initial_state=False), 8),
  (Case("some-empty", T=3, B=1), 8),
  (Case("all-empty", T=0, B=1), 8),
]


@pytest.mark.parametrize(
  ("case", "n"), [pytest.param(case, n, id=f"{case.name}-{n}") for case, n in SEQUENCES]
)
def test_sequence(case, n):
  mesh = make_mesh(context=n)
  results = sharded(case, mesh, sequence_axis="context")(make_inputs(case), cotangents(case))
  check(case, named(results), one_device(case))


@pytest.mark.parametrize("T", [128, 126])
def test_sequence_on_explicit_axes(T):
  """With the batch split too; and a length that 4 does not divide, which lies there whole."""
  case = Case(f"explicit-{T}", T=T)
  mesh = make_mesh(AxisType.Explicit, data=2, context=4)
  axes = dict(batch_axis="data", sequence_axis="context")
  lie = axes if T == 128 else dict(batch_axis="data")
  inputs = place(mesh, make_inputs(case), **lie)
  results = sharded(case, mesh, **axes)(inputs, place_cotangents(mesh, case, **lie))
  check(case, named(results), one_device(case))


def test_all_axes_at_once():
  case = FIXED
  mesh = make_mesh(data=2, model=2, context=2)
  axes = dict(batch_axis="data", head_axis="model", sequence_axis="context")
  inputs = place(mesh, make_inputs(case), **axes)
  check(case, named(sharded(case, mesh, **axes)(inputs, cotangents(case))), one_device(case))


@pytest.mark.parametrize("axes", [dict(head_axis="x"), dict(sequence_axis="x")])
def test_segments_on_each_device(axes):
  case = Case("segments", T=200)
  run = sharded(case, make_mesh(x=2), num_segments=2, **axes)
  check(case, named(run(make_inputs(case), cotangents(case))), one_device(case))


def test_two_mesh_axes_for_one():
  case = FIXED
  mesh = make_mesh(a=2, b=4)
  run = sharded(case, mesh, sequence_axis=("a", "b"))
  check(case, named(run(make_inputs(case), cotangents(case))), one_device(case))


# Packed, 8 tokens on each of 8 devices.
PACKED = Case("packed", T=64, cu_seqlens=(0, 64, 64, 64, 64, 64, 64))
OFFSETS = {
  "one-across-all": (0, 64, 64, 64, 64, 64, 64),
  "across-three": (0, 3, 3, 20, 44, 46, 47),
  "ends-at-borders": (0, 8, 16, 16, 32, 40, 64),
  "empty-at-borders": (0, 0, 20, 20, 24, 24, 24),
  "empty-inside-and-behind": (0, 5, 30, 30, 30, 61, 61),
  "devices-of-padding": (0, 10, 10, 11, 13, 13, 13),
  "nothing": (0, 0, 0, 0, 0, 0, 0),
}


def test_packed_sequences():
  """Whatever the offsets, with one compilation, and whatever the padding holds."""
  run = sharded(PACKED, make_mesh(context=8), sequence_axis="context")
  for name, offsets in OFFSETS.items():
    case = dataclasses.replace(PACKED, name=name, cu_seqlens=offsets)
    inputs, (do, dfinal) = make_inputs(case), cotangents(case)
    expected = one_device(case)
    for key in ("q", "k", "v", "g", "beta"):
      inputs[key][:, offsets[-1] * (1 if key in ("q", "g") else case.M) :] = np.nan
    do[:, offsets[-1] :] = np.nan
    actual = named(run(inputs, (do, dfinal), jnp.array(offsets)))
    check(case, actual, expected)
    assert not np.any(actual[0]["o"][:, offsets[-1] :])
    for key in ("q", "k", "v", "g", "beta"):
      padding = offsets[-1] * (1 if key in ("q", "g") else case.M)
      assert not np.any(actual[1][f"d{key}"][:, padding:]), (name, key)
  assert run._cache_size() == 1


def test_packed_sequences_in_bfloat16_on_three_devices():
  case = Case(
    "packed-3", T=100, cu_seqlens=(0, 20, 31, 31, 90), dtype="bfloat16", initial_state=False
  )
  run = sharded(case, make_mesh(context=3), sequence_axis="context")
  actual = named(run(make_inputs(case), cotangents(case), jnp.array(case.cu_seqlens)))
  check(case, actual, one_device(case))


def test_an_overflow_stays_in_its_sequence():
  """Long keys make the first sequence's state infinite; the next one begins on the same device."""
  case = dataclasses.replace(PACKED, cu_seqlens=(0, 20, 64, 64, 64, 64, 64), initial_state=False)
  inputs = make_inputs(case)
  inputs["k"][:, : 20 * case.M] *= 1e8
  do, dfinal = cotangents(case)
  do[:, :20] = dfinal[0] = 0
  run = sharded(case, make_mesh(context=8), sequence_axis="context")
  (o, final_state), gradients = run(inputs, (do, dfinal), jnp.array(case.cu_seqlens))
  assert not np.all(np.isfinite(final_state[0]))
  assert np.all(np.isfinite(o[:, 20:])) and np.all(np.isfinite(final_state[1:]))
  assert np.all(np.isfinite(gradients["v"][:, 20 * case.M :]))


def test_kernels_on_several_devices():
  """In interpret mode: their final state's gradient is what the context's takes."""
  case = Case("interpret", B=1, T=8, M=1, H=1, HV=1, K=16, V=16)
  mesh = make_mesh(context=2)
  run = sharded(case, mesh, "interpret", sequence_axis="context")
  check(case, named(run(make_inputs(case), cotangents(case))), one_device(case))


@pytest.mark.gpu
@pytest.mark.parametrize("axes", [
  dict(batch_axis="x"), dict(head_axis="x"), dict(sequence_axis="x"),
], ids=lambda axes: next(iter(axes)))  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@both_types
def test_two_gpus(axes, dtype, axis_type):
  case = Case(f"gpu-{dtype}", T=300, K=64, V=128, dtype=dtype)
  mesh = make_mesh(axis_type, gpu=True, x=2)
  inputs = place(mesh, make_inputs(case), **axes)
  cotangent = place_cotangents(mesh, case, **axes)
  compiled = sharded(case, mesh, "pallas", **axes).lower(inputs, cotangent).compile()
  if "sequence_axis" not in axes:
    assert collectives(compiled.as_text()) == []
  check(case, named(compiled(inputs, cotangent)), one_device(case, "pallas"))


@pytest.mark.gpu
@both_types
def test_packed_sequences_on_two_gpus(axis_type):
  case = Case("gpu-packed", T=300, K=64, V=128, cu_seqlens=(0, 20, 170, 170, 290))
  mesh = make_mesh(axis_type, gpu=True, x=2)
  inputs = place(mesh, make_inputs(case), sequence_axis="x")
  cotangent = place_cotangents(mesh, case, sequence_axis="x")
  run = sharded(case, mesh, "pallas", sequence_axis="x")
  actual = named(run(inputs, cotangent, jnp.array(case.cu_seqlens)))
  check(case, actual, one_device(case, "pallas"))


# Serving

SERVING = Case("serving", B=4, T=2, K=16, V=24, l2norm=True, initial_state=False)
# Of two devices each has two requests and three slots; the second request is padding.
SLOTS = np.array([2, -1, 5, 3], np.int32)


def serving_inputs(case=SERVING):
  """With a pool of 6 slots, and NaN where it is not to be read."""
  inputs = {name: x for name, x in make_inputs(case).items() if name != "initial_state"}
  for x in inputs.values():
    x[1] = np.nan
  pool = np.random.default_rng(1).standard_normal((6, case.HV, case.K, case.V)).astype(np.float32)
  return inputs | dict(state=pool, state_indices=SLOTS)


def serve(operator, **options):
  run = functools.partial(operator, num_householder=2, use_qk_l2norm_in_kernel=True, **options)
  names = ("o", "pool", "states")
  return lambda state, rest: dict(zip(names, run(state=state, **rest), strict=False))


def to_numpy(tree):
  return jax.tree.map(np.asarray, tree)


def check_serving(mesh, inputs, axes, plain, over_mesh, what, **options):
  """Equals one device, moves nothing, and updates the pool in place."""
  expected = to_numpy(quick_jit(serve(plain, **options))(inputs["state"], without_pool(inputs)))
  inputs = place(mesh, inputs, **axes)
  f = serve(over_mesh, mesh=mesh, **axes, **options)
  args = inputs["state"], without_pool(inputs)
  jit = quick_jit if mesh.devices.flat[0].platform == "cpu" else jax.jit
  compiled = jit(f, donate_argnums=0).lower(*args).compile()
  assert collectives(compiled.as_text()) == []
  part = inputs["state"].addressable_shards[0].data.nbytes
  assert compiled.memory_analysis().alias_size_in_bytes == part
  actual = compiled(*args)
  assert inputs["state"].is_deleted()
  states = NamedSharding(mesh, P(axes.get("batch_axis"), axes.get("head_axis")))
  assert actual["pool"].sharding.is_equivalent_to(states, 4)
  assert_close(to_numpy(actual), expected, OUTPUTS["float32"], what)


def without_pool(inputs):
  return {name: x for name, x in inputs.items() if name != "state"}


@pytest.mark.parametrize(("split", "axis_type", "implementation"), [
  ("heads", AxisType.Auto, "xla"), ("both", AxisType.Explicit, "xla"),
  ("both", AxisType.Auto, "interpret"),
])  # fmt: skip
def test_decode(split, axis_type, implementation):
  sizes, axes = SPLITS[split]
  mesh = make_mesh(axis_type, **sizes | ({"data": 2} if split == "both" else {}))
  check_serving(
    mesh, serving_inputs(), axes, fused_recurrent_gated_delta_product,
    sharded_fused_recurrent_gated_delta_product, split, implementation=implementation,
    output_intermediate_states=True,
  )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_prefill_into_a_pool(packed):
  mesh, axes = make_mesh(data=2, model=2), dict(batch_axis="data", head_axis="model")
  inputs, options = serving_inputs(), {}
  if packed:
    mesh, axes = make_mesh(model=2), dict(head_axis="model")
    rows = lambda x: x.reshape(1, -1, *x.shape[2:])
    inputs |= {name: rows(inputs[name]) for name in ("q", "k", "v", "g", "beta")}
    options = dict(cu_seqlens=(0, 2, 4, 6, 8))
  check_serving(
    mesh, inputs, axes, chunk_gated_delta_product, sharded_gated_delta_product, "prefill",
    implementation="xla", **options,
  )  # fmt: skip


def test_speculation_over_heads():
  """The draft leaves the pool alone, without a copy; rollback is divided by the compiler."""
  mesh, axes = make_mesh(model=2), dict(head_axis="model")
  accepted = np.array([1, 0, 0, 2])

  def speculate(operator, **options):
    draft = serve(
      operator, implementation="xla", output_intermediate_states=True, update_state=False, **options
    )

    def f(pool, rest):
      out = draft(pool, rest)
      out["pool"] = rollback(out["pool"], out["states"], rest["state_indices"], accepted)
      return out

    return f

  inputs = serving_inputs()
  args = inputs["state"], without_pool(inputs)
  expected = to_numpy(quick_jit(speculate(fused_recurrent_gated_delta_product))(*args))
  inputs = place(mesh, inputs, **axes)
  args = inputs["state"], without_pool(inputs)
  f = speculate(sharded_fused_recurrent_gated_delta_product, mesh=mesh, **axes)
  compiled = quick_jit(f, donate_argnums=0).lower(*args).compile()
  assert collectives(compiled.as_text()) == []
  assert_close(to_numpy(compiled(*args)), expected, OUTPUTS["float32"], "speculation")


def test_decode_without_a_pool_and_slots_of_another_device():
  mesh, axes = make_mesh(data=2), dict(batch_axis="data")
  case = dataclasses.replace(SERVING, initial_state=True)
  options = dict(implementation="xla", num_householder=2)
  inputs = make_inputs(case)
  expected = fused_recurrent_gated_delta_product(**inputs, **options, output_final_state=True)
  over_mesh = functools.partial(sharded_fused_recurrent_gated_delta_product, mesh=mesh, **axes)
  actual = over_mesh(**place(mesh, inputs, **axes), **options, output_final_state=True)
  named = lambda results: dict(zip(("o", "final_state"), to_numpy(results), strict=True))
  assert_close(named(actual), named(expected), OUTPUTS["float32"], "no pool")

  inputs = serving_inputs()
  inputs["state_indices"] = np.array([4, -1, 2**31 - 1, -(2**31)], np.int32)
  before = inputs["state"]
  o, pool = over_mesh(**place(mesh, inputs, **axes), **options)
  assert not np.any(o)
  assert_same_bits(dict(pool=pool), dict(pool=before), "slots of others")


def test_errors_of_serving():
  mesh = make_mesh(a=4, b=2)
  inputs = serving_inputs()
  decode = functools.partial(sharded_fused_recurrent_gated_delta_product, **inputs, mesh=mesh)
  decode = functools.partial(decode, num_householder=2)
  assert_raises(ValueError, ["one of batch_axis, head_axis", "gdp_jax.fused"], decode)
  assert_raises(ValueError, ["batch_axis", "S=6", "4"], decode, batch_axis="a")
  assert_raises(ValueError, ["head_axis", "H=2", "4"], decode, head_axis="a")
  assert_raises(ValueError, ["T >= 1"], decode, head_axis="b", q=inputs["q"][:, :0],
                **{name: inputs[name][:, :0] for name in ("k", "v", "g", "beta")})  # fmt: skip
  other = np.array([2, -1, 5, 1])
  parts = ["state_indices", "request 3", "3 to 5", "got 1"]
  assert_raises(ValueError, parts, decode, batch_axis="b", state_indices=other)
  prefill = functools.partial(sharded_gated_delta_product, **inputs, num_householder=2, mesh=mesh)
  assert_raises(ValueError, parts, prefill, batch_axis="b", state_indices=other)
  assert_raises(NotImplementedError, ["state", "sequence_axis='b'"], prefill, sequence_axis="b")
  lies = place(make_mesh(AxisType.Explicit, x=2), inputs, batch_axis="x")
  decode = functools.partial(sharded_fused_recurrent_gated_delta_product, num_householder=2)
  assert_raises(ValueError, ["q must lie on"], decode, **lies, head_axis="x")


@pytest.mark.gpu
@both_types
@pytest.mark.parametrize("axis", ["batch_axis", "head_axis"])
def test_serving_on_two_gpus(axis, axis_type):
  mesh = make_mesh(axis_type, gpu=True, x=2)
  options = dict(implementation="pallas")
  check_serving(
    mesh, serving_inputs(), {axis: "x"}, fused_recurrent_gated_delta_product,
    sharded_fused_recurrent_gated_delta_product, "decode", output_intermediate_states=True,
    **options,
  )  # fmt: skip
  check_serving(
    mesh, serving_inputs(), {axis: "x"}, chunk_gated_delta_product, sharded_gated_delta_product,
    "prefill", **options,
  )  # fmt: skip


# What moves


@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
def test_bytes_moved(packed):
  """The module's docstring says how many, and that there are no others."""
  n, T = 4, 512
  cu_seqlens = (0, 100, 300, 500) if packed else None
  case = Case("bytes", B=2, T=T, cu_seqlens=cu_seqlens, initial_state=packed)
  mesh = make_mesh(context=n)
  inputs = place(mesh, make_inputs(case), sequence_axis="context")
  cotangent = place_cotangents(mesh, case, sequence_axis="context")
  offsets = () if case.cu_seqlens is None else (jnp.array(case.cu_seqlens),)
  f = functools.partial(
    sharded_gated_delta_product, **statics(case), mesh=mesh, sequence_axis="context"
  )
  forward = lambda inputs, *offsets: f(**inputs, cu_seqlens=offsets[0] if offsets else None)
  both = with_gradients(forward)

  B, HV, K, V, N = case.B, case.HV, case.K, case.V, case.N
  effects, states = 4 * B * HV * K * (K + V), 4 * N * HV * K * V
  moved = {"all-gather": n * effects}  # of these n, n - 1 come from others
  if packed:
    moved["all-reduce"] = states  # final_state
  text = quick_jit(forward).lower(inputs, *offsets).compile().as_text()
  assert totals(text) == moved

  moved["reduce-scatter"] = effects  # n - 1 times that, on the way
  if packed:
    moved["all-reduce"] += 2 * states  # dfinal_state, dinitial_state
  text = quick_jit(both).lower(inputs, cotangent, *offsets).compile().as_text()
  assert totals(text) == moved


# Layers

LAYER = dict(num_heads=2, num_v_heads=4, head_dim=8)
CONFIG = GatedDeltaProductConfig(
  vocab_size=19, num_hidden_layers=1, hidden_size=16, intermediate_size=24, initializer_range=0.5,
  **LAYER,
)  # fmt: skip
TRAINING = {
  "data": (dict(data=4), dict(batch_axis="data"), False),
  "tensor": (dict(model=2), dict(head_axis="model"), False),
  "context": (dict(context=4), dict(sequence_axis="context"), False),
  "packed": (
    dict(data=2, model=2, context=2),
    dict(batch_axis="data", head_axis="model", sequence_axis="context"),
    True,
  ),
}


def under(mesh):
  return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def training_step(packed, mesh=None, batch_axis=None, head_axis=None, sequence_axis=None):
  """The loss and the gradients of a small language model, and the placement of the latter."""
  axes = dict(batch_axis=batch_axis, head_axis=head_axis, sequence_axis=sequence_axis)
  tokens = np.random.default_rng(0).integers(0, 19, (4, 32)).astype(np.int32)
  # Documents that cross devices, one that fills several, and padding.
  lengths = [[9, 14, 9], [32, 0, 0], [3, 27, 2], [12, 8, 12]]
  segment_ids = np.stack([np.repeat([1, 2, 0 if n == 2 else 3], row)
                          for n, row in enumerate(lengths)])  # fmt: skip
  with under(mesh):
    model = GatedDeltaProductLM(CONFIG, **axes, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    if mesh is not None:
      put = lambda x: jax.device_put(x, NamedSharding(mesh, P(batch_axis, sequence_axis)))
      tokens, segment_ids = put(tokens), put(segment_ids)

    def loss(params, tokens, segment_ids):
      documents = dict(segment_ids=segment_ids) if packed else {}
      at_most = dict(max_segments=12) if packed else {}
      logits, _ = nnx.merge(graphdef, params)(tokens, **documents, **at_most)
      return next_token_loss(logits, tokens, **documents)

    loss, grads = quick_jit(jax.value_and_grad(loss))(params, tokens, segment_ids)
  grads = {"/".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(grads)}
  return dict(loss=np.asarray(loss)), grads


one_device_step = functools.cache(training_step)


@pytest.mark.parametrize("name", TRAINING)
def test_training_step(name):
  sizes, axes, packed = TRAINING[name]
  loss, grads = training_step(packed, make_mesh(**sizes), **axes)
  expected_loss, expected = one_device_step(packed)
  assert_close(loss, expected_loss, OUTPUTS["float32"], name)
  assert_close(to_numpy(grads), to_numpy(expected), GRADIENTS["float32"], name)
  if "head_axis" in axes:  # a parameter's gradient lies as it does
    grad = grads["layers/0/attn/o_proj/kernel"]
    assert grad.sharding.shard_shape(grad.shape) == (32, 16)


def test_parameters_say_how_they_lie():
  with jax.set_mesh(make_mesh(model=2)):
    layer = GatedDeltaProduct(16, **LAYER, conv_bias=True, head_axis="model", rngs=nnx.Rngs(0))
  specs = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
  by_name = {"/".join(path): spec.get_value() for path, spec in specs}
  columns, rows, vector = P(None, "model"), P("model", None), P("model")
  projections = {f"{name}_proj/kernel": columns for name in "qkvbag"} | {"o_proj/kernel": rows}
  kernels = {f"{name}_conv/kernel": columns for name in "qkv"}
  biases = {f"{name}_conv/bias": vector for name in "qkv"}
  scalars = dict(A_log=vector, dt_bias=vector) | {"o_norm/scale": P()}
  assert by_name == projections | kernels | biases | scalars
  for path, x in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
    assert x[...].sharding.spec == by_name["/".join(path)]


def test_layers_move_little():
  """Of the sequence the effects, and for the convolution a few tokens; of heads, blocks of k, v."""
  B, T, D, M, W, n = 2, 1024, 16, 2, 4, 4
  x = jnp.ones((B, T, D))
  channels = 2 * 8 * (1 + M) + 4 * 16 * M

  def moved(**axes):
    mesh = make_mesh(x=n if "sequence_axis" in axes else 2)
    with jax.set_mesh(mesh):
      layer = GatedDeltaProduct(D, **LAYER, **axes, rngs=nnx.Rngs(0))
      graphdef, params = nnx.split(layer)
      spec = P(None, axes.get("sequence_axis"))
      f = jax.jit(
        lambda params, x: nnx.merge(graphdef, params)(x)[0],
        out_shardings=NamedSharding(mesh, spec), compiler_options=QUICK,
      )  # fmt: skip
      y = f.lower(params, jax.device_put(x, NamedSharding(mesh, spec))).compile()
    return totals(y.as_text())

  context = moved(sequence_axis="x")
  assert context.pop("all-gather") == n * 4 * B * 4 * 8 * (8 + 16)
  # By three shifts, each of at most n rows besides the W-1.
  assert context.pop("collective-permute") <= 3 * 4 * B * (n + W - 1) * channels
  assert not context
  tensor = moved(head_axis="x")
  assert tensor.pop("all-reduce") == 4 * B * T * D
  assert tensor.pop("all-to-all") == 4 * B * T * M * (2 * 8 + 4 * 16 + 4) // 2
  assert not tensor


def serve_layer(mesh=None, **axes):
  """Prefill of a packed row into a pool of 5 slots, then two steps; and the compiled step."""
  rng = np.random.default_rng(0)
  row = rng.standard_normal((1, 9, 16)).astype(np.float32)
  tokens = rng.standard_normal((3, 2, 16)).astype(np.float32)
  slots = np.array([3, -1, 0], np.int32)
  with under(mesh):
    layer = GatedDeltaProduct(16, **LAYER, **axes, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)

    @functools.partial(quick_jit, donate_argnums=1)
    def prefill(params, pool, x):
      layer = nnx.merge(graphdef, params)
      return layer(x, pool, np.array([0, 4, 6, 9]), state_indices=slots)

    @functools.partial(quick_jit, donate_argnums=1)
    def step(params, pool, x):
      return nnx.merge(graphdef, params).step(x, pool, slots)

    pool = layer.initialize_state(5)
    y, pool = prefill(params, pool, row)
    compiled = step.lower(params, pool, tokens[:, :1]).compile()
    results = dict(prefill=y)
    for t in range(2):
      before, (results[f"step {t}"], pool) = pool, compiled(params, pool, tokens[:, t : t + 1])
  assert all(x.is_deleted() for x in jax.tree.leaves(before))
  results |= {f"state {n}": x for n, x in enumerate(jax.tree.leaves(pool))}
  return to_numpy(results), compiled


def test_layer_serves_over_heads():
  """From a pool in place; what moves is y, and blocks of k, v and beta, as in a call."""
  N, D, M, n = 3, 16, 2, 2
  actual, step = serve_layer(make_mesh(model=n), head_axis="model")
  expected, plain = serve_layer()
  assert_close(actual, expected, OUTPUTS["float32"], "a layer over heads")
  moved = totals(step.as_text())
  assert moved.pop("all-reduce") == 4 * N * D
  assert moved.pop("all-to-all") == 4 * N * M * (2 * 8 + 4 * 16 + 4) // n
  assert not moved
  alias = lambda compiled: compiled.memory_analysis().alias_size_in_bytes
  assert alias(step) == alias(plain) // n


def generation(lengths, mesh=None, **axes):
  prompt = np.random.default_rng(0).integers(0, 19, (4, 5)).astype(np.int32)
  with under(mesh):
    model = GatedDeltaProductLM(CONFIG, **axes, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    f = lambda params, *args: nnx.merge(graphdef, params).generate(
      prompt, 12, prompt_lengths=args[0] if args else None
    )
    return np.asarray(quick_jit(f)(params, *([np.array(lengths)] if lengths else [])))


@pytest.mark.parametrize(("split", "lengths"), [("heads", (5, 1, 4, 3)), ("both", None)])
def test_generation(split, lengths):
  """Token for token that of one device."""
  sizes, axes = SPLITS[split]
  tokens = generation(lengths, make_mesh(**sizes), **axes)
  np.testing.assert_array_equal(tokens, generation(lengths))


def test_what_layers_over_a_mesh_do_not_serve():
  with jax.set_mesh(make_mesh(data=2)):
    layer = functools.partial(GatedDeltaProduct, 16, **LAYER, rngs=nnx.Rngs(0))
    state, x = layer().initialize_state(2), jnp.ones((2, 1, 16))
    args = dict(x=x, state=state)
    by_sequence = layer(sequence_axis="data").step
    assert_raises(NotImplementedError, ["sequence_axis='data'"], by_sequence, **args)
    by_batch, args = layer(batch_axis="data"), args | dict(state_indices=jnp.array([0, 1]))
    for f in (by_batch, by_batch.step):
      assert_raises(NotImplementedError, ["pool", "batch_axis='data'"], f, **args)


# A plain call

PLAIN = Case("plain", B=4, T=16)
plain = functools.partial(chunk_gated_delta_product, num_householder=2)
ADVICE = ["gdp_jax.sharding.sharded_gated_delta_product", "jax.shard_map"]


def test_plain_call_on_auto_axes():
  mesh = make_mesh(data=4, model=2)
  inputs = place(mesh, make_inputs(PLAIN), batch_axis="data", head_axis="model")
  for implementation in (None, "interpret"):
    f = functools.partial(plain, implementation=implementation)
    assert_raises(ValueError, ["8 devices", *ADVICE], f, **inputs)
    assert_raises(ValueError, ["8 devices", *ADVICE], jax.jit(f), **inputs)
  grad = jax.grad(lambda q: jnp.sum(plain(**inputs | dict(q=q))[0]))
  assert_raises(ValueError, ["8 devices", *ADVICE], lambda: grad(inputs["q"]))
  # What is plain JAX the compiler divides itself.
  xla = quick_jit(lambda inputs: plain(**inputs, implementation="xla")[0])
  compiled = xla.lower(inputs).compile()
  assert collectives(compiled.as_text()) == []
  expected = one_device(PLAIN)[0]["o"]
  assert_close(dict(o=np.asarray(compiled(inputs))), dict(o=expected), OUTPUTS["float32"], "plain")


def test_plain_call_on_a_split_sequence():
  inputs = place(make_mesh(context=8), make_inputs(PLAIN), sequence_axis="context")
  f = functools.partial(plain, **inputs, implementation="xla")
  assert_raises(ValueError, ["q", "(4, 16, 2, 24)", "(4, 2, 2, 24)", *ADVICE], f)


@pytest.mark.parametrize("axis", ["batch_axis", "head_axis", "sequence_axis"])
def test_plain_call_on_explicit_axes(axis):
  inputs = place(make_mesh(AxisType.Explicit, x=2), make_inputs(PLAIN), **{axis: "x"})
  for implementation in (None, "xla"):
    f = functools.partial(plain, implementation=implementation)
    assert_raises(ValueError, ["Explicit", "'x'", *ADVICE], f, **inputs)
    assert_raises(ValueError, ["Explicit", "'x'", *ADVICE], jax.jit(f), **inputs)


@both_types
def test_plain_decode_prepare_and_single_kernels(axis_type):
  """Each says what to call; in plain JAX decode is divided, without a transfer by heads."""
  mesh, axes = make_mesh(axis_type, x=2), dict(head_axis="x")
  inputs = place(mesh, serving_inputs(), **axes)
  what = ["2 devices"] if axis_type == AxisType.Auto else ["Explicit", "'x'"]
  put = lambda *shape: jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P("x")))
  sizes = dict(num_heads=1, head_k_dim=16, head_v_dim=24, num_householder=2)
  A_log, widths = np.zeros(1, np.float32), (16, 32, 48, 2, 1)
  advice = dict(decode="sharded_fused_recurrent_gated_delta_product", kernel="gdp_jax.xla")
  calls = [
    ("decode", fused_recurrent_gated_delta_product, inputs | dict(num_householder=2)),
    ("prepare", prepare, dict(x=put(2, 3, 99), A_log=A_log, **sizes)),
    ("kernel", kernels.chunk_local_cumsum, dict(g=inputs["g"])),
    ("kernel", kernels.prepare_fwd, dict(x=put(2, 99), A_log=A_log, dt_bias=None, sizes=widths)),
  ]
  for name, f, kwargs in calls:
    arrays = {key: x for key, x in kwargs.items() if isinstance(x, (jax.Array, np.ndarray))}
    rest = {key: x for key, x in kwargs.items() if key not in arrays}
    for implementation in ("interpret",) if name == "kernel" else (None, "interpret"):
      g = functools.partial(f, **rest, implementation=implementation)
      parts = [*what, "jax.shard_map", advice.get(name, "")]
      assert_raises(ValueError, parts, g, **arrays)
      assert_raises(ValueError, parts, jax.jit(g), **arrays)

  decode = serve(fused_recurrent_gated_delta_product, implementation="xla")
  args = inputs["state"], without_pool(inputs)
  assert collectives(quick_jit(decode).lower(*args).compile().as_text()) == []


def test_plain_call_inside_shard_map():
  """Each device's own packed row: the way to split a batch of them."""
  case = Case("rows", T=24, cu_seqlens=(0, 5, 20), initial_state=False)
  other = dataclasses.replace(case, seed=1, cu_seqlens=(0, 11, 24))
  rows = jax.tree.map(lambda *x: np.concatenate(x), make_inputs(case), make_inputs(other))
  offsets = np.array([case.cu_seqlens, other.cu_seqlens])
  split = P("data")

  @functools.partial(
    jax.shard_map, mesh=make_mesh(data=2), in_specs=split, out_specs=split, check_vma=False
  )
  def f(inputs, cu_seqlens):
    return plain(**inputs, cu_seqlens=cu_seqlens[0])[0]

  o = np.asarray(quick_jit(f)(rows, offsets))
  for row, each in enumerate((case, other)):
    expected = one_device(each)[0]["o"]
    assert_close(dict(o=o[row : row + 1]), dict(o=expected), OUTPUTS["float32"], "a row")


# Errors


def test_errors():
  mesh = make_mesh(a=4, b=2)
  inputs = make_inputs(dataclasses.replace(PLAIN, B=2))
  f = functools.partial(sharded_gated_delta_product, **inputs, num_householder=2)
  on = functools.partial(f, mesh=mesh)
  assert_raises(ValueError, ["mesh", "jax.set_mesh"], f, batch_axis="a")
  assert_raises(TypeError, ["mesh", "str"], f, mesh="a", batch_axis="a")
  assert_raises(ValueError, ["one of", "none"], on)
  assert_raises(ValueError, ["batch_axis", "('a', 'b')", "'c'"], on, batch_axis="c")
  assert_raises(TypeError, ["head_axis", "['a']"], on, head_axis=["a"])
  assert_raises(ValueError, ["sequence_axis", "'b'"], on, head_axis="b", sequence_axis=("a", "b"))
  assert_raises(ValueError, ["batch_axis", "B=2", "'a'", "4"], on, batch_axis="a")
  assert_raises(ValueError, ["head_axis", "H=2", "'a'", "4"], on, head_axis="a")
  assert_raises(ValueError, ["beta", "shape"], on, batch_axis="b", beta=inputs["beta"][:, 1:])
  packed = dict(inputs, **make_inputs(PACKED)) | dict(cu_seqlens=PACKED.cu_seqlens)
  assert_raises(ValueError, ["cu_seqlens", "sequence_axis"], on, batch_axis="b", **packed)
  packed |= dict(cu_seqlens=(0, 9, 8))
  assert_raises(ValueError, ["cu_seqlens", "decrease"], on, sequence_axis="b", **packed)


def test_errors_inside_shard_map_and_on_explicit_axes():
  inputs = make_inputs(PLAIN)
  mesh = make_mesh(AxisType.Explicit, x=2)
  f = functools.partial(sharded_gated_delta_product, num_householder=2)
  lies = place(mesh, inputs, batch_axis="x")
  with pytest.raises(ValueError, match="q must lie on"):
    f(**lies, sequence_axis="x")
  inside = lambda inputs: f(**inputs, batch_axis="x")[0]
  split = dict(in_specs=P("x"), out_specs=P("x"), check_vma=False)
  with pytest.raises(ValueError, match="context_parallel_gated_delta_product"):
    jax.shard_map(inside, mesh=mesh, **split)(lies)


# For CUDA, from any machine


def on_two_gpus(axis_type):
  device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
  return AbstractMesh((2,), ("x",), axis_types=(axis_type,), abstract_device=device)


@both_types
def test_lowering_for_gpus(axis_type):
  """The kernels are there; a plain call raises."""
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_inputs(PLAIN))
  mesh = on_two_gpus(axis_type)
  with use_abstract_mesh(mesh):
    prefill, decode = sharded_gated_delta_product, sharded_fused_recurrent_gated_delta_product
    for operator, axis, least in (
      (prefill, "batch_axis", 6), (prefill, "sequence_axis", 6), (decode, "head_axis", 1),
    ):  # fmt: skip
      f = functools.partial(operator, num_householder=2, **{axis: "x"})
      f = lambda inputs, f=f: f(**inputs)
      text = jax.jit(f).trace(shapes).lower(lowering_platforms=("cuda",)).as_text()
      assert count_kernels(text) >= least
    split = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("x"))), shapes
    )
    with pytest.raises(ValueError, match=ADVICE[0]):
      f = jax.jit(lambda inputs: plain(**inputs))
      f.trace(split).lower(lowering_platforms=("cuda",))


# JAX gives no guarantee that another version of it will know this call.
TRITON = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")


def test_export_for_cuda():
  """There and back, with the gradient."""
  pytest.importorskip("flatbuffers", reason="jax.export serializes by flatbuffers")
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_inputs(PLAIN))
  f = jax.jit(lambda inputs: plain(**inputs, output_final_state=True))
  with cuda_target():
    exported = jax.export.export(f, platforms=["cuda"], disabled_checks=[TRITON])(shapes)
    back = jax.export.deserialize(exported.serialize(vjp_order=1))
  assert back.platforms == ("cuda",) and back.nr_devices == 1
  assert count_kernels(back.mlir_module()) == 6
  assert back.has_vjp() and count_kernels(back.vjp().mlir_module()) > 6
  assert [x.shape for x in back.out_avals] == [(4, 16, 4, 40), (4, 4, 24, 40)]


def test_export_for_the_cpu():
  pytest.importorskip("flatbuffers", reason="jax.export serializes by flatbuffers")
  inputs = make_inputs(PLAIN)
  f = quick_jit(lambda inputs: plain(**inputs, implementation="xla", output_final_state=True))
  back = jax.export.deserialize(jax.export.export(f, platforms=["cpu"])(inputs).serialize())
  o, final_state = quick_jit(back.call)(inputs)
  actual = dict(o=np.asarray(o), final_state=np.asarray(final_state))
  assert_close(actual, one_device(PLAIN)[0], OUTPUTS["float32"], "exported")


# Large


def draw(seed, shape, dtype=jnp.bfloat16):
  return 0.1 * jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.gpu
def test_offsets_past_2_to_the_31():
  """2.15e9 elements of k and of v: the last 64 tokens, a sequence of their own, against themselves.

  The keys are about 1 long, without the norm: XLA orders its gradient's sums by an array's size.
  About 30 GB; 60 with the gradient.
  """
  T, M, H, D, tail = 65600, 4, 64, 128, 64
  R = T * M
  q, k, v = draw(0, (1, T, H, D)), draw(1, (1, R, H, D)), draw(2, (1, R, H, D))
  g, beta = jnp.full((1, T, H), -0.01), jnp.full((1, R, H), 0.5)
  assert k.size > 2**31

  @jax.jit
  def f(q, k, v, g, beta, cu_seqlens):
    def loss(k, v):
      o, states = chunk_gated_delta_product(
        q, k, v, g, beta, M, cu_seqlens=cu_seqlens, output_final_state=True,
        implementation="pallas",
      )  # fmt: skip
      o, state = o[:, -tail:], states[-1]
      return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state), (o, state)

    (dk, dv), (o, state) = jax.grad(loss, argnums=(0, 1), has_aux=True)(k, v)
    return dict(o=o, state=state, dk=dk[:, -tail * M :], dv=dv[:, -tail * M :])

  whole = jax.device_get(f(q, k, v, g, beta, jnp.array([0, T - tail, T])))
  q, g = (x[:, -tail:] for x in (q, g))
  k, v, beta = (x[:, -tail * M :] for x in (k, v, beta))
  alone = jax.device_get(f(q, k, v, g, beta, jnp.array([0, 0, tail])))
  assert_same_bits(whole, alone, "the tail")


@pytest.mark.gpu
def test_more_than_65535_sequences_times_heads():
  """And their gradients: each sequence alone is one token."""
  case = Case("many", T=2200, M=1, H=32, HV=32, K=16, V=16, cu_seqlens=tuple(range(2201)))
  assert case.N * case.HV > 65535
  check(case, one_device(case, "pallas"), one_device(case))
