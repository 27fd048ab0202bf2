"""What every kernel here is written with. The only file that imports Pallas' Triton backend.

A kernel sees whole arrays, flat in their first axis, and takes tiles from them by index arrays: in
a stream [L, heads, D] the tile of some rows, one head and some columns. The mask of a tile says
which of its elements exist; the others are read as 0 and never written.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gdp_jax import inputs
from gdp_jax.config import Config

plt: Any
try:
  from jax.experimental.pallas import triton
except ImportError:  # a jaxlib without Triton, such as the one for Windows
  plt = None
else:
  plt = triton

program_id, when = pl.program_id, pl.when


def dispatch(implementation, kernel, plain, *args, advice):
  """Runs what an operator's `implementation` means.

  plain(*args) for "xla", kernel("pallas" or "interpret")(*args) for these; for None the Pallas
  kernels where the code is lowered for CUDA, plain(*args) elsewhere. Where it may be a kernel, it
  is an error on several devices, with this advice: for None on any platform, so that what runs on a
  CPU runs on GPUs.
  """
  if implementation != "xla":
    args = inputs.refuse_partitioning(args, advice)
  if implementation is None and plt is not None:
    return lax.platform_dependent(*args, cuda=kernel("pallas"), default=plain)
  if implementation in (None, "xla"):
    return plain(*args)
  return kernel(implementation)(*args)


def call(
  kernel, *args, grid, out_shape, config: Config, implementation: str, name: str,
  in_place: dict[int, int] | None = None, **static,
):  # fmt: skip
  """Runs `kernel(*arg_refs, *out_refs, **static)`; an argument may be None, and arrives so.

  A kernel that multiplies matrices has a keyword `dot`, passed here as None: it gets `dot` below,
  bound to the implementation.

  With `in_place`, {argument: result}, a result takes the place of an argument, where nothing else
  needs that: what the kernel does not write stays as it was. A program's threads do not wait for
  each other, so an element's store must be computed from its only load, or follow a `barrier`: a
  keyword of the kernel, passed here as None. Nothing behind a call of it begins before all threads
  of a program have done what is before it.

  Raises:
    ValueError: implementation is neither "pallas" nor "interpret"; or on several devices, outside
      of a `jax.shard_map`.
    NotImplementedError: this jaxlib has no Triton backend.
  """
  if implementation not in ("pallas", "interpret"):
    raise ValueError(f'implementation must be "pallas" or "interpret", got {implementation!r}')
  if plt is None:
    raise NotImplementedError(f"{implementation=} needs Pallas' Triton backend, which this jaxlib"
                              ' lacks; implementation="xla" needs nothing')  # fmt: skip
  interpret = implementation == "interpret"
  args = inputs.refuse_partitioning(args, inputs.STAGE_SPLIT + inputs.TWIN_SPLIT)
  if "dot" in static:
    static["dot"] = functools.partial(dot, interpret=interpret)
  if "barrier" in static:
    static["barrier"] = (lambda: None) if interpret else plt.debug_barrier
  if 0 in grid:
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), out_shape)
    for argument, result in (in_place or {}).items():
      nothing = (*nothing[:result], args[argument], *nothing[result + 1 :])
    return nothing
  body = functools.partial(kernel, **static)
  # The backend takes the kernel's name from the function.
  named = lambda *refs: body(*refs)
  named.__name__ = named.__qualname__ = name
  return pl.pallas_call(
    named,
    grid=grid,
    out_shape=out_shape,
    interpret=interpret,
    name=name,
    input_output_aliases={
      len(jax.tree.leaves(args[:argument])): len(jax.tree.leaves(out_shape[:result]))
      for argument, result in (in_place or {}).items()
    },
    compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
  )(*args)


def tile(ref, rows, head, cols):
  """The view of a stream [L, heads, D] that `load` and `store` take: [len(rows), len(cols)]."""
  return ref.at[rows[:, None], head, cols[None, :]]


def below(index, end, whole):
  """The mask index < end, or None where `whole`: where shapes say that it always is so.

  A mask costs instructions at each load.
  """
  return None if whole else index < end


def both(*masks):
  """What all masks allow; None allows everything."""
  given = [mask for mask in masks if mask is not None]
  return functools.reduce(operator.and_, given) if given else None


def mask(rows=None, cols=None, where=None):
  """The mask of a tile, of those of its rows and of its columns."""
  return both(
    None if rows is None else rows[:, None], None if cols is None else cols[None, :], where
  )


def keep(mask, x):
  """x where the mask says so, else 0."""
  return x if mask is None else jnp.where(mask, x, 0.0)


def load(view, mask, *, eviction_policy=None):
  other = None if mask is None else 0
  return plt.load(view, mask=mask, other=other, eviction_policy=eviction_policy)


def store(view, value, mask):
  plt.store(view, value.astype(view.dtype), mask=mask)


def load_scalar(ref, *index):
  return plt.load(ref.at[tuple(jnp.int32(i) if isinstance(i, int) else i for i in index)])


def dot(a, b, *, trans_a=False, trans_b=False, precision=None, interpret):
  """a @ b in fp32, operands of one dtype. fp32 operands keep fp32 accuracy: three tf32 products.

  `precision="tf32"` makes do with one.
  """
  if a.dtype != jnp.float32:
    precision = None
  elif interpret:
    precision = lax.Precision.HIGHEST
  elif precision == "tf32":
    precision = lax.DotAlgorithmPreset.TF32_TF32_F32
  else:
    precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
  dims = (((0 if trans_a else 1,), (1 if trans_b else 0,)), ((), ()))
  return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def split(a, dtype):
  """fp32 a as the sum of two arrays of `dtype`: 16 bits of it in bf16. The second None in fp32."""
  high = a.astype(dtype)
  if dtype == jnp.float32:
    return high, None
  return high, (a - high.astype(jnp.float32)).astype(dtype)


def columns(i, size, block):
  """Indices [block] of the i-th block of an axis, and the mask of those that exist."""
  cols = i * block + jnp.arange(block, dtype=jnp.int32)
  return cols, below(cols, size, size % block == 0)


def blocks(size, block):
  """The `columns` of each block of an axis."""
  return [columns(i, size, block) for i in range(pl.cdiv(size, block))]


def over_blocks(size, block, body, carry):
  """carry = body(cols, exists, carry) for each of `blocks(size, block)`, in a loop at run time.

  For bodies of several products: written out for each block they take minutes to compile.
  """

  def step(i, carry):
    return body(*columns(i, size, block), carry)

  if size <= block:
    return step(0, carry)
  return lax.fori_loop(0, pl.cdiv(size, block), step, carry)


def decay(g_row, g_col, keep):
  """2^(g_row_i - g_col_j) where `keep`, else 0; masked before the exponential."""
  return jnp.where(keep, jnp.exp2(jnp.where(keep, g_row[:, None] - g_col[None, :], 0.0)), 0.0)


def sum_from(x):
  """sum of x_j over j >= i, for each i: a reverse cumulative sum, which the backend lacks."""
  i = jnp.arange(x.shape[0], dtype=jnp.int32)
  return jnp.sum(jnp.where(i[:, None] >= i[None, :], x[:, None], 0.0), axis=0)
