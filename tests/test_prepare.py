"""From a projection's output to the operators' arguments, against NumPy in float64.

B batch, T tokens, M Householder copies, H query/key heads, HV value heads, K and V head dims.
"""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, KERNELS, PALLAS, assert_close, assert_same_bits, quick_jit
from lowering import count_kernels, lower_for_cuda

from gdp_jax import chunk_gated_delta_product, fused_recurrent_gated_delta_product, prepare

NAMES = ("q", "k", "v", "g", "beta")


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The defaults differ in every dim, so that a swapped axis shows."""

  B: int = 2
  T: int = 5
  M: int = 3
  H: int = 2
  HV: int = 4
  K: int = 6
  V: int = 7
  gated: bool = True

  @property
  def D(self):
    M, HV = self.M, self.HV
    return (M + 1) * self.H * self.K + M * HV * self.V + M * HV + self.gated * HV

  @property
  def kwargs(self):
    return dict(
      num_heads=self.H, head_k_dim=self.K, head_v_dim=self.V, num_v_heads=self.HV,
      num_householder=self.M,
    )  # fmt: skip


SIZES = [Sizes(M=1), Sizes(M=2), Sizes(), Sizes(HV=2), Sizes(HV=6, gated=False), Sizes(B=1, T=1)]
SIZES = {f"M{s.M}-H{s.H}-HV{s.HV}-T{s.T}{'' if s.gated else '-no-gate'}": s for s in SIZES}


def numbered(s, dtype=np.float32):
  """x [B, T, D] of which no two elements are equal, from -4 to 4."""
  n = s.B * s.T * s.D
  return np.linspace(-4, 4, n).reshape(s.B, s.T, s.D).astype(dtype)


def parameters(s):
  if not s.gated:
    return {}
  A_log, dt_bias = np.linspace(-1, 2, s.HV), np.linspace(1, -2, s.HV)
  return dict(A_log=A_log.astype(np.float32), dt_bias=dt_bias.astype(np.float32))


def numpy_prepare(x, s, A_log=None, dt_bias=None):
  """What each element is, one by one."""
  x = np.asarray(x, np.float64)
  R = s.T * s.M
  q, k = np.empty((s.B, s.T, s.H, s.K)), np.empty((s.B, R, s.H, s.K))
  v, beta = np.empty((s.B, R, s.HV, s.V)), np.empty((s.B, R, s.HV))
  g = np.empty((s.B, s.T, s.HV))
  for b, t in itertools.product(range(s.B), range(s.T)):
    channels = iter(x[b, t])
    for h, i in np.ndindex(s.H, s.K):
      q[b, t, h, i] = next(channels)
    for j, h, i in np.ndindex(s.M, s.H, s.K):
      k[b, t * s.M + j, h, i] = next(channels)
    for j, h, i in np.ndindex(s.M, s.HV, s.V):
      v[b, t * s.M + j, h, i] = next(channels)
    for j, h in np.ndindex(s.M, s.HV):
      beta[b, t * s.M + j, h] = 1 / (1 + np.exp(-next(channels)))
    if s.gated:
      for h in range(s.HV):
        z = next(channels) + (0 if dt_bias is None else dt_bias[h])
        g[b, t, h] = -np.exp(np.float64(A_log[h])) * np.logaddexp(0, z)
    assert next(channels, None) is None
  return dict(q=q, k=k, v=v, g=g if s.gated else None, beta=beta)


def named(arrays):
  return dict(zip(NAMES, arrays, strict=True))


@pytest.mark.parametrize(
  ("sizes", "dtype"),
  [
    *(pytest.param(s, "float32", id=name) for name, s in SIZES.items()),
    pytest.param(Sizes(), "bfloat16", id="bfloat16"),
  ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_output(implementation, sizes, dtype):
  x = numbered(sizes, jnp.dtype(dtype))
  options = sizes.kwargs | dict(implementation=implementation)
  actual = named(prepare(x, **parameters(sizes), **options))
  expected = numpy_prepare(x, sizes, **parameters(sizes))
  for name, y in expected.items():
    if y is None:
      assert actual[name] is None
      continue
    moved = name in ("q", "k", "v")
    chex.assert_type(actual[name], jnp.dtype(dtype) if moved else jnp.float32)
    # q, k and v are only moved; the gates are computed in fp32 from x as it is.
    assert_close({name: actual[name]}, {name: y}, 0 if moved else 1e-6, name)


@pytest.mark.parametrize("implementation", KERNELS)
def test_several_blocks_of_channels(implementation):
  s = Sizes(B=1, T=3, M=2, H=5, HV=15, K=60, V=70)
  x, p = numbered(s), parameters(s)
  actual = prepare(x, **p, **s.kwargs, implementation=implementation)
  expected = prepare(x, **p, **s.kwargs, implementation="xla")
  for name, y in named(expected).items():
    moved = name in ("q", "k", "v")
    assert_close({name: named(actual)[name]}, {name: y}, 0 if moved else 1e-6, name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_options(implementation):
  s = Sizes()
  x, p = numbered(s), parameters(s)
  f = functools.partial(prepare, **s.kwargs, implementation=implementation)
  plain = named(f(x, **p))
  doubled = named(f(x, **p, allow_neg_eigval=True))
  assert float(jnp.max(doubled["beta"])) > 1
  assert_same_bits(doubled, plain | dict(beta=2 * plain["beta"]), "allow_neg_eigval")

  no_bias = f(x, p["A_log"])[3]
  assert_close(dict(g=no_bias), dict(g=numpy_prepare(x, s, p["A_log"])["g"]), 1e-6, "no dt_bias")

  narrow = {name: a.astype(jnp.bfloat16) for name, a in p.items()}
  g = f(x, **narrow)[3]
  chex.assert_type(g, jnp.float32)
  assert_close(dict(g=g), dict(g=numpy_prepare(x, s, **narrow)["g"]), 1e-6, "parameters of bf16")


def test_default_number_of_value_heads():
  s = Sizes(HV=2)
  del (kwargs := s.kwargs)["num_v_heads"]
  x, p = numbered(s), parameters(s)
  expected = named(prepare(x, **p, **s.kwargs))
  assert_same_bits(named(prepare(x, **p, **kwargs)), expected, "num_v_heads=None")


@pytest.mark.parametrize("implementation", ["xla", None, "interpret"])
def test_no_tokens(implementation):
  for s in (Sizes(T=0), Sizes(B=0)):
    outputs = prepare(numbered(s), **parameters(s), **s.kwargs, implementation=implementation)
    for y, expected in zip(outputs, numpy_prepare(numbered(s), s).values(), strict=True):
      chex.assert_shape(y, expected.shape)


@pytest.mark.parametrize("implementation", KERNELS)
def test_vmap(implementation):
  s = Sizes()
  x, p = numbered(dataclasses.replace(s, B=6)).reshape(3, s.B, s.T, s.D), parameters(s)
  f = lambda x: prepare(x, **p, **s.kwargs, implementation=implementation)
  actual = named(jax.vmap(f)(x))
  for i in range(3):
    for name, y in named(f(x[i])).items():
      assert_close({name: actual[name][i]}, {name: y}, 1e-6, "vmap")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("implementation", ["pallas", None])
def test_lowering(implementation, gated):
  s = Sizes(gated=gated)
  f = functools.partial(prepare, **s.kwargs, implementation=implementation)
  for dtype in (jnp.float32, jnp.bfloat16):
    assert count_kernels(lower_for_cuda(f, numbered(s, dtype), **parameters(s))) == 1


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_under_jit_with_strict_dtype_promotion(implementation):
  s = Sizes()
  x, p = numbered(s, jnp.bfloat16), parameters(s)
  f = functools.partial(prepare, **s.kwargs, allow_neg_eigval=True, implementation=implementation)
  with jax.numpy_dtype_promotion("strict"):
    actual = jax.jit(f)(x, **p)
  for name, y in named(f(x, **p)).items():
    assert_close({name: named(actual)[name]}, {name: y}, 1e-6, "under jit")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients(implementation):
  """Of every output together, against NumPy's in closed form."""
  s = Sizes(M=2)
  x, p = numbered(s), parameters(s)
  f = functools.partial(prepare, **s.kwargs, allow_neg_eigval=True, implementation=implementation)
  outputs, pullback = jax.vjp(lambda x, A_log, dt_bias: f(x, A_log, dt_bias), x, *p.values())
  rng = np.random.default_rng(0)
  cotangents = [rng.standard_normal(y.shape).astype(np.float32) for y in outputs]
  dx, dA_log, ddt_bias = pullback(tuple(cotangents))
  dq, dk, dv, dg, dbeta = (y.astype(np.float64).reshape(s.B, s.T, -1) for y in cotangents)

  b = x[..., -s.HV - s.M * s.HV : -s.HV].astype(np.float64)
  z = x[..., -s.HV :] + p["dt_bias"].astype(np.float64)
  rate = np.exp(p["A_log"].astype(np.float64))
  db = 2 * dbeta / (1 + np.exp(b)) / (1 + np.exp(-b))
  da = -dg * rate / (1 + np.exp(-z))
  expected = dict(
    x=np.concatenate([dq, dk, dv, db, da], axis=-1),
    A_log=np.sum(-dg * rate * np.logaddexp(0, z), (0, 1)),
    dt_bias=np.sum(da, (0, 1)),
  )
  assert_close(dict(x=dx, A_log=dA_log, dt_bias=ddt_bias), expected, 1e-6, "gradients")


