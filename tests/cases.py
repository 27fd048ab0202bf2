"""Named inputs shared by the tests of every implementation, how they are run, and the bounds.

B batch, T tokens, M Householder copies, H query/key heads, HV value heads, K and V head dims,
N sequences.

Another operator's tests, or those of gradients, take `Case`, `make_inputs`, `options`, `BOUNDS` and
`assert_close`; `run` and `oracle` are the forward operator and its reference on a case.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdp_jax import chunk_gated_delta_product, recurrent_gated_delta_product

PALLAS = pytest.param("pallas", marks=pytest.mark.gpu)
KERNELS = ("interpret", PALLAS)
IMPLEMENTATIONS = ("xla", *KERNELS)

# Compiling is what takes time in tests, and LLVM's optimisation most of that on a CPU.
QUICK = {"xla_backend_optimization_level": 0}
quick_jit = functools.partial(
  jax.jit, compiler_options=QUICK if jax.default_backend() == "cpu" else None
)

# Relative L2 errors against the fp32 recurrence.
# float32: the contract. Rounding, 6e-8, grows with the rows of a chunk and with the inverse's
#   condition: 3e-7 is measured on random keys, 5e-6 on strongly correlated ones.
# bfloat16: a rounding is at most 2^-8, 1.6e-3 in the mean square. The residual, v_new, S and o are
#   each rounded once (the attention keeps 16 bits; of Ti only what is off its unit diagonal is
#   rounded, and small): sqrt(4) * 1.6e-3 = 3.2e-3. The state's part of o and the chunk's own partly
#   cancel, for which twice that is allowed.
# float16: computed in fp32, o is rounded once; the same bound.
BOUNDS = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 6e-3}


@dataclasses.dataclass(frozen=True)
class Case:
  """One input of the operator. The defaults differ in every dim, so that a swapped axis shows.

  Attributes:
    name: the test's id, and what a failure is reported under.
    B, T, M, H, HV, K, V: sizes; cu_seqlens makes B 1.
    cu_seqlens: offsets of packed sequences, or None.
    gate: None (no gates), a number (all of them), or a name that `_gates` knows.
    keys: "random", "identical", "correlated" or "zero"; unit vectors but for the last.
    beta: "random" in [0, 2], or a number.
    dtype: of q, k and v. The others are fp32.
    initial_state: whether there is one.
    l2norm: whether the operator normalises q and k.
    num_segments: into how many the operator cuts each sequence.
    seed: of the random numbers.
  """

  name: str
  B: int = 2
  T: int = 100
  M: int = 2
  H: int = 2
  HV: int = 4
  K: int = 24
  V: int = 40
  cu_seqlens: tuple[int, ...] | None = None
  gate: str | float | None = "weak"
  keys: str = "random"
  beta: str | float = "random"
  dtype: str = "float32"
  initial_state: bool = True
  l2norm: bool = False
  num_segments: int = 1
  seed: int = 0

  def __post_init__(self):
    if self.cu_seqlens is not None:
      object.__setattr__(self, "B", 1)

  @property
  def N(self):
    return self.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1

  @property
  def valid_tokens(self):
    """Tokens before the last offset; those after it are padding."""
    return self.T if self.cu_seqlens is None else self.cu_seqlens[-1]


def make_inputs(case: Case) -> dict[str, np.ndarray | None]:
  """q, k, v, g, beta and initial_state of a case, from its seed.

  NumPy arrays, fresh ones at each call: a test may write into them.
  """
  rng = np.random.default_rng(case.seed)
  B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
  R = T * case.M
  q = rng.standard_normal((B, T, H, K))
  k = _keys(case.keys, rng, (B, R, H, K))
  v = rng.standard_normal((B, R, HV, V))
  beta = rng.uniform(0, 2, (B, R, HV)) if case.beta == "random" else np.full((B, R, HV), case.beta)
  initial_state = rng.standard_normal((case.N, HV, K, V)) if case.initial_state else None
  g = None if case.gate is None else _gates(case.gate, rng, (B, T, HV))
  array = lambda x, dtype="float32": None if x is None else x.astype(jnp.dtype(dtype))
  return dict(
    q=array(q, case.dtype),
    k=array(k, case.dtype),
    v=array(v, case.dtype),
    g=array(g),
    beta=array(beta),
    initial_state=array(initial_state),
  )


def _keys(kind, rng, shape):
  K = shape[-1]
  noise = rng.standard_normal(shape)
  if kind == "zero":
    return np.zeros(shape)
  if kind == "identical":
    # +-K^-0.5: exactly of unit length in every dtype if K is a power of four. Otherwise bf16's
    # rounding of the length alone makes beta = 2 grow without bound.
    return np.broadcast_to(np.sign(noise[:1, :1]) * K**-0.5, shape)
  if kind == "correlated":
    noise = noise[:1, :1] + 0.05 * noise
  return noise / np.linalg.norm(noise, axis=-1, keepdims=True)


def _gates(kind, rng, shape):
  weak = -0.1 * np.abs(rng.standard_normal(shape))
  token = np.arange(shape[1])[None, :, None]
  if not isinstance(kind, str):
    return np.full(shape, kind)
  if kind == "weak":
    return weak
  if kind == "strong":
    return rng.uniform(-20, 0, shape)
  if kind == "stronger":
    return rng.uniform(-30, 0, shape)
  if kind == "half_zero":
    return weak * rng.integers(0, 2, shape)
  if kind == "spike":  # at the first token of a chunk, zeros after it and in every other chunk
    return np.where(token == 0, -60.0, 0.0) * np.ones(shape)
  if kind == "reset":  # -inf among weak ones, also next to each other and at a chunk's ends
    return np.where(np.isin(token, (0, 20, 21, 63, 64, 90)), -np.inf, weak)
  raise ValueError(f"no gates are called {kind!r}")


def options(case: Case) -> dict:
  """The operator's other arguments."""
  return dict(
    num_householder=case.M,
    cu_seqlens=case.cu_seqlens,
    use_qk_l2norm_in_kernel=case.l2norm,
    output_final_state=True,
  )


