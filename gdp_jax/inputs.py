"""What the operators accept: every default and every error, in one place."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

IMPLEMENTATIONS = ("pallas", "xla", "interpret")


def default_scale(scale: float | None, K: int) -> float:
  return K**-0.5 if scale is None else float(scale)


def check_arguments(
  q: Any,
  k: Any,
  v: Any,
  g: Any,
  beta: Any,
  num_householder: Any,
  scale: Any,
  initial_state: Any,
  cu_seqlens: Any,
  *,
  allow_float64: bool = False,
) -> jax.Array | None:
  """Checks shapes, dtypes and combinations; reads the values of `cu_seqlens` only on the host.

  Returns:
    cu_seqlens as an array on the device, or None.

  Raises:
    TypeError: an argument is of a kind or dtype that is not taken.
    ValueError: a shape, a combination or a value cannot be right.
  """
  M = num_householder
  _check_count("num_householder", M)
  if scale is not None:
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.integer, np.floating)):
      raise TypeError(f"scale must be a Python float or None, got {_kind(scale)}")
    if not np.isfinite(scale):
      raise ValueError(f"scale must be finite, got {scale}")

  wide = (jnp.float64,) if allow_float64 else ()
  dtypes = [jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, *wide)]
  arrays = dict(q=q, k=k, v=v, beta=beta, g=g, initial_state=initial_state)
  for name, x in arrays.items():
    if x is None and name in ("g", "initial_state"):
      continue
    if not isinstance(x, (jax.Array, np.ndarray)):
      raise TypeError(f"{name} must be a JAX or NumPy array, got {_kind(x)}")
    if name in ("q", "k", "v") and x.dtype not in dtypes:
      names = ", ".join(d.name for d in dtypes)
      raise TypeError(f"{name} must have one of the dtypes {names}, got {x.dtype}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}")
  for name, x in (("k", k), ("v", v)):
    if x.dtype != q.dtype:
      raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")

  if q.ndim != 4:
    raise ValueError(f"q must have shape [B, T, H, K], got {q.shape}")
  B, T, H, K = q.shape
  if H < 1 or K < 1:
    raise ValueError(f"q must have at least one head and one channel, got shape {q.shape}")
  if v.ndim != 4:
    raise ValueError(f"v must have shape [B, T*M, HV, V], got {v.shape}")
  HV, V = v.shape[2:]
  R = T * M
  if R * B >= 2**31:
    raise ValueError(f"q and num_householder={M} make {R * B} rows, more than 2^31 - 1")
  what = f"for q of shape {q.shape}, v of shape {v.shape} and num_householder={M}"
  _check_shape("k", k, "[B, T*M, H, K]", (B, R, H, K), what)
  _check_shape("v", v, "[B, T*M, HV, V]", (B, R, HV, V), what)
  if HV < 1 or V < 1:
    raise ValueError(f"v must have at least one head and one channel, got shape {v.shape}")
  if HV % H:
    raise ValueError(f"v's heads must be a multiple of q's: HV % H == 0, got HV={HV}, H={H}")
  _check_shape("beta", beta, "[B, T*M, HV]", (B, R, HV), what)
  if g is not None:
    _check_shape("g", g, "[B, T, HV]", (B, T, HV), what)

  cu_seqlens = check_cu_seqlens(cu_seqlens, B, T)
  N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
  if initial_state is not None:
    _check_shape("initial_state", initial_state, "[N, HV, K, V]", (N, HV, K, V),
                 what + f" and N={N} sequences")  # fmt: skip
  return cu_seqlens


def check_implementation(implementation: Any, K: int) -> str | None:
  """Raises unless `implementation` is known and can serve heads of K channels.

  Returns:
    implementation; "xla" for None where the kernels cannot serve.
  """
  if implementation is not None and implementation not in IMPLEMENTATIONS:
    raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS},"
                     f" got {implementation!r}")  # fmt: skip
  if K > 256 and implementation in ("pallas", "interpret"):
    raise NotImplementedError(
      f"q and k must have at most K=256 channels a head for implementation={implementation!r},"
      f' got K={K}; implementation="xla" has no such limit'
    )
  return "xla" if K > 256 else implementation


def check_num_segments(num_segments: Any, cu_seqlens: Any) -> None:
  """Raises unless sequences can be cut into so many segments."""
  _check_count("num_segments", num_segments)
  if num_segments > 1 and cu_seqlens is not None:
    raise NotImplementedError(
      "num_segments must be 1 for packed sequences, which run side by side as it is: leave out"
      f" cu_seqlens for a sequence that is alone in its row, got {num_segments}"
    )


def _check_count(name: str, n: Any) -> None:
  if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
    raise TypeError(f"{name} must be a Python int, got {_kind(n)}")
  if n < 1:
    raise ValueError(f"{name} must be at least 1, got {n}")


def check_pool(
  state: Any,
  state_indices: Any,
  N: int,
  expected: tuple[int, ...],
  initial_state: Any = None,
  output_final_state: bool = False,
) -> jax.Array | None:
  """Checks a pool of states, each of the expected shape (HV, K, V), and N sequences' slots in it.

  Returns:
    state_indices as int32 on the device, or None if there is no pool.

  Raises:
    TypeError, ValueError: one of the two is missing, or of another kind, dtype or shape; or there
      is another initial or final state besides.
  """
  if (state is None) != (state_indices is None):
    given = "state" if state_indices is None else "state_indices"
    raise ValueError(f"state and state_indices go together, got only {given}")
  if state is None:
    return None
  if initial_state is not None:
    raise ValueError("initial_state cannot be combined with state, which holds it")
  if output_final_state:
    raise ValueError("output_final_state cannot be combined with state, which takes it")
  if not isinstance(state, (jax.Array, np.ndarray)):
    raise TypeError(f"state must be a JAX or NumPy array, got {_kind(state)}")
  if state.dtype not in (jnp.float32, jnp.bfloat16):
    raise TypeError(f"state must have dtype float32 or bfloat16, got {state.dtype}")
  if state.ndim != 4 or state.shape[0] < 1 or state.shape[1:] != expected:
    raise ValueError(f"state must have shape [S, HV, K, V] with S >= 1 and [HV, K, V] = {expected},"
                     f" got {state.shape}")  # fmt: skip
  if isinstance(state_indices, (list, tuple)):
    state_indices = np.asarray(state_indices)
  if not isinstance(state_indices, (jax.Array, np.ndarray)):
    raise TypeError(f"state_indices must be an array, list or tuple, got {_kind(state_indices)}")
  if not jnp.issubdtype(state_indices.dtype, jnp.signedinteger):
    raise TypeError(f"state_indices must have a signed integer dtype, got {state_indices.dtype}")
  if state_indices.shape != (N,):
    raise ValueError(f"state_indices must have shape [N] = {(N,)}, got {state_indices.shape}")
  if isinstance(state_indices, np.ndarray):
    S = state.shape[0]
    bad = state_indices[(state_indices < -1) | (state_indices >= S)]
    if bad.size:
      raise ValueError(f"state_indices must be -1 or in [0, S) with S={S}, got {bad[0]}")
    slots = state_indices[state_indices >= 0]
    if np.unique(slots).size != slots.size:
      raise ValueError(f"state_indices must not name a slot twice, got {state_indices.tolist()}")
    return jax.device_put(state_indices.astype(np.int32))
  return state_indices.astype(jnp.int32)


def check_decode(
  q: Any,
  k: Any,
  v: Any,
  g: Any,
  beta: Any,
  num_householder: Any,
  scale: Any,
  initial_state: Any,
  output_final_state: bool,
  state: Any,
  state_indices: Any,
  update_state: bool,
) -> jax.Array | None:
  """Checks what decode takes, pool and all.

  Returns:
    state_indices as int32 on the device, or None if there is no pool.

  Raises:
    TypeError, ValueError: as `check_arguments` and `check_pool`; or there is no token, or no pool
      that could be left as it was.
  """
  check_arguments(q, k, v, g, beta, num_householder, scale, initial_state, None)
  if q.shape[1] < 1:
    raise ValueError(f"q must have at least one token, T >= 1, got shape {q.shape}")
  if state is None and not update_state:
    raise ValueError("update_state=False needs state, the pool that is not to be updated")
  expected = (v.shape[2], q.shape[-1], v.shape[3])
  return check_pool(state, state_indices, q.shape[0], expected, initial_state, output_final_state)


# What to do where inputs are split over several devices.
_SPLIT = "call gdp_jax.sharding.{} with the mesh's axes, or the operator inside a jax.shard_map"
CHUNK_SPLIT = _SPLIT.format("sharded_gated_delta_product")
DECODE_SPLIT = _SPLIT.format("sharded_fused_recurrent_gated_delta_product")
STAGE_SPLIT = "call it inside a jax.shard_map"
# What the compiler can divide.
XLA_SPLIT = (
  '; implementation="xla" is divided, without a transfer where only heads are split, or rows that'
  " have no pool"
)
TWIN_SPLIT = "; its twin in gdp_jax.xla is divided"


def check_not_explicit(advice: str, **arrays: Any) -> None:
  """Raises ValueError if an array is split over Explicit axes of a mesh."""
  for name, x in arrays.items():
    if isinstance(x, jax.Array):
      spec = jax.typeof(x).sharding.spec
      if any(axis is not None for axis in spec):
        raise ValueError(f"{name} must not be split over Explicit axes, got {spec}: {advice}")


def check_not_split(**arrays: Any) -> None:
  """Raises ValueError if chunks' arrays are known to be split where a plain call gathers them.

  That is on Explicit axes of a mesh; and, where there is a value to ask, along any dim but the
  first and the heads. What this cannot see is left to `refuse_partitioning`.
  """
  check_not_explicit(CHUNK_SPLIT, **arrays)
  for name, x in arrays.items():
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or x.is_fully_replicated:
      continue
    heads = 1 if name in ("initial_state", "state") else 2
    part = x.sharding.shard_shape(x.shape)
    if any(part[dim] != x.shape[dim] for dim in range(x.ndim) if dim not in (0, heads)):
      raise ValueError(f"{name} must not be split but by batch and heads, got shape {x.shape} in"
                       f" parts of {part}: {CHUNK_SPLIT}")  # fmt: skip


def refuse_partitioning(args: Any, advice: str) -> Any:
  """args as they are; outside of a `jax.shard_map` they are an error on several devices.

  A kernel is opaque to the compiler, which would gather its operands to run it whole on every
  device. How they lie on Auto axes is not known before the code is lowered, so that lie as they
  may, lowering it for several devices raises ValueError.
  """
  return jax.tree.map(lambda x: _not_partitioned.bind(x, advice=advice), args)


_not_partitioned = Primitive("gdp_not_partitioned")
_not_partitioned.def_abstract_eval(lambda x, *, advice: x)
batching.defvectorized(_not_partitioned)


@_not_partitioned.def_impl
def _not_on_several_devices(x, *, advice):
  """Outside of `jax.jit`, where each operation is lowered by itself, this asks the array."""
  if isinstance(x, jax.Array):
    _check_one_device(len(x.sharding.device_set), advice)
  return x


def _check_one_device(devices, advice):
  if devices > 1:
    raise ValueError(f"the kernels cannot be divided among {devices} devices by the compiler:"
                     f" {advice}")  # fmt: skip


def _lower_not_partitioned(ctx, x, *, advice):
  context = ctx.module_context.axis_context
  devices = 1
  if isinstance(context, mlir.ShardingContext):
    devices = context.num_devices
  elif isinstance(context, mlir.SPMDAxisContext):
    manual = context.manual_axes | set(context.mesh.manual_axes)
    devices = math.prod(size for name, size in context.mesh.shape.items() if name not in manual)
  _check_one_device(devices, advice)
  return [x]


mlir.register_lowering(_not_partitioned, _lower_not_partitioned)


def check_stage(num_householder: int = 1, **arrays: tuple[Any, str]) -> dict[str, int]:
  """Checks the arrays of a single stage against each other, before a kernel may index them.

  They must not be split over Explicit axes either; `pallas.call` refuses the Auto ones.

  Args:
    num_householder: M; R must be a multiple of it.
    arrays: name = (array or None, its shape in letters), such as k=(k, "B R H K"). A letter is
      bound where it is first seen.

  Returns:
    The size of each letter.

  Raises:
    ValueError: naming the array, the shape expected and the shape given.
  """
  check_not_explicit(STAGE_SPLIT + TWIN_SPLIT, **{name: x for name, (x, _) in arrays.items()})
  sizes: dict[str, int] = {}
  for name, (x, letters) in arrays.items():
    if x is None:
      continue
    names = letters.split()
    if x.ndim != len(names):
      raise ValueError(f"{name} must have shape [{', '.join(names)}], got {x.shape}")
    expected = tuple(sizes.setdefault(c, n) for c, n in zip(names, x.shape, strict=True))
    if x.shape != expected:
      raise ValueError(f"{name} must have shape [{', '.join(names)}] = {expected}, got {x.shape}")
  if "HV" in sizes and sizes["HV"] % sizes.get("H", 1):
    raise ValueError(f"HV must be a multiple of H, got HV={sizes['HV']}, H={sizes['H']}")
  C = sizes.get("C", 16)
  if C < 16 or C & (C - 1):
    raise ValueError(f"the chunk size C must be a power of two of at least 16, got {C}")
  rows, tokens = sizes.get("R"), sizes.get("T")
  if rows is not None and rows % num_householder:
    raise ValueError(f"R must be a multiple of num_householder={num_householder}, got R={rows}")
  if rows is not None and tokens is not None and rows != tokens * num_householder:
    raise ValueError(f"R must be T * num_householder = {tokens * num_householder}, got R={rows}")
  return sizes


def check_cu_seqlens(cu_seqlens, B, T):
  if cu_seqlens is None:
    return None
  if isinstance(cu_seqlens, (list, tuple)):
    cu_seqlens = np.asarray(cu_seqlens)
  if not isinstance(cu_seqlens, (jax.Array, np.ndarray)):
    raise TypeError(f"cu_seqlens must be an array, list or tuple, got {_kind(cu_seqlens)}")
  if cu_seqlens.dtype not in (jnp.int32, jnp.int64):
    raise TypeError(f"cu_seqlens must have dtype int32 or int64, got {cu_seqlens.dtype}")
  if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
    raise ValueError(f"cu_seqlens must have shape [N+1] with N >= 1, got {cu_seqlens.shape}")
  if B != 1:
    raise ValueError(f"cu_seqlens packs sequences into one batch row: q must have B=1, got B={B}")
  if isinstance(cu_seqlens, np.ndarray):
    check_cu_seqlens_values(cu_seqlens, T)
    # An explicit transfer, so that it also runs under jax.transfer_guard("disallow").
    cu_seqlens = jax.device_put(cu_seqlens.astype(np.int32))
  return cu_seqlens


def check_cu_seqlens_values(cu_seqlens: np.ndarray, T: int) -> None:
  """Raises ValueError unless the offsets start at 0, never decrease and end at or below T."""
  if cu_seqlens[0] != 0:
    raise ValueError(f"cu_seqlens must start at 0, got {cu_seqlens[0]}")
  if (np.diff(cu_seqlens) < 0).any():
    n = int(np.argmax(np.diff(cu_seqlens) < 0))
    raise ValueError(f"cu_seqlens must never decrease, got {cu_seqlens[n]} before"
                     f" {cu_seqlens[n + 1]} at entry {n + 1}")  # fmt: skip
  if cu_seqlens[-1] > T:
    raise ValueError(f"cu_seqlens must end at or below T={T}, got {cu_seqlens[-1]}")


def check_inputs(
  q: Any,
  k: Any,
  v: Any,
  g: Any,
  beta: Any,
  num_householder: int = 1,
  *,
  scale: float | None = None,
  initial_state: Any = None,
  output_final_state: bool = False,
  use_qk_l2norm_in_kernel: bool = False,
  cu_seqlens: Any = None,
  implementation: str | None = None,
) -> None:
  """Checks the values too, on the host: a debugging aid that waits for the device.

  Besides everything that the operators check: q, k, v, beta and initial_state are finite, g is at
  most 0 and not NaN (-inf is a reset), beta lies in [0, 2], and cu_seqlens is in order even when
  it lives on the device. Rows behind the last offset may hold anything.

  Args:
    q, k, v, g, beta, num_householder, scale, initial_state, cu_seqlens, implementation: as for
      `gdp_jax.chunk_gated_delta_product`.
    output_final_state, use_qk_l2norm_in_kernel: taken so that the operator's own arguments can be
      passed on as they are.

  Raises:
    TypeError, ValueError: naming the argument, what was expected and what was given. TypeError
      too when called under jit, where there are no values to look at.

  Example:
    >>> import jax.numpy as jnp
    >>> from gdp_jax import check_inputs
    >>> q = k = v = jnp.ones((1, 4, 2, 8))
    >>> check_inputs(q, k, v, jnp.full((1, 4, 2), 0.95), jnp.ones((1, 4, 2)))
    Traceback (most recent call last):
      ...
    ValueError: g must be a natural-log decay, at most 0, got 0.95 at [0, 0, 0]; all of g lies in \