# Gate logits of +-100 and beta logits of +-80, with A_log at -10 and +100

EXTREME = Sizes(B=1, T=5, M=2, H=1, HV=2, K=4, V=4)
A_LOG = np.array([-10.0, 100.0], np.float32)


def extreme_inputs():
  s = EXTREME
  x = np.random.default_rng(0).standard_normal((s.B, s.T, s.D)).astype(np.float32)
  gates, betas = x[..., -s.HV :], x[..., -s.HV - s.M * s.HV : -s.HV]
  gates[:] = np.array([100, -100, 1, -14.5, -15.5])[:, None]
  betas[:] = np.array([80, -80, -80, 80])
  return x


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extreme_logits(implementation):
  s, x = EXTREME, extreme_inputs()
  options = s.kwargs | dict(allow_neg_eigval=True, implementation=implementation)
  actual = named(prepare(x, A_LOG, **options))
  chex.assert_tree_all_finite(actual)
  beta = np.broadcast_to([[2.0, 0.0], [0.0, 2.0]], (s.T, s.M, s.HV)).reshape(1, -1, s.HV)
  np.testing.assert_allclose(actual["beta"], beta, atol=1e-30)
  # Beyond e^80 a decay is held; what is wiped out by less stays so. e^-110 is 0 in fp32.
  expected = numpy_prepare(x, s, A_LOG)["g"]
  assert np.min(expected) < -1e44
  held = np.maximum(expected, -np.exp(80.0))
  np.testing.assert_allclose(actual["g"], held, rtol=1e-5, atol=1e-37)
  # exp(100) softplus(-100) = 1: neither factor's range is the product's.
  np.testing.assert_allclose(actual["g"][0, 1, 1], -1, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", PALLAS])
def test_gradients_of_extreme_logits(implementation):
  """Those of g are right where it is not held, and 0 where it is."""
  s, x = EXTREME, extreme_inputs()
  bias = np.zeros(s.HV, np.float32)

  def g_of(x, A_log, dt_bias):
    return prepare(x, A_log, dt_bias, **s.kwargs, implementation=implementation)[3]

  g, pullback = jax.vjp(g_of, x, A_LOG, bias)
  dx, dA_log, dbias = pullback(jnp.ones_like(g))
  z = x[..., -s.HV :].astype(np.float64)
  exact = numpy_prepare(x, s, A_LOG)["g"]
  slope = -np.exp(A_LOG.astype(np.float64) - np.logaddexp(0, -z))
  held = exact < -np.exp(80.0)
  expected = np.where(held, 0, slope)
  np.testing.assert_allclose(dx[..., -s.HV :], expected, rtol=1e-5, atol=1e-37)
  np.testing.assert_allclose(dbias, expected.sum((0, 1)), rtol=1e-5)
  np.testing.assert_allclose(dA_log, np.where(held, 0, exact).sum((0, 1)), rtol=1e-5)
  assert not np.any(dx[..., : -s.HV])


@pytest.mark.parametrize("logit", [0.0, -15.0])
def test_gradient_where_the_formula_changes(logit):
  """At a + dt_bias = 0, where a projection that starts as zeros is, and where softplus ends."""
  s = Sizes(T=1, B=1)
  f = lambda dt_bias: prepare(
    np.zeros((1, 1, s.D), np.float32), np.zeros(s.HV), dt_bias, **s.kwargs
  )
  _, pullback = jax.vjp(lambda dt_bias: f(dt_bias)[3], jnp.full(s.HV, logit))
  (ddt_bias,) = pullback(jnp.ones((1, 1, s.HV)))
  np.testing.assert_allclose(ddt_bias, -1 / (1 + np.exp(-logit)), rtol=1e-5)


@pytest.mark.parametrize("implementation", [None, PALLAS])
def test_extreme_logits_through_the_operators(implementation):
  """No NaN, forward or backward."""
  s, x = EXTREME, extreme_inputs()
  options = s.kwargs | dict(allow_neg_eigval=True, implementation=implementation)

  def outputs(x, A_log, dt_bias, operator=chunk_gated_delta_product):
    return operator(
      *prepare(x, A_log, dt_bias, **options), s.M, output_final_state=True,
      use_qk_l2norm_in_kernel=True, implementation=implementation,
    )  # fmt: skip

  def loss(*args):
    o, final_state = outputs(*args)
    return jnp.sum(o**2) + jnp.sum(final_state**2)

  args = (x, A_LOG, np.zeros(s.HV, np.float32))
  chunk = quick_jit(outputs)(*args)
  step = quick_jit(functools.partial(outputs, operator=fused_recurrent_gated_delta_product))(*args)
  chex.assert_tree_all_finite((chunk, step))
  names = ("o", "final_state")
  assert_close(
    dict(zip(names, step, strict=True)), dict(zip(names, chunk, strict=True)), 1e-5, "decode"
  )
  value, gradients = quick_jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)
  chex.assert_tree_all_finite((value, gradients))
  assert np.any(gradients[0])


