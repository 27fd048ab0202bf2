"""Every forward kernel, alone and in the operator, lowers for CUDA on any machine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from cases import Case, make_inputs, options
from lowering import count_kernels, lower_for_cuda

from gdp_jax import chunk_gated_delta_product, kernels, metadata

FIXED = Case("fixed", T=100, M=2, H=1, HV=2)
PACKED = dataclasses.replace(FIXED, name="packed", cu_seqlens=(0, 10, 70))
WIDTHS = [(128, 128), (256, 512), (40, 24)]
DTYPES = ["bfloat16", "float16", "float32"]
CASES = [
  dataclasses.replace(
    case, K=K, V=V, dtype=dtype, gate=gate, initial_state=gate is not None,
    name=f"{case.name}-K{K}-V{V}-{dtype}-{'gate' if gate else 'no-gate'}",
  )
  for case in (FIXED, PACKED) for K, V in WIDTHS for dtype in DTYPES for gate in (None, "weak")
]  # fmt: skip


SEGMENTS = dataclasses.replace(
  FIXED, name="segments", K=128, V=128, dtype="bfloat16", num_segments=2
)


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def offsets(case):
  return None if case.cu_seqlens is None else jax.ShapeDtypeStruct((case.N + 1,), jnp.int32)


# No implementation means the kernels, where the code is for CUDA: a few will do.
@pytest.mark.parametrize(
  ("case", "implementation"),
  [
    pytest.param(case, implementation, id=f"{case.name}-{implementation}")
    for case in (*CASES, SEGMENTS)
    for implementation in ("pallas", None)
    if implementation or (case.dtype == "bfloat16" and case.K == 128)
  ],
)
def test_operator(case, implementation):
  def f(inputs, cu_seqlens):
    kwargs = options(case) | dict(cu_seqlens=cu_seqlens, implementation=implementation)
    kwargs["num_segments"] = case.num_segments
    return chunk_gated_delta_product(**inputs, **kwargs)

  text = lower_for_cuda(f, abstract(make_inputs(case)), offsets(case))
  # With gates, their sums within token chunks and within row chunks are two more; with segments,
  # the sweep for their effects is another.
  assert count_kernels(text) == (4 if case.gate is None else 6) + (case.num_segments > 1)


def stages(case, C):
  """{stage: (keyword arguments, arrays)} for a case, all abstract."""
  x = abstract(make_inputs(case))
  B, T, R, HV, K, V, N = case.B, case.T, case.T * case.M, case.HV, case.K, case.V, case.N
  NC = metadata.num_chunks(T, N, C) if case.cu_seqlens else -(-T // C)
  stream = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct((B, R, *shape), dtype)
  q, k, v, beta, g_tokens = x["q"], x["k"], x["v"], x["beta"], x["g"]
  g = None if g_tokens is None else beta  # of the row stream
  A, w, M = stream(HV, C), stream(HV, K, dtype=k.dtype), dict(num_householder=case.M)
  state = dict(initial_state=x["initial_state"])
  h = jax.ShapeDtypeStruct((B, NC, HV, K, V), k.dtype)
  size, final = dict(chunk_size=C), dict(output_final_state=True)
  return {
    "chunk_local_cumsum": (size, dict(g=beta)),
    "chunk_scaled_dot_kkt_fwd": (size, dict(k=k, g=g, beta=beta)),
    "solve_tril": ({}, dict(A=A)),
    "recompute_w_u_fwd": ({}, dict(k=k, v=v, beta=beta, A=A, g=g)),
    "chunk_gated_delta_product_fwd_h": (size | M | final, dict(k=k, w=w, u=v, g=g) | state),
    "chunk_gated_delta_product_fwd_wy_h": (
      M | final,
      dict(k=k, v=v, beta=beta, A=A, g=g) | state,
    ),
    "chunk_gated_delta_product_effects": (M, dict(k=k, v=v, beta=beta, A=A, g=g)),
    "chunk_gated_delta_product_states": (size | M, dict(k=k, v_new=v, h=h, g=g)),
    "chunk_gated_delta_product_fwd_o": (size | M, dict(q=q, k=k, v=v, h=h, g=g_tokens)),
  }


@pytest.mark.parametrize(
  "case",
  [case for case in CASES if (case.cu_seqlens is None) == (case.gate is None)],
  ids=lambda case: case.name,
)
def test_each_stage_alone(case):
  for name, (static, arrays) in stages(case, C=64).items():
    f = functools.partial(getattr(kernels, name), **static)
    assert count_kernels(lower_for_cuda(f, **arrays, cu_seqlens=offsets(case))) == 1, name
