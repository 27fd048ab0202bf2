"""Several devices against one: the operator over a mesh axis."""

import dataclasses
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gdp_jax import chunk_gated_delta_product
from gdp_jax.benchmark.cases import BOUNDS, Case, make_inputs, with_gradients, without_do
from gdp_jax.benchmark.measure import kernel_ms, reason, wall_ms
from gdp_jax.benchmark.tune import largest_error
from gdp_jax.sharding import sharded_gated_delta_product

# The case that shows what an axis is for, by the axis: see `gdp_jax.sharding`.
CASE_OF_AXIS = dict(batch_axis="batch", head_axis="main", sequence_axis="long")


@dataclasses.dataclass
class Line:
  """Times on one device and on n. Kernel time is the sum over the devices, divided by n."""

  case: str
  axis: str
  mode: str
  devices: int
  kernel_ms: tuple[float | None, float | None] = None, None
  wall_ms: tuple[float | None, float | None] = None, None
  note: str = ""


def spread(case: Case, axis: str, n: int, dtype: str, iterations: int) -> list[Line]:
  """Checks o and the gradients on n devices against one device, then times both.

  Raises:
    ValueError: they differ by more than rounding.
  """
  mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
  order = ("batch_axis", "sequence_axis", "head_axis")  # of a stream's first three axes
  spec = PartitionSpec(*("x" if axis == name else None for name in order))
  _, inputs = jax.jit(make_inputs, static_argnums=(0, 1))(case, dtype)
  one = jax.device_put(inputs, jax.devices()[0])
  several = jax.device_put(inputs, NamedSharding(mesh, spec))
  plain = partial(chunk_gated_delta_product, num_householder=case.M)
  axes: dict[str, Any] = {axis: "x"}
  over_mesh = partial(sharded_gated_delta_product, num_householder=case.M, mesh=mesh, **axes)

  def forward(operator, inputs):
    _, inputs = without_do("forward", None, inputs)
    return dict(o=operator(**inputs)[0])

  lines = []
  for mode, f in dict(forward=forward, backward=with_gradients).items():
    line = Line(case.name, axis, mode, n)
    try:
      first = jax.jit(partial(f, plain)).lower(one).compile()
      second = jax.jit(partial(f, over_mesh)).lower(several).compile()
      expected = first(one)
      actual = jax.device_put(second(several), jax.devices()[0])  # the host would take minutes
      for name, x in expected.items():
        error = float(largest_error(actual[name], x, summed=False))
        if not error <= BOUNDS[dtype][name]:
          raise ValueError(f"{name} on {n} devices differs from one by {error:.1e}")
      on_one = lambda first=first: jax.block_until_ready(first(one))
      on_all = lambda second=second: jax.block_until_ready(second(several))
      total = kernel_ms(on_all, iterations)
      line.kernel_ms = kernel_ms(on_one, iterations), total and total / n
      line.wall_ms = wall_ms(on_one, iterations), wall_ms(on_all, iterations)
    except jax.errors.JaxRuntimeError as error:
      line.note = reason(error)
    lines.append(line)
  return lines


def report_spread(lines: list[Line], cases: list[Case]) -> None:
  print("\ncase      axis           mode      devices  kernels, ms on 1, n   ratio"
        "   wall, ms on 1, n   ratio")  # fmt: skip
  for line in lines:
    numbers = ""
    for width, (one, several) in ((13, line.kernel_ms), (11, line.wall_ms)):
      if one and several:
        numbers += f"{one:>{width}.3f}{several:>9.3f}{one / several:>8.2f}"
      else:
        numbers += f"{'-':>{width}}{'-':>9}{'-':>8}"
    text = f"{line.case:10}{line.axis:15}{line.mode:10}{line.devices:<7}{numbers}  {line.note}"
    print(text.rstrip())
  for case in cases:
    print(f"{case.name}: {case}")