# One function for prefill and decode


@pytest.mark.parametrize(
  ("implementation", "gated"),
  [
    ("xla", True),
    pytest.param("pallas", True, marks=pytest.mark.gpu),
    pytest.param("pallas", False, marks=pytest.mark.gpu),
  ],
)
def test_prefill_and_decode(implementation, gated):
  """Prepared and run at once, or prefill of five tokens and then one by one."""
  s = Sizes(B=3, T=8, gated=gated)
  x, p = numbered(s), parameters(s)
  options = dict(use_qk_l2norm_in_kernel=True, implementation=implementation)
  gates = s.kwargs | dict(allow_neg_eigval=True, implementation=implementation)
  f = quick_jit(functools.partial(prepare, **p, **gates))
  prefill = lambda *args, **kwargs: chunk_gated_delta_product(*args, s.M, **options, **kwargs)
  decode = lambda *args, **kwargs: fused_recurrent_gated_delta_product(
    *args, s.M, **options, **kwargs
  )
  o, state = quick_jit(functools.partial(prefill, output_final_state=True))(*f(x))
  expected = dict(o=o, state=state)

  pool, slots = jnp.zeros((4, s.HV, s.K, s.V)), jnp.array([3, 0, 2])
  prefilled, pool = quick_jit(prefill)(*f(x[:, :5]), state=pool, state_indices=slots)
  o, step = [prefilled], quick_jit(decode)
  for t in range(5, 8):
    token = f(x[:, t : t + 1])
    for y, whole in zip(token, f(x), strict=True):
      if y is not None:
        rows = y.shape[1]
        chex.assert_trees_all_close(y, whole[:, t * rows : (t + 1) * rows], rtol=1e-6)
    o_token, pool = step(*token, state=pool, state_indices=slots)
    o.append(o_token)
  actual = dict(o=np.concatenate(o, axis=1), state=pool[slots])
  assert_close(actual, expected, 1e-5, "prefill and decode")


