"""The operator on several devices: batch, heads and sequence over the axes of a mesh.

    sharded_gated_delta_product                    from outside: arrays of the whole mesh
    sharded_fused_recurrent_gated_delta_product    likewise, decode
    context_parallel_gated_delta_product           inside a `jax.shard_map`: a device's segment

B batch, T tokens, M Householder copies, R = T*M rows, H query/key heads, HV value heads, K and V
head dims, N sequences or requests, S slots of a pool, n devices on the sequence axis, T/n tokens in
a device's segment.

**Which axis to shard.** What a device receives in one call, in bytes, for the B, T and HV that it
has itself:

    axis       forward                      gradient, in addition
    batch      0                            0
    heads      0                            0
    sequence   4 (n - 1) B HV K (K + V)     4 (n - 1) B HV K (K + V)

and on the sequence axis, where they are asked for, all-reduces of states: 4 N HV K V for the
gradient of initial_state; packed, the same for final_state and again for its gradient.

The batch first: nothing moves, and the weights are whole. Then the heads, n up to H, with the
weights cut alike: again nothing moves here, and a layer's output projection ends in the all-reduce
of [B, T, D] that tensor parallelism has anyway. The sequence last, for a sequence that one device
cannot hold, or too few rows and heads to go round: what moves does not depend on T, but the work
does, since a device runs its segment with K more columns: both passes take about (V + K) / V times
the work of a call, on n devices. The axes combine.

Packed, each device holds the states in front of all N sequences, 4 N HV K V bytes, given or not.

An axis of the mesh that is named for nothing holds copies, and the gradient adds the copies up
again, by an all-reduce of the size of the inputs: name all axes that there are, several for one
purpose as a tuple.

**How the sequence is split.** A segment's effect on the state that enters it is affine,

    S_out = P S_in + F,    P [K, K], F [K, V],

and so is each token's output, o + o' S_in. The operator itself computes them: of the values [v | 0]
and the initial state [F_0 | I] the final state is [F | P] and the output [o | o']. An all-gather
gives every device the effects of all, each device folds those in front of it, and adds what the
state that it gets makes of its outputs. Gradients are those of these steps:
the all-gather's is a reduce-scatter of the same size, and nothing of a stream's size moves in
either direction. Of packed sequences at most one leaves a device for the next one, and its effect
is what moves; if it began on this device, P does not count.

**Serving.** Prefill and decode move nothing either: of a pool [S, HV, K, V] each device holds its
own heads of all slots, P(None, head_axis). With batch_axis the slots are split like the requests,
P(batch_axis, head_axis), and a request's slot has to lie in its own device's part: of n parts, part
i holds the requests i*N/n to (i+1)*N/n - 1 and the slots i*S/n to (i+1)*S/n - 1. Slots are numbered
in the whole pool, so that results are those of one device. On the sequence axis there is no pool:
prefill there with initial_state and output_final_state. `gdp_jax.rollback` is plain JAX, which the
compiler divides, without a transfer if only heads are split.

Plain calls of `gdp_jax.chunk_gated_delta_product`, `gdp_jax.fused_recurrent_gated_delta_product`,
`gdp_jax.prepare` and the single kernels on arrays that are split raise, and name what to call,
unless the compiler can split them too: implementation="xla" on Auto axes. There nothing moves if
batch and heads are split and there is no pool; a T that is split is an error where it can be seen,
which under `jax.jit` it cannot, and would be gathered.

Source: the recurrence, DeltaProduct, arXiv 2502.10297; that affine maps are composed in parallel,
Blelloch, "Prefix sums and their applications", 1990.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from gdp_jax import inputs, metadata
from gdp_jax.chunk import chunk_gated_delta_product
from gdp_jax.fused_recurrent import fused_recurrent_gated_delta_product

Axis = str | tuple[str, ...] | None


def sharded_gated_delta_product(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array | None,
  beta: jax.Array,
  num_householder: int = 1,
  *,
  mesh: Mesh | AbstractMesh | None = None,
  batch_axis: Axis = None,
  head_axis: Axis = None,
  sequence_axis: Axis = None,
  scale: float | None = None,
  initial_state: jax.Array | None = None,
  output_final_state: bool = False,
  use_qk_l2norm_in_kernel: bool = False,
  cu_seqlens: jax.Array | np.ndarray | list[int] | tuple[int, ...] | None = None,
  state: jax.Array | None = None,
  state_indices: jax.Array | np.ndarray | None = None,
  num_segments: int = 1,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """`gdp_jax.chunk_gated_delta_product` over a mesh: the same numbers, each device its part.

  Arguments and results have the shapes of the whole; see this module's docstring for what each axis
  costs. Inputs that lie otherwise on the mesh are moved: by the compiler where the mesh's axes are
  Auto, while on Explicit axes only replicated ones are cut, and any others are an error.

  Args:
    q, k, v, g, beta, num_householder, scale, initial_state, output_final_state,
      use_qk_l2norm_in_kernel, num_segments, implementation: as for
      `gdp_jax.chunk_gated_delta_product`; a device cuts what it has into so many segments.
    mesh: default that of `jax.set_mesh`, or else the one that q lies on.
    batch_axis: the mesh's axis, or axes, over which B is split, and N = B of the states.
    head_axis: likewise for H and HV; the heads of a group stay together, so H is divided.
    sequence_axis: likewise for T, and with it R. If T is no multiple of its size, the last segment
      is shorter or empty; such streams cannot lie split on the mesh, but are cut here.
    cu_seqlens: offsets of packed sequences [N+1] in the whole row, the same on all devices.
      Sequences may cross any number of devices. Not with batch_axis.
    state, state_indices: a pool [S, HV, K, V] and the sequences' slots [N] in it, as for the
      operator. The pool is split by heads and, with batch_axis, by slots: see this module's
      docstring. Not with sequence_axis.

  Returns:
    o [B, T, HV, V], split as v is, and the final state [N, HV, K, V] in fp32, split as B and HV
    are, or None; with a pool, the pool in its place.

  Raises:
    TypeError, ValueError, NotImplementedError: as the operator; and ValueError for axes that the
      mesh lacks, that occur twice, or that do not divide what they split, and for slots in another
      device's part of the pool (those on the device are padding, as any outside of it);
      NotImplementedError for a pool with sequence_axis.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from gdp_jax.sharding import sharded_gated_delta_product
    >>> mesh = jax.make_mesh((1, jax.device_count()), ("data", "context"))
    >>> q = k = jnp.full((2, 64, 1, 16), 0.25)
    >>> v, beta = jnp.ones((2, 64, 1, 32)), jnp.full((2, 64, 1), 0.5)
    >>> o, _ = sharded_gated_delta_product(
    ...     q, k, v, None, beta, mesh=mesh, batch_axis="data", sequence_axis="context")
    >>> o.shape
    (2, 64, 1, 32)
  """
  cu_seqlens = inputs.check_arguments(
    q, k, v, g, beta, num_householder, scale, initial_state, cu_seqlens
  )
  inputs.check_num_segments(num_segments, cu_seqlens)
  implementation = inputs.check_implementation(implementation, q.shape[-1])
  N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
  expected = (v.shape[2], q.shape[-1], v.shape[3])
  slots = inputs.check_pool(state, state_indices, N, expected, initial_state, output_final_state)
  mesh = _default_mesh(mesh, q)
  axes = dict(batch_axis=batch_axis, head_axis=head_axis, sequence_axis=sequence_axis)
  _check_axes(mesh, axes, "chunk_gated_delta_product")
  if cu_seqlens is not None and _size(mesh, batch_axis) > 1:
    raise ValueError(
      "cu_seqlens packs sequences into one batch row, which batch_axis cannot split: pass the axis"
      " as sequence_axis, or give each device a packed row of its own in a jax.shard_map around"
      f" gdp_jax.chunk_gated_delta_product; got {batch_axis=}"
    )
  if state is not None and sequence_axis is not None:
    raise NotImplementedError(
      "state, a pool, cannot be combined with sequence_axis: pass initial_state and"
      f" output_final_state; got {sequence_axis=}"
    )
  arrays = dict(
    q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, state=state, state_indices=slots
  )
  _check_arrays(mesh, axes, arrays, state_indices, B=q.shape[0])
  return _sharded(
    arrays, cu_seqlens, mesh=mesh, **axes,
    num_householder=int(num_householder),
    scale=inputs.default_scale(scale, q.shape[-1]),
    output_final_state=bool(output_final_state),
    use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
    num_segments=int(num_segments),
    implementation=implementation,
  )[:2]  # fmt: skip


def sharded_fused_recurrent_gated_delta_product(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array | None,
  beta: jax.Array,
  num_householder: int = 1,
  *,
  mesh: Mesh | AbstractMesh | None = None,
  batch_axis: Axis = None,
  head_axis: Axis = None,
  scale: float | None = None,
  initial_state: jax.Array | None = None,
  output_final_state: bool = False,
  use_qk_l2norm_in_kernel: bool = False,
  state: jax.Array | None = None,
  state_indices: jax.Array | np.ndarray | None = None,
  output_intermediate_states: bool = False,
  update_state: bool = True,
  implementation: str | None = None,
) -> tuple[jax.Array, ...]:
  """`gdp_jax.fused_recurrent_gated_delta_product` over a mesh: the same numbers, nothing moves.

  Under `jax.jit` with the pool donated, and lying on the mesh as here, it is updated in place.

  Args:
    q, k, v, g, beta, num_householder, scale, initial_state, output_final_state,
      use_qk_l2norm_in_kernel, output_intermediate_states, update_state, implementation: as for
      `gdp_jax.fused_recurrent_gated_delta_product`.
    mesh: default that of `jax.set_mesh`, or else the one that q lies on.
    batch_axis: the mesh's axis, or axes, over which the N requests are split, and with them N of
      the states or S of the pool.
    head_axis: likewise for H and HV; the heads of a group stay together, so H is divided.
    state: the pool [S, HV, K, V], to lie on the mesh as P(batch_axis, head_axis).
    state_indices: int32 [N], the slot of each request, numbered in the whole pool; -1 is padding.
      With batch_axis a request's slot lies in its own device's part of the pool: see this module's
      docstring. On the device, where it cannot be checked, any other slot is padding too.

  Returns:
    As `gdp_jax.fused_recurrent_gated_delta_product`. o [N, T, HV, V] and the states after each
    token lie as P(batch_axis, None, head_axis), pool or final state as P(batch_axis, head_axis).

  Raises:
    TypeError, ValueError, NotImplementedError: as the operator; and ValueError for axes that the
      mesh lacks, that occur twice, or that do not divide what they split, and for slots in another
      device's part of the pool.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from gdp_jax.sharding import sharded_fused_recurrent_gated_delta_product
    >>> mesh = jax.make_mesh((jax.device_count(),), ("model",))
    >>> q = k = v = jnp.ones((3, 1, 8, 4))
    >>> pool = jnp.zeros((10, 8, 4, 4), device=NamedSharding(mesh, PartitionSpec(None, "model")))
    >>> o, pool = sharded_fused_recurrent_gated_delta_product(
    ...     q, k, v, None, jnp.full((3, 1, 8), 0.5), mesh=mesh, head_axis="model",
    ...     state=pool, state_indices=jnp.array([7, -1, 0]))
    >>> [int(slot) for slot in jnp.flatnonzero(jnp.any(pool, axis=(1, 2, 3)))]
    [0, 7]
  """
  slots = inputs.check_decode(
    q, k, v, g, beta, num_householder, scale, initial_state, output_final_state, state,
    state_indices, update_state,
  )  # fmt: skip
  implementation = inputs.check_implementation(implementation, q.shape[-1])
  mesh = _default_mesh(mesh, q)
  axes = dict(batch_axis=batch_axis, head_axis=head_axis)
  _check_axes(mesh, axes, "fused_recurrent_gated_delta_product")
  arrays = dict(
    q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, state=state, state_indices=slots
  )
  _check_arrays(mesh, axes, arrays, state_indices, N=q.shape[0])
  o, new_state, states = _sharded(
    arrays, None, mesh=mesh, **axes, decode=True,
    num_householder=int(num_householder),
    scale=inputs.default_scale(scale, q.shape[-1]),
    output_final_state=bool(output_final_state),
    use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
    output_intermediate_states=bool(output_intermediate_states),
    update_state=bool(update_state),
    implementation=implementation,
  )  # fmt: skip
  return (o, new_state, states) if output_intermediate_states else (o, new_state)


@partial(
  jax.jit,
  static_argnames=(
    "mesh", "batch_axis", "head_axis", "sequence_axis", "decode", "num_householder", "scale",
    "output_final_state", "use_qk_l2norm_in_kernel", "output_intermediate_states", "update_state",
    "num_segments", "implementation",
  ),
)  # fmt: skip
def _sharded(
  arrays, cu_seqlens, *, mesh, batch_axis, head_axis, sequence_axis=None, decode=False, **options
):
  """o, the final state or the pool, and the states after each token, as far as asked for."""
  explicit = AxisType.Explicit in mesh.axis_types
  T, pool = arrays["q"].shape[1], arrays["state"]
  short = -T % _size(mesh, sequence_axis)
  specs = _specs(batch_axis, head_axis, sequence_axis)
  for name, x in arrays.items():
    if x is None:
      continue
    if short and name != "initial_state":
      # The outputs of these tokens are cut off again.
      x = metadata.pad_rows(x, short * (1 if name in ("q", "g") else options["num_householder"]))
    arrays[name] = jax.reshard(x, NamedSharding(mesh, specs[name])) if explicit else x
  # Passed through the shard_map, a pool that stays as it is would be copied.
  unchanged = pool is not None and not options.get("update_state", True)

  def body(arrays, cu_seqlens):
    if pool is not None and axis_names(batch_axis):
      # As numbered in this device's part of the pool; what lies outside of that is padding.
      slots = arrays["state_indices"]
      first = arrays["state"].shape[0] * lax.axis_index(batch_axis)
      arrays = arrays | dict(state_indices=jnp.where(slots < 0, -1, slots - first))
    out: tuple[Any, ...]
    if decode:
      out = fused_recurrent_gated_delta_product(**arrays, **options)
    elif sequence_axis is None:
      out = chunk_gated_delta_product(**arrays, cu_seqlens=cu_seqlens, **options)
    else:
      streams = {name: x for name, x in arrays.items() if name not in ("state", "state_indices")}
      out = context_parallel_gated_delta_product(
        **streams, axis_name=sequence_axis, cu_seqlens=cu_seqlens, **options
      )
    o, state, *after_tokens = out
    return o, None if unchanged else state, *(after_tokens or [None])

  # The kernels say nothing of what varies over which axis, so that is not checked.
  stream, states = specs["q"], specs["state"]
  o, state, after_tokens = jax.shard_map(
    body, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=(stream, states, stream),
    check_vma=False, axis_names=frozenset(mesh.axis_names) - frozenset(mesh.manual_axes),
  )(arrays, cu_seqlens)  # fmt: skip
  if short:
    if explicit:  # T is not divisible, and so cannot stay split
      o = jax.reshard(o, NamedSharding(mesh, PartitionSpec(stream[0], None, stream[2])))
    o = o[:, :T]
  return o, pool if unchanged else state, after_tokens


def context_parallel_gated_delta_product(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array | None,
  beta: jax.Array,
  num_householder: int = 1,
  *,
  axis_name: str | tuple[str, ...],
  scale: float | None = None,
  initial_state: jax.Array | None = None,
  output_final_state: bool = False,
  use_qk_l2norm_in_kernel: bool = False,
  cu_seqlens: jax.Array | np.ndarray | list[int] | tuple[int, ...] | None = None,
  num_segments: int = 1,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """One device's segment of sequences that are split over a mesh axis.

  For use inside a `jax.shard_map(..., check_vma=False)` of one's own, as on the inside of
  `sharded_gated_delta_product`. T is here the number of tokens of a segment, the same on all n
  devices: the i-th holds the tokens i*T to (i+1)*T - 1.

  Args:
    q, k, v, g, beta: this device's segment, of the shapes that `gdp_jax.chunk_gated_delta_product`
      takes.
    num_householder, scale, use_qk_l2norm_in_kernel, num_segments, implementation: as there.
    axis_name: the mesh axis, or axes, over which the sequence is split.
    initial_state: the sequences' states before their first tokens [N, HV, K, V], the same on all
      devices.
    output_final_state: whether to return the state after the sequences' last tokens.
    cu_seqlens: offsets [N+1] in the whole row of n*T tokens, the same on all devices; needs B = 1.
      Segments behind the last offset are padding, and may be all of a device's tokens.

  Returns:
    o [B, T, HV, V] of the segment, and the final state [N, HV, K, V] in fp32, the same on all
    devices, or None.

  Raises:
    TypeError, ValueError, NotImplementedError: as the operator.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from functools import partial
    >>> from jax.sharding import PartitionSpec
    >>> from gdp_jax.sharding import context_parallel_gated_delta_product
    >>> mesh = jax.make_mesh((jax.device_count(),), ("context",))
    >>> split = PartitionSpec(None, "context")
    >>> @partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    ... def attend(q, k, v, beta):
    ...   o, _ = context_parallel_gated_delta_product(q, k, v, None, beta, axis_name="context")
    ...   return o
    >>> x, beta = jnp.full((1, 64, 1, 16), 0.25), jnp.full((1, 64, 1), 0.5)
    >>> x, beta = jax.device_put((x, beta), jax.NamedSharding(mesh, split))
    >>> attend(x, x, x, beta).shape
    (1, 64, 1, 16)
  """
  n, i = lax.axis_size(axis_name), lax.axis_index(axis_name)
  T = q.shape[1]
  if cu_seqlens is not None:
    offsets = inputs.check_cu_seqlens(cu_seqlens, q.shape[0], n * T)
    cu_seqlens = metadata.sanitize_cu_seqlens(offsets, n * T)
  inputs.check_arguments(q, k, v, g, beta, num_householder, scale, initial_state, cu_seqlens)
  operator = partial(
    chunk_gated_delta_product, num_householder=num_householder, scale=scale,
    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, num_segments=num_segments,
    implementation=implementation,
  )  # fmt: skip
  B, HV, K, V = q.shape[0], v.shape[2], q.shape[3], v.shape[3]
  N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
  states = jnp.zeros((N, HV, K, V)) if initial_state is None else initial_state.astype(jnp.float32)
  # Each border's sequence, and whether it lies on both sides of it. Without offsets all do so.
  borders = T * jnp.arange(n + 1, dtype=jnp.int32)
  if cu_seqlens is None:
    enters, passes, local = jnp.ones((B,), bool), jnp.ones(n, bool), None
    entered = jnp.ones((1, T), bool)
  else:
    sequence = metadata.sequence_of(borders, cu_seqlens)
    crossed = (cu_seqlens[sequence] < borders) & (borders < cu_seqlens[sequence + 1])
    # Whether what leaves segment j has entered it too, rather than begun in it.
    passes = crossed[1:] & (cu_seqlens[sequence[1:]] < borders[:-1])
    enters = crossed[i] & (jnp.arange(N) == sequence[i])
    local = jnp.clip(cu_seqlens - borders[i], 0, T)
    entered = crossed[i] & (jnp.arange(T) < local[sequence[i] + 1])[None]

  # [F | P] of the values [v | 0] and the state [F_0 | I]; of sequences that begin here P is 0.
  enters = enters[:, None, None, None]
  eye = jnp.broadcast_to(jnp.eye(K), (N, HV, K, K))
  begin = jnp.concatenate([jnp.where(enters, 0, states), jnp.where(enters, eye, 0)], axis=-1)
  o, effects = operator(
    q, k, jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, K))), g, beta,
    initial_state=begin, output_final_state=True, cu_seqlens=local,
  )  # fmt: skip
  leaving = effects if cu_seqlens is None else effects[sequence[i + 1]][None]
  first = states if cu_seqlens is None else jnp.zeros((1, HV, K, V))
  final_state, entering = _fold(lax.all_gather(leaving, axis_name), first, passes)
  S = entering[i]

  # Masked on both sides of the product: what is not finite in other sequences must not come through
  # as 0 * inf, here or in the gradient.
  of_S = metadata.where_tokens(o[..., V:], entered).astype(jnp.float32)
  precision = "highest" if v.dtype == jnp.float32 else None  # else o is rounded anyway
  from_S = jnp.einsum("bthk,bhkv->bthv", of_S, S, precision=precision)
  o = (o[..., :V] + metadata.where_tokens(from_S, entered)).astype(v.dtype)
  if not output_final_state:
    return o, None
  if cu_seqlens is not None:
    # Of the device with a sequence's last token; of an empty sequence they are all the same.
    F, P = effects[..., :V], jnp.where(enters, effects[..., V:], 0)
    final_state = F + jnp.matmul(P, jnp.where(enters, S, 0), precision="highest")
    last = jnp.clip((cu_seqlens[1:] - 1) // max(T, 1), 0, n - 1)
    final_state = jnp.where((last == i)[:, None, None, None], final_state, 0)
    final_state = lax.psum(final_state, axis_name)
  return o, final_state


def _fold(effects, first, passes):
  """The state after all segments, and the states in front of each: [B, HV, K, V] and [n, ...].

  passes [n]: whether a segment passes on what enters it, in its way; otherwise P does not count.
  """
  V = first.shape[-1]

  def step(S, segment):
    effect, passes = segment
    F, P = effect[..., :V], effect[..., V:]
    # Masked before the product: another sequence's overflow must not come through as 0 * inf.
    return F + jnp.matmul(P, jnp.where(passes, S, 0), precision="highest"), S

  return lax.scan(step, first, (effects, passes))


def _default_mesh(mesh, q):
  if mesh is None:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
      sharding = q.sharding if _is_concrete(q) else jax.typeof(q).sharding
      mesh = sharding.mesh if isinstance(sharding, NamedSharding) else mesh
  if not isinstance(mesh, (Mesh, AbstractMesh)):
    raise TypeError(f"mesh must be a jax.sharding.Mesh or None, got {type(mesh).__name__}")
  if mesh.empty:
    raise ValueError("mesh must be given where neither jax.set_mesh nor q's sharding says which")
  return mesh


def _is_concrete(x):
  return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def axis_names(axis: Axis) -> tuple[str, ...]:
  """The mesh's axes that an argument names."""
  return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def _size(mesh, axis):
  return math.prod(mesh.shape[name] for name in axis_names(axis))


