"""The oracle itself: against plain loops in float64, and against what it must satisfy."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BOUNDS, PALLAS, Case, assert_close, make_inputs, options, run

from gdp_jax import recurrent_gated_delta_product


def loops(
  q, k, v, g, beta, initial_state, num_householder=1, *, scale=None, cu_seqlens=None,
  use_qk_l2norm_in_kernel=False, output_final_state=True,
):  # fmt: skip
  """The definition, one head and one token at a time, in float64."""
  q, k, v, g, beta, initial_state = (
    None if x is None else np.asarray(x, np.float64) for x in (q, k, v, g, beta, initial_state)
  )
  (B, T, H, K), (HV, V), M = q.shape, v.shape[2:], num_householder
  if use_qk_l2norm_in_kernel:
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
  scale = K**-0.5 if scale is None else scale
  if cu_seqlens is None:
    sequences = [(b, 0, T) for b in range(B)]
  else:
    offsets = np.asarray(cu_seqlens)
    sequences = [(0, start, stop) for start, stop in itertools.pairwise(offsets)]
  o, final_state = np.zeros((B, T, HV, V)), np.zeros((len(sequences), HV, K, V))
  for n, (b, start, stop) in enumerate(sequences):
    for i in range(HV):
      h = i // (HV // H)
      S = np.zeros((K, V)) if initial_state is None else initial_state[n, i].copy()
      for t in range(start, stop):
        if g is not None:
          S *= np.exp(g[b, t, i])
        for r in range(t * M, (t + 1) * M):
          S += beta[b, r, i] * np.outer(k[b, r, h], v[b, r, i] - S.T @ k[b, r, h])
        o[b, t, i] = scale * S.T @ q[b, t, h]
      final_state[n, i] = S
  return dict(o=o, final_state=final_state)


LOOPS = [
  Case("M1", T=9, M=1),
  Case("M2-no-gate", T=9, M=2, gate=None),
  Case("M3-no-state", T=9, M=3, initial_state=False),
  Case("resets", T=30, B=1, gate="reset"),
  Case("equal-heads", T=9, H=4),
  Case("l2norm", T=9, l2norm=True, keys="correlated"),
  Case("packed", T=12, M=3, cu_seqlens=(0, 0, 5, 5, 6, 12, 12)),
  Case("packed-tail", T=12, M=2, cu_seqlens=(0, 3, 9), gate=None, initial_state=False),
  Case("all-empty", T=4, cu_seqlens=(0, 0, 0)),
]


@pytest.mark.parametrize("case", LOOPS, ids=lambda case: case.name)
def test_equals_plain_loops(case):
  inputs = make_inputs(case)
  expected = loops(**inputs, **options(case))
  assert_close(run(case, "recurrence"), expected, BOUNDS["float32"], case.name)


def test_scale_and_defaults():
  case = Case("scale", T=5, M=1)
  inputs = make_inputs(case)
  o, final_state = recurrent_gated_delta_product(**inputs, scale=0.3)
  assert final_state is None
  assert_close(dict(o=o), dict(o=loops(**inputs, scale=0.3)["o"]), BOUNDS["float32"], case.name)


def test_half_precision_is_widened_first():
  case = Case("bf16", T=9, dtype="bfloat16")
  actual = run(case, "recurrence")
  chex.assert_type([actual["o"], actual["final_state"]], [jnp.bfloat16, jnp.float32])
  expected = loops(**make_inputs(case), **options(case))
  # The state is fp32 throughout; o is rounded once, at the end.
  assert_close(dict(S=actual["final_state"]), dict(S=expected["final_state"]), 1e-5, case.name)
  assert_close(dict(o=actual["o"]), dict(o=expected["o"]), 2**-9, case.name)


def test_float64():
  case = Case("float64", T=9, M=3)
  with jax.enable_x64(True):
    inputs = {name: x.astype(np.float64) for name, x in make_inputs(case).items()}
    actual = run(case, "recurrence", inputs)
    chex.assert_type(actual["o"], jnp.float64)
    assert_close(actual, loops(**inputs, **options(case)), 1e-14, case.name)


def test_padding_may_hold_anything():
  case = Case("nan-tail", T=12, M=2, cu_seqlens=(0, 3, 9))
  inputs = make_inputs(case)
  expected = run(case, "recurrence", inputs)
  for name in ("q", "k", "v", "g", "beta"):
    used = 9 if name in ("q", "g") else 18
    inputs[name][:, used:] = np.nan
  chex.assert_trees_all_equal(run(case, "recurrence", inputs), expected)
  assert not np.any(expected["o"][:, 9:])


# Identities: exact up to rounding, for whatever computes the operator. Two chunks long.

EVERYTHING = pytest.mark.parametrize("implementation", ["recurrence", "xla", PALLAS])
BASE = Case("identity", B=1, T=70)


@EVERYTHING
def test_copies_with_beta_0_do_nothing(implementation):
  case = dataclasses.replace(BASE, M=3)
  inputs = make_inputs(case)
  inputs["beta"][:, 1::3] = inputs["beta"][:, 2::3] = 0
  one = inputs | {name: inputs[name][:, ::3] for name in ("k", "v", "beta")}
  expected = run(dataclasses.replace(case, M=1), implementation, one)
  assert_close(run(case, implementation, inputs), expected, BOUNDS["float32"], "M=3 and M=1")


@EVERYTHING
def test_equals_the_delta_rule_on_micro_steps(implementation):
  M = BASE.M
  inputs = make_inputs(BASE)
  micro = inputs | dict(q=np.repeat(inputs["q"], M, axis=1), g=np.zeros_like(inputs["beta"]))
  micro["g"][:, ::M] = inputs["g"]
  expected = run(dataclasses.replace(BASE, M=1, T=BASE.T * M), implementation, micro)
  expected["o"] = expected["o"][:, M - 1 :: M]
  assert_close(run(BASE, implementation, inputs), expected, BOUNDS["float32"], "micro-steps")


@EVERYTHING
def test_two_reflections_cancel(implementation):
  case = dataclasses.replace(BASE, gate=0.0, beta=2.0)
  inputs = make_inputs(case)
  inputs["k"][:, 1::2] = inputs["k"][:, ::2]
  inputs["v"][:] = 0
  S = run(case, implementation, inputs)["final_state"]
  assert_close(dict(S=S), dict(S=inputs["initial_state"]), BOUNDS["float32"], "two reflections")


@EVERYTHING
def test_identical_keys_with_beta_1_hold_the_last_value(implementation):
  case = dataclasses.replace(BASE, gate=0.0, beta=1.0, keys="identical", initial_state=False)
  inputs = make_inputs(case)
  read = np.einsum("bthk,bthk->bth", inputs["q"], inputs["k"][:, ::2]) * case.K**-0.5
  last = inputs["v"][:, 1::2]
  expected = np.repeat(read, case.HV // case.H, axis=2)[..., None] * last
  o = run(case, implementation, inputs)["o"]
  assert_close(dict(o=o), dict(o=expected), BOUNDS["float32"], "identical keys")


@EVERYTHING
def test_zero_keys_leave_the_decay(implementation):
  case = dataclasses.replace(BASE, keys="zero")
  inputs = make_inputs(case)
  decay = np.exp(np.sum(np.asarray(inputs["g"], np.float64), axis=1))[..., None, None]
  S = run(case, implementation, inputs)["final_state"]
  assert_close(dict(S=S), dict(S=decay * inputs["initial_state"]), BOUNDS["float32"], "zero keys")
