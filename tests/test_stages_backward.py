"""Each backward stage alone, and the sweep that feeds it: the kernel against its twin in jnp, and
lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, assert_close, make_inputs, quick_jit
from lowering import count_kernels, lower_for_cuda
from test_stages import CASES, states_of_chunks

from gdp_jax import chunk_gated_delta_product, kernels, xla

# float32: the same sums in another order, 3xtf32 products on a GPU.
# bfloat16: as for the forward stages, and dg and dbeta, in fp32, are sums of rounded numbers.
BOUNDS = {"float32": 1e-5, "bfloat16": 5e-3}

RESULTS = {
  "chunk_gated_delta_product_fwd_wy_h": ("h", "v_new", "final_state"),
  "chunk_gated_delta_product_states": ("states",),
  "chunk_gated_delta_product_bwd_o": ("dq", "dk", "dv", "dg"),
  "chunk_gated_delta_product_bwd_h": ("dh", "dres", "dinitial_state"),
  "chunk_gated_delta_product_bwd_wy": ("dk", "dv", "dbeta", "dg"),
}
STATES = ("states", "dh")  # of row chunks


def make_arguments(case):
  """Inputs, cotangents and offsets of a case, for its pipeline."""
  rng = np.random.default_rng(1)
  inputs = make_inputs(case)
  do = rng.standard_normal((case.B, case.T, case.HV, case.V)).astype(jnp.dtype(case.dtype))
  dfinal_state = None
  if case.initial_state:
    dfinal_state = rng.standard_normal(inputs["initial_state"].shape).astype(np.float32)
  tokens = None if case.cu_seqlens is None else np.array(case.cu_seqlens, np.int32)
  return dict(**inputs, do=do, dfinal_state=dfinal_state, tokens=tokens)


def named(stage, results):
  """{name: result} of a stage, which returns a tuple of several and one result by itself."""
  names = RESULTS[stage]
  return dict(zip(names, results if len(names) > 1 else (results,), strict=True))


def make_pipeline(case, C):
  """What each stage gets and gives in the operator's gradient, in the stages of `gdp_jax.xla`.

  Returns:
    A function of `make_arguments(case)` to {stage: (arrays, results)}, both by their names; and
    {stage: its other arguments}, which is empty until that function is called or traced.
  """
  M, static = case.M, {}

  def pipeline(q, k, v, g, beta, initial_state, do, dfinal_state, tokens):
    stages = {}

    def stage(name, arrays, **kwargs):
      results = named(name, getattr(xla, name)(**arrays, **kwargs))
      stages[name], static[name] = (arrays, results), kwargs
      return results

    rows = None if tokens is None else tokens * M
    on_tokens, on_rows = dict(g=None, cu_seqlens=tokens), dict(g=None, cu_seqlens=rows)
    if g is not None:
      g_rows = jnp.zeros((case.B, case.T * M, case.HV)).at[:, ::M].set(g)
      on_tokens["g"] = xla.chunk_local_cumsum(g, C, tokens)
      on_rows["g"] = xla.chunk_local_cumsum(g_rows, C, rows)
    A = xla.chunk_scaled_dot_kkt_fwd(k, on_rows["g"], beta, rows, C)
    Ti = xla.solve_tril(A, rows, output_dtype=k.dtype)
    x = stage(
      "chunk_gated_delta_product_fwd_wy_h",
      dict(k=k, v=v, beta=beta, A=Ti, initial_state=initial_state, **on_rows),
      output_final_state=True, num_householder=M,
    )  # fmt: skip
    h, v_new = x["h"], x["v_new"]
    x = stage(
      "chunk_gated_delta_product_states",
      dict(k=k, v_new=v_new, h=h, **on_rows),
      chunk_size=C, num_householder=M,
    )  # fmt: skip
    states = x["states"]
    x = stage(
      "chunk_gated_delta_product_bwd_o",
      dict(q=q, k=k, v=v_new, h=h, do=do, **on_tokens),
      scale=0.3, chunk_size=C, num_householder=M,
    )  # fmt: skip
    dk, dv = x["dk"], x["dv"]
    x = stage(
      "chunk_gated_delta_product_bwd_h",
      dict(
        q=q, k=k, beta=beta, A=Ti, do=do, dv=dv, g_tokens=on_tokens["g"],
        dfinal_state=dfinal_state, **on_rows,
      ),
      scale=0.3, output_dinitial_state=initial_state is not None, num_householder=M,
    )  # fmt: skip
    stage(
      "chunk_gated_delta_product_bwd_wy",
      dict(
        k=k, v=v, beta=beta, states=states, v_new=v_new, dh=x["dh"], dres=x["dres"], dk=dk,
        **on_rows,
      ),
      chunk_size=C, num_householder=M,
    )  # fmt: skip
    return stages

  return pipeline, static


@functools.cache
def run_pipeline(case, C):
  pipeline, static = make_pipeline(case, C)
  return quick_jit(pipeline)(**make_arguments(case)), static


def kernel(stage, static, implementation):
  f = functools.partial(getattr(kernels, stage), **static[stage], implementation=implementation)
  return lambda arrays: named(stage, f(**arrays))


def poison(case, C, arrays):
  """NaN in padding, and in the states of chunks that have no rows."""
  arrays = dict(arrays)
  for name, x in arrays.items():
    if name in ("h", *STATES):
      per_chunk = 1 if name == "h" else case.M
      unused = np.delete(np.arange(x.shape[1]), states_of_chunks(case, C, per_chunk)[0])
      arrays[name] = x.at[:, unused].set(jnp.nan)
    elif name not in ("cu_seqlens", "initial_state", "dfinal_state") and x is not None:
      arrays[name] = x.at[:, case.valid_tokens * x.shape[1] // case.T :].set(jnp.nan)
  return arrays


# Small chunks keep interpret mode fast; 64 is what the operator uses.
@pytest.mark.parametrize(
  ("implementation", "C"),
  [
    pytest.param("interpret", 16, id="interpret-16"),
    pytest.param("pallas", 16, id="pallas-16", marks=pytest.mark.gpu),
    pytest.param("pallas", 64, id="pallas-64", marks=pytest.mark.gpu),
  ],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("stage", RESULTS)
def test_kernel_equals_its_twin(stage, case, implementation, C):
  stages, static = run_pipeline(case, C)
  arrays, expected = stages[stage]
  actual = quick_jit(kernel(stage, static, implementation))(poison(case, C, arrays))
  assert jax.tree.map(lambda x: x.dtype, actual) == jax.tree.map(lambda x: x.dtype, expected)
  actual, expected = ({n: x for n, x in r.items() if x is not None} for r in (actual, expected))
  for results in (actual, expected):
    for name, x in results.items():
      x = np.asarray(x, np.float32)
      if name in ("h", *STATES):
        used, end = states_of_chunks(case, C, 1 if name == "h" else case.M)
        assert name != "h" or not np.any(x[:, end:]), "states of no chunk"
        x = x[:, used]
      elif name in ("final_state", "dinitial_state"):
        pass
      else:
        assert not np.any(x[:, case.valid_tokens * x.shape[1] // case.T :]), f"{name} of padding"
        if name == "dg" and x.shape[1] != case.T:
          x = x[:, :: case.M]  # a token's decay belongs to its first row
      results[name] = x
  assert_close(actual, expected, BOUNDS[case.dtype], f"{stage}, {case.name}, C={C}")


# Lowering for CUDA

WIDE = [
  Case(
    f"K{K}-V{V}-{dtype}-{kind}", B=1, T=100, H=1, HV=2, K=K, V=V, dtype=dtype,
    gate=None if kind == "fixed" else "weak", initial_state=kind != "fixed",
    cu_seqlens=None if kind == "fixed" else (0, 10, 70),
  )
  for K, V in ((128, 128), (256, 512))
  for dtype in ("bfloat16", "float32")
  for kind in ("fixed", "packed")
]  # fmt: skip


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_each_stage_is_one_kernel(case):
  pipeline, static = make_pipeline(case, C=64)
  for stage, (arrays, _) in jax.eval_shape(pipeline, **make_arguments(case)).items():
    text = lower_for_cuda(kernel(stage, static, "pallas"), arrays)
    assert count_kernels(text) == 1, stage


# No implementation means the kernels, where the code is for CUDA: one will do.
@pytest.mark.parametrize(
  ("case", "implementation"),
  [*((case, "pallas") for case in WIDE), (WIDE[1], None)],
  ids=lambda x: getattr(x, "name", x),
)
def test_the_whole_gradient_is_kernels(case, implementation):
  def run(inputs, cu_seqlens, cotangents):
    f = lambda x: chunk_gated_delta_product(
      **x, num_householder=case.M, output_final_state=True, cu_seqlens=cu_seqlens,
      implementation=implementation,
    )  # fmt: skip
    outputs, pull = jax.vjp(f, inputs)
    return outputs, pull(cotangents)

  x = make_arguments(case)
  inputs = {name: x[name] for name in ("q", "k", "v", "g", "beta", "initial_state")}
  cotangents = x["do"], np.zeros((case.N, case.HV, case.K, case.V), np.float32)
  text = lower_for_cuda(run, inputs, x["tokens"], cotangents)
  # Four stages forward, the row chunks' states and three backward; with gates, in both directions
  # their sums within token chunks and within row chunks.
  assert count_kernels(text) == 8 + (0 if case.gate is None else 4)
