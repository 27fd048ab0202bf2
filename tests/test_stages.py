"""Each forward stage alone: the kernel against its twin in jnp, on the inputs it really gets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, Case, assert_close, make_inputs

from gdp_jax import kernels, metadata, xla

# float32: the same sums in another order, 3xtf32 products on a GPU.
# bfloat16: both round the same fp32 value, which differs in the last bits, and the sweep rounds its
#   state before each product: a few of bf16's roundings (1.6e-3 in the mean square).
BOUNDS = {"float32": 1e-5, "bfloat16": 5e-3}

STAGES = (
  "chunk_local_cumsum",
  "chunk_scaled_dot_kkt_fwd",
  "solve_tril",
  "recompute_w_u_fwd",
  "chunk_gated_delta_product_fwd_h",
  "chunk_gated_delta_product_fwd_wy_h",
  "chunk_gated_delta_product_effects",
  "chunk_gated_delta_product_fwd_o",
)

CASES = [
  Case("fixed", T=37, M=2),
  Case("whole", T=128, M=2, K=32, V=32),  # no rows or columns that the kernels have to mask
  Case("fixed-M1-no-gate", T=37, M=1, gate=None, initial_state=False, K=80, V=20),
  Case("packed-M3", T=60, M=3, cu_seqlens=(0, 5, 5, 40, 57)),
  Case("packed-M4-no-gate", T=40, M=4, cu_seqlens=(0, 1, 33, 40, 40), gate=None, H=4),
  Case("packed-bf16", T=60, M=2, cu_seqlens=(0, 0, 16, 58), dtype="bfloat16", gate="reset"),
]


@functools.cache
def inputs_of_stages(case, C):
  """What each stage of `gdp_jax.xla` gets and gives in the operator, padding poisoned with NaN.

  Returns:
    {stage: (arguments, keyword arguments, results)}
  """
  M, HV = case.M, case.HV
  static = {}

  def pipeline(q, k, v, g, beta, initial_state, tokens):
    stages = {}
    on_tokens = on_rows = dict(cu_seqlens=None, chunk_indices=None)
    if tokens is not None:
      rows = tokens * M
      token_chunks = metadata.prepare_chunk_indices(tokens, case.T, C)
      row_chunks = metadata.prepare_chunk_indices(rows, case.T * M, C)
      on_tokens = dict(cu_seqlens=tokens, chunk_indices=token_chunks)
      on_rows = dict(cu_seqlens=rows, chunk_indices=row_chunks)

    def poison(x):
      if x is None:
        return None
      used = case.valid_tokens * x.shape[1] // case.T
      return x.at[:, used:].set(jnp.nan)

    def stage(name, *streams, states=(), arrays, **kwargs):
      args = (*map(poison, streams), *states)
      results = getattr(xla, name)(*args, **arrays, **kwargs)
      static[name] = kwargs
      stages[name] = args, arrays, results
      return results

    g_tokens = g_rows = None
    if g is not None:
      g_on_rows = jnp.zeros((case.B, case.T * M, HV)).at[:, ::M].set(g)
      g_tokens = stage("chunk_local_cumsum", g, chunk_size=C, arrays=on_tokens)
      g_rows = stage("chunk_local_cumsum", g_on_rows, chunk_size=C, arrays=on_rows)
    A = stage("chunk_scaled_dot_kkt_fwd", k, g_rows, beta, chunk_size=C, arrays=on_rows)
    Ti = stage("solve_tril", A, allow_tf32=k.dtype != jnp.float32, arrays=on_rows)
    w, u = stage("recompute_w_u_fwd", k, v, beta, Ti, g_rows, arrays=on_rows)
    sweep = dict(
      states=(initial_state,), arrays=dict(cu_seqlens=on_rows["cu_seqlens"]),
      output_final_state=True, num_householder=M,
    )  # fmt: skip
    h, v_new, _ = stage("chunk_gated_delta_product_fwd_h", k, w, u, g_rows, chunk_size=C, **sweep)
    stage("chunk_gated_delta_product_fwd_wy_h", k, v, beta, Ti, g_rows, **sweep)
    stage(
      "chunk_gated_delta_product_effects", k, v, beta, Ti, g_rows,
      num_householder=M, arrays=sweep["arrays"],
    )  # fmt: skip
    stage(
      "chunk_gated_delta_product_fwd_o", q, k, v_new, states=(h, poison(g_tokens)),
      scale=0.3, chunk_size=C, num_householder=M, arrays=on_tokens,
    )  # fmt: skip
    return stages

  tokens = None if case.cu_seqlens is None else np.array(case.cu_seqlens, np.int32)
  stages = jax.jit(pipeline)(**make_inputs(case), tokens=tokens)
  return {
    name: (args, arrays | static[name], results) for name, (args, arrays, results) in stages.items()
  }


def named(name, results):
  names = {
    "recompute_w_u_fwd": ["w", "u"],
    "chunk_gated_delta_product_fwd_h": ["h", "v_new", "final_state"],
    "chunk_gated_delta_product_fwd_wy_h": ["h", "v_new", "final_state"],
    "chunk_gated_delta_product_effects": ["final_state"],
  }.get(name, [name])
  results = results if isinstance(results, tuple) else (results,)
  return {n: np.asarray(x, np.float32) for n, x in zip(names, results, strict=True)}


def states_of_chunks(case, C, per_chunk):
  """Indices of the states of chunks that have rows, and where the last sequence's states end.

  A token chunk has one state or (per_chunk = M) one for each of its row chunks.
  """
  used, end = [], 0
  for n in np.diff((0, case.T) if case.cu_seqlens is None else case.cu_seqlens):
    used += range(end, end + -(-n * per_chunk // C))
    end += -(-n // C) * per_chunk
  return used, end


# Small chunks keep interpret mode fast; 64 is what the operator uses.
@pytest.mark.parametrize(
  ("implementation", "C"),
  [
    pytest.param("interpret", 16, id="interpret-16"),
    pytest.param("pallas", 16, id="pallas-16", marks=pytest.mark.gpu),
    pytest.param("pallas", 64, id="pallas-64", marks=pytest.mark.gpu),
  ],
)
@pytest.mark.parametrize(
  ("name", "case"),
  [
    pytest.param(name, case, id=f"{name}-{case.name}")
    for name in STAGES
    for case in CASES
    if case.gate is not None or name != "chunk_local_cumsum"
  ],
)
def test_kernel_equals_its_twin(name, case, implementation, C):
  args, kwargs, expected = inputs_of_stages(case, C)[name]
  f = functools.partial(getattr(kernels, name), **kwargs, implementation=implementation)
  actual = jax.jit(f)(*args)
  assert jax.tree.map(lambda x: x.dtype, actual) == jax.tree.map(lambda x: x.dtype, expected)
  actual, expected = named(name, actual), named(name, expected)
  for results in (actual, expected):
    for tensor, x in results.items():
      if tensor == "h":
        used, end = states_of_chunks(case, C, 1)
        assert not np.any(x[:, end:]), "states of no chunk"
        results[tensor] = x[:, used]
      elif tensor != "final_state":
        padding = x[:, case.valid_tokens * x.shape[1] // case.T :]
        assert not np.any(padding), f"{tensor} of padding"
  assert_close(actual, expected, BOUNDS[case.dtype], f"{case.name}, C={C}")


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_both_sweeps_agree(case):
  """With w and u and without them: the operator runs one, its own tests do not see the other."""
  stages = inputs_of_stages(case, 16)
  name = "chunk_gated_delta_product_fwd_h"
  expected = named(name, stages["chunk_gated_delta_product_fwd_wy_h"][2])
  assert_close(named(name, stages[name][2]), expected, BOUNDS["float32"], case.name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_derived_chunk_indices(implementation):
  args, kwargs, expected = inputs_of_stages(CASES[2], 16)["chunk_scaled_dot_kkt_fwd"]
  kwargs = kwargs | dict(chunk_indices=None)
  f = functools.partial(stage_of(implementation, "chunk_scaled_dot_kkt_fwd"), **kwargs)
  assert_close(dict(A=jax.jit(f)(*args)), dict(A=expected), BOUNDS["float32"], "derived indices")


def stage_of(implementation, name):
  if implementation == "xla":
    return getattr(xla, name)
  return functools.partial(getattr(kernels, name), implementation=implementation)


# The inverse amplifies errors most, and keys that repeat make it large: (I + A)^-1 of A_ij = beta
# has entries of size beta, while powers of A reach 1e17.


@pytest.mark.parametrize("tf32", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inverse_of_repeated_keys(implementation, C, tf32):
  beta = np.array([1.0, 1.9, 2.0, 2.0])
  key = np.random.default_rng(0).standard_normal((C, 8)) * 0.05 + 1
  key /= np.linalg.norm(key, axis=-1, keepdims=True)
  A = np.tril(beta[:, None, None] * np.ones((C, C)), -1)
  A[3] *= key @ key.T  # nearly the same key
  A = A.astype(np.float32)
  expected = np.linalg.inv(np.eye(C) + A.astype(np.float64))
  stream = np.swapaxes(A, 0, 1)[None]  # [1, C, HV, C]
  f = functools.partial(stage_of(implementation, "solve_tril"), allow_tf32=tf32)
  Ti = np.swapaxes(np.asarray(jax.jit(f)(stream))[0], 0, 1)
  # tf32 rounds to 2^-11, 5e-4; the sums of alternating signs here lose a factor of 25.
  bound = 2e-2 if tf32 else BOUNDS["float32"]
  for i in range(len(beta)):
    assert_close(dict(Ti=Ti[i]), dict(Ti=expected[i]), bound, f"{beta[i]=}, {C=}")
