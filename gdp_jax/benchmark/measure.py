"""Compiles programs, compares them with the recurrence, and measures time and memory."""

import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from gdp_jax.__main__ import relative_error
from gdp_jax.benchmark.cases import Case, make_inputs, program, without_do


@dataclasses.dataclass
class Result:
  """A line of the table. What could not be measured is None; `note` says why, or what to know."""

  case: str
  mode: str
  implementation: str
  kernel_ms: float | None = None
  wall_ms: float | None = None
  memory_mb: float | None = None
  of_copy: float | None = None
  note: str = ""


def compile_later(pool: ThreadPoolExecutor, lower: Callable[[], Any]) -> Future:
  """lower().compile(), the compilation in a thread. The future raises what fails in either."""
  try:
    return pool.submit(lower().compile)
  except Exception as error:
    future: Future = Future()
    future.set_exception(error)
    return future


class Programs:
  """The programs of cases, compiled in threads."""

  def __init__(self, pool: ThreadPoolExecutor, dtype: str):
    self.pool, self.dtype = pool, dtype
    self.futures: dict[tuple, Future] = {}

  def add(self, case: Case, mode: str, implementation: str) -> None:
    """Begins to compile a program and the one that makes its inputs; `get` raises what fails."""
    case = dataclasses.replace(case, name="")  # two cases of the same sizes are one program
    make = functools.partial(make_inputs, case, self.dtype)
    self._submit((case,), make)
    args = without_do(mode, *jax.eval_shape(make))
    self._submit((case, mode, implementation), program(case, mode, implementation), *args)

  def get(self, case: Case, mode: str, implementation: str) -> tuple[Any, tuple]:
    """The compiled program, and new arguments for it, of which the first is donated."""
    case = dataclasses.replace(case, name="")
    compiled = self.futures[case, mode, implementation].result()
    return compiled, without_do(mode, *self.futures[case,].result()())

  def _submit(self, key, f, *args):
    if key not in self.futures:
      jitted = jax.jit(f, donate_argnums=(0,) if args else ())
      self.futures[key] = compile_later(self.pool, lambda: jitted.lower(*args))


def check(programs: Programs, case: Case, mode: str, implementation: str) -> dict[str, float]:
  """Relative errors of a program's results against the recurrence, by name."""
  results = []
  for each in (implementation, "recurrence"):
    compiled, args = programs.get(case, mode, each)
    result, state = compiled(*args)
    results.append(result if state is None else result | dict(state=state))
  return {name: relative_error(results[0][name], x) for name, x in results[1].items()}


def has_cuda() -> bool:
  on_gpu = jax.default_backend() == "gpu"
  return on_gpu and "cuda" in jax.devices()[0].client.platform_version.lower()


def kernel_ms(call: Callable[[], Any], iterations: int, named: str = "") -> float | None:
  """Milliseconds that the kernels of one call take together, the median of `iterations` calls.

  Only kernels with `named` in their names count. None where this cannot be measured.
  """
  if not has_cuda():
    return None
  try:
    profiler = importlib.import_module("jax.experimental.mosaic.gpu.profiler")
    ext = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    start, stop = ext._cupti_init, ext._cupti_get_timings
  except (ImportError, AttributeError):
    return None
  jax.block_until_ready(call())  # what happens only once
  start()
  try:
    for _ in range(iterations):
      jax.block_until_ready(call())
  finally:
    timings = stop(True)
  return median_call([ms for name, ms in timings if named in name], iterations)


def median_call(times: list[float], iterations: int) -> float | None:
  """The median over calls of what the kernels of each took, from their times in order."""
  if len(times) % iterations:  # not the same kernels in each call
    return sum(times) / iterations
  kernels = len(times) // iterations
  return statistics.median(sum(times[i * kernels :][:kernels]) for i in range(iterations)) or None


def measure(result: Result, compiled, args: tuple, iterations: int, copy: float | None) -> None:
  """Fills in the numbers of a compiled program; `copy` is the bandwidth of a copy in bytes/s."""
  state, inputs = args

  def call():
    nonlocal state  # donated, and returned in its place
    results, state = compiled(state, inputs)
    return jax.block_until_ready(results)

  # Inputs read once, outputs written once.
  moved = sum(x.nbytes for x in jax.tree.leaves((state, inputs)))
  moved += sum(x.nbytes for x in jax.tree.leaves((call(), state)))
  result.kernel_ms = kernel_ms(call, iterations)
  result.wall_ms = wall_ms(call, iterations)
  memory = compiled.memory_analysis()
  if memory is not None:
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
    result.memory_mb = (peak + memory.temp_size_in_bytes - memory.alias_size_in_bytes) / 1e6
  if result.kernel_ms and copy:
    result.of_copy = moved / (result.kernel_ms / 1e3) / copy


def wall_ms(call: Callable[[], Any], iterations: int) -> float:
  """Milliseconds of a call that waits for its results, the median of `iterations` calls."""
  times = []
  for _ in range(iterations):
    start = time.perf_counter()
    call()
    times.append(time.perf_counter() - start)
  return statistics.median(times) * 1e3


def copy_bandwidth(iterations: int) -> float | None:
  """Bytes per second of x * 1.5 on 1 GiB, read and written; None without kernel times."""
  if not has_cuda():
    return None
  x = jnp.ones(2**28, jnp.float32)
  compiled = jax.jit(lambda x: x * 1.5).lower(x).compile()
  ms = kernel_ms(lambda: compiled(x), iterations)
  return 2 * x.nbytes / (ms / 1e3) if ms else None


def reason(error: BaseException) -> str:
  """An error in one line."""
  lines = str(error).strip().splitlines()
  return f"failed: {type(error).__name__}: {lines[0] if lines else ''}"[:160]