def _specs(batch_axis, head_axis, sequence_axis=None):
  """How each array lies on the mesh."""
  stream = PartitionSpec(batch_axis, sequence_axis, head_axis)
  states = PartitionSpec(batch_axis, head_axis)
  return dict(
    q=stream, k=stream, v=stream, g=stream, beta=stream, initial_state=states, state=states,
    state_indices=PartitionSpec(batch_axis),
  )  # fmt: skip


def _check_axes(mesh, axes, plain):
  """Raises unless the axes, by argument, are those of the mesh, at least one and none twice.

  `plain` is the operator that splits nothing.
  """
  seen = set()
  for argument, axis in axes.items():
    of_names = isinstance(axis, tuple) and all(isinstance(name, str) for name in axis)
    if not (axis is None or isinstance(axis, str) or of_names):
      raise TypeError(f"{argument} must be an axis name, a tuple of them or None, got {axis!r}")
    for name in axis_names(axis):
      if name not in mesh.axis_names:
        raise ValueError(f"{argument} must be an axis of the mesh {tuple(mesh.axis_names)},"
                         f" got {name!r}")  # fmt: skip
      if name in mesh.manual_axes:
        raise ValueError(f"{argument}={name!r} is manual already: inside a jax.shard_map call"
                         f" gdp_jax.{plain}, or for the sequence"
                         " context_parallel_gated_delta_product")  # fmt: skip
      if name in seen:
        raise ValueError(f"{argument} must be an axis of its own, got {name!r} again")
      seen.add(name)
  if not seen:
    raise ValueError(f"one of {', '.join(axes)} must be given, got none: gdp_jax.{plain} splits"
                     " nothing")  # fmt: skip