[0, 1]: is it the decay itself? then pass jnp.log(g)
  """
  values = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
  for name, x in values.items():
    if isinstance(x, jax.core.Tracer):
      raise TypeError(f"check_inputs reads values, but {name} is a tracer: call it outside jit")
  check_arguments(q, k, v, g, beta, num_householder, scale, initial_state, cu_seqlens)
  check_implementation(implementation, q.shape[-1])

  used = q.shape[1]
  if cu_seqlens is not None:
    offsets = np.asarray(cu_seqlens)
    check_cu_seqlens_values(offsets, q.shape[1])
    used = int(offsets[-1])
  for name in ("q", "k", "v", "beta", "initial_state"):
    x = values[name]
    if x is None:
      continue
    x = np.asarray(x, np.float32)
    if name != "initial_state":
      x = x[:, : used if name == "q" else used * num_householder]
    _check_values(name, x, np.isfinite(x), "must be finite")
    if name == "beta":
      _check_values(name, x, (x >= 0) & (x <= 2), "must be a step size in [0, 2]")
  if g is not None:
    x = np.asarray(g, np.float32)[:, :used]
    hint = ""
    if x.size and ((x >= 0) & (x <= 1)).all() and (x > 0).any():
      hint = "; all of g lies in [0, 1]: is it the decay itself? then pass jnp.log(g)"
    _check_values("g", x, x <= 0, "must be a natural-log decay, at most 0", hint)


def _check_shape(name, x, letters, expected, what):
  if x.shape != expected:
    raise ValueError(f"{name} must have shape {letters} = {expected} {what}, got {x.shape}")


def _check_values(name, x, good, expected, hint=""):
  if not good.all():
    where = np.unravel_index(int(np.argmin(good)), x.shape)
    place = ", ".join(str(int(i)) for i in where)
    raise ValueError(f"{name} {expected}, got {x[where]:g} at [{place}]{hint}")


def _kind(x):
  return f"{x!r} of type {type(x).__name__}" if np.isscalar(x) else type(x).__name__