# Errors

ERRORS = Sizes(M=2, HV=4)
BAD = {
  "channels": (
    dict(x=np.zeros((2, 5, 3), np.float32)),
    ["x must have shape [B, T, D]", f"{ERRORS.D}", "(2, 5, 3)"],
  ),
  "x-2d": (dict(x=np.zeros((5, ERRORS.D), np.float32)), ["x must have shape", f"(5, {ERRORS.D})"]),
  "no-gate": (dict(A_log=None, dt_bias=None), ["x must have shape", f"(2, 5, {ERRORS.D})"]),
  "M": (dict(num_householder=3), ["x must have shape", f"(2, 5, {ERRORS.D})"]),
  "A_log": (dict(A_log=np.zeros(2, np.float32)), ["A_log must have shape [HV] = (4,)", "(2,)"]),
  "dt_bias": (
    dict(dt_bias=np.zeros((1, 4), np.float32)),
    ["dt_bias must have shape [HV] = (4,)", "(1, 4)"],
  ),
  "bias-alone": (
    dict(A_log=None, x=np.zeros((2, 5, ERRORS.D - 4), np.float32)),
    ["dt_bias needs A_log"],
  ),
  "heads": (dict(num_v_heads=3), ["num_v_heads must be a multiple of num_heads", "3", "2"]),
  "no-heads": (dict(num_heads=0), ["num_heads", "0"]),
  "implementation": (dict(implementation="cuda"), ["implementation", "'cuda'"]),
}


@pytest.mark.parametrize(("changed", "parts"), BAD.values(), ids=BAD.keys())
def test_bad_argument(changed, parts):
  kwargs = dict(x=numbered(ERRORS)) | parameters(ERRORS) | ERRORS.kwargs | changed
  with pytest.raises(ValueError) as raised:
    prepare(**kwargs)
  for part in parts:
    assert part in str(raised.value), str(raised.value)