def run(case: Case, implementation: str, inputs: dict | None = None) -> dict[str, np.ndarray]:
  """The operator on a case (or on other inputs of its shape): o and final_state.

  `implementation` is one of the operator's, or "recurrence".
  """
  inputs = make_inputs(case) if inputs is None else inputs
  if implementation == "recurrence":
    o, final_state = recurrent_gated_delta_product(**inputs, **options(case))
  else:
    o, final_state = chunk_gated_delta_product(
      **inputs, **options(case), num_segments=case.num_segments, implementation=implementation
    )
  return dict(o=np.asarray(o), final_state=np.asarray(final_state))


@functools.cache
def oracle(case: Case) -> dict[str, np.ndarray]:
  """The recurrence on a case, with an o that is not rounded to the case's dtype."""
  inputs = make_inputs(case)
  inputs |= {name: inputs[name].astype(np.float32) for name in "qkv"}
  return run(case, "recurrence", inputs)


def relative_error(actual, expected) -> float:
  """|actual - expected| / |expected| in the L2 norm; absolute where nothing is expected."""
  actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
  norm = np.linalg.norm(expected)
  return float(np.linalg.norm(actual - expected) / (norm if norm else 1))


def assert_close(actual: dict, expected: dict, bound: float, what: str):
  """Each named tensor has the expected shape and a relative L2 error of at most `bound`."""
  assert actual.keys() == expected.keys()
  for name in expected:
    message = f"{name} of {what}"
    chex.assert_equal_shape([actual[name], expected[name]], custom_message=message)
    error = relative_error(actual[name], expected[name])
    chex.assert_scalar_in(error, 0, bound, custom_message=message)


def assert_same_bits(actual: dict, expected: dict, what: str):
  """Each named tensor has the expected bits (-0 is not 0)."""
  assert actual.keys() == expected.keys()
  for name in expected:
    x, y = (np.ascontiguousarray(tree[name]) for tree in (actual, expected))
    assert x.dtype == y.dtype and x.shape == y.shape, f"{name} of {what}"
    x, y = (a.view(f"u{a.dtype.itemsize}") for a in (x, y))
    assert np.array_equal(x, y), f"{name} of {what}: {np.sum(x != y)} of {x.size} elements differ"


def assert_raises(error, parts, f, **kwargs):
  """f(**kwargs) raises `error`, whose message has every one of the parts."""
  with pytest.raises(error) as raised:
    f(**kwargs)
  for part in parts:
    assert part in str(raised.value), str(raised.value)


def check(case: Case, implementation: str, bound: float | None = None) -> dict[str, np.ndarray]:
  """The operator's results on a case, after a look at their dtypes, shapes and values."""
  actual = run(case, implementation)
  chex.assert_type([actual["o"], actual["final_state"]], [jnp.dtype(case.dtype), jnp.float32])
  assert_close(actual, oracle(case), BOUNDS[case.dtype] if bound is None else bound, case.name)
  return actual


def each(cases, *, xla=None, default=(), interpret=()):
  """Parametrises (case, implementation): every case compiled on a GPU and, on any machine, in XLA.

  Args:
    cases: a list of Case.
    xla: the names of those to run in XLA, if that should not be all.
    default: the names of those to run with no implementation named.
    interpret: the names of those whose kernels are also run in interpret mode, seconds each.
  """
  names = {case.name for case in cases}
  xla = names if xla is None else set(xla)
  chosen = {"xla": xla, None: set(default), "interpret": set(interpret), "pallas": names}
  assert len(names) == len(cases) and all(some <= names for some in chosen.values())
  params = []
  for case in cases:
    for implementation in chosen:
      if case.name in chosen[implementation]:
        marks = [pytest.mark.gpu] if implementation == "pallas" else []
        params.append(
          pytest.param(case, implementation, marks=marks, id=f"{case.name}-{implementation}")
        )
  return pytest.mark.parametrize(("case", "implementation"), params)