def _check_arrays(mesh, axes, arrays, given_indices, **rows):
  """Raises unless arrays can be cut along the axes, by argument, and lie as is needed for that.

  `given_indices` are state_indices as the user gave them, whose values can be seen on the host.
  """
  _check_divides(mesh, "batch_axis", axes["batch_axis"], **rows)
  _check_divides(mesh, "head_axis", axes["head_axis"], H=arrays["q"].shape[2])
  if arrays["state"] is not None:
    _check_slots(mesh, axes["batch_axis"], arrays["state"].shape[0], given_indices)
  _check_placement(arrays, _specs(**axes))


def _check_divides(mesh, argument, axis, **sizes):
  """Raises unless an axis' size, if there is an axis, divides these sizes, by letter."""
  n = _size(mesh, axis)
  for letter, size in sizes.items():
    if size % n:
      raise ValueError(f"{argument} must divide {letter}={size}, got {axis!r} of {n} devices")


def _check_slots(mesh, batch_axis, S, state_indices):
  """Raises if a slot is known to lie in another device's part of the pool than its request."""
  n = _size(mesh, batch_axis)
  _check_divides(mesh, "batch_axis", batch_axis, S=S)
  if n == 1 or isinstance(state_indices, jax.Array):
    return
  slots = np.asarray(state_indices)
  own = np.repeat(np.arange(n), slots.size // n)
  wrong = np.flatnonzero((slots >= 0) & (slots // (S // n) != own))
  if wrong.size:
    request, first = wrong[0], own[wrong[0]] * (S // n)
    raise ValueError(
      f"state_indices must give request {request} a slot of its own device's part of the pool,"
      f" {first} to {first + S // n - 1}, or -1, with batch_axis={batch_axis!r} of {n} devices,"
      f" got {slots[request]}"
    )


def _check_placement(arrays, specs):
  """Raises if a dim of an array is split over Explicit axes, in another way than its spec says.

  There JAX moves nothing that was not asked for; cutting copies moves nothing.
  """
  for name, x in arrays.items():
    if not isinstance(x, jax.Array):
      continue
    spec, given = specs[name], jax.typeof(x).sharding.spec
    for dim, axis in enumerate(given):
      expected = spec[dim] if dim < len(spec) else None
      if axis is not None and axis_names(axis) != axis_names(expected):
        raise ValueError(f"{name} must lie on the mesh's Explicit axes as {spec}, got {given}:"
                         " see jax.reshard")  # fmt: skip
