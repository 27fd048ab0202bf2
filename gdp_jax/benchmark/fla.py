"""flash-linear-attention, in processes of its own.

This keeps its memory, its profiler and its crashes apart from JAX's.
"""

import concurrent.futures
import dataclasses
import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest import mock

from gdp_jax.benchmark.cases import Case
from gdp_jax.benchmark.measure import Result, median_call, wall_ms


def fla_call(case: Case, mode: str, dtype: str, result: Result) -> Callable[[], Any]:
  """flash-linear-attention's operator on a case's sizes, as a function of nothing."""
  torch: Any = importlib.import_module("torch")
  B, T, H, HV, K, V, M = (getattr(case, x) for x in ("B", "T", "H", "HV", "K", "V", "M"))
  if M == 1:
    operator = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
  else:
    module = importlib.import_module("fla.ops.gated_delta_product")
    operator = functools.partial(module.chunk_gated_delta_product, num_householder=M)
    if HV != H:
      H, result.note = HV, "q and k repeated beforehand: it takes H = HV only"
  torch.manual_seed(0)
  normal = functools.partial(torch.randn, device="cuda", dtype=getattr(torch, dtype))
  inputs = dict(
    q=normal(B, T, H, K),
    k=torch.nn.functional.normalize(normal(B, T * M, H, K), dim=-1),
    v=normal(B, T * M, HV, V),
    g=-0.1 * normal(B, T, HV).float().abs(),
    beta=2 * normal(B, T * M, HV).float().sigmoid(),
  )
  cu_seqlens = case.cu_seqlens and torch.tensor(case.cu_seqlens, device="cuda")

  def forward():
    return operator(**inputs, cu_seqlens=cu_seqlens)[0]

  if mode == "forward":
    return torch.no_grad()(forward)
  for x in inputs.values():
    x.requires_grad_()
  do = normal(B, T, HV, V)

  def backward():
    o = forward()
    return o, torch.autograd.grad(o, list(inputs.values()), do)

  try:
    backward()
  except RuntimeError as error:
    if "incorrect results" not in str(error):
      raise
  else:
    return backward
  # Of this GPU with this Triton it knows that its kernel is wrong, and refuses.
  result.note = "timing only: by its own word its gradients are wrong here"
  guard = importlib.import_module("fla.ops.common.chunk_o")
  return mock.patch.object(guard, "TRITON_ABOVE_3_7_1", True)(backward)


def fla_compile(case: Case, modes: list[str], dtype: str, threads: int) -> None:
  """Leaves on disk, compiled, all that Triton's autotuner will try for a case.

  The autotuner compiles one by one, which takes minutes. Here it does so in threads, and times
  nothing: the GPU is not its own.
  """
  os.environ["FLA_CACHE_RESULTS"] = "0"  # of the autotuner: these are no times
  triton: Any = importlib.import_module("triton")
  tuner, pool = triton.runtime.autotuner.Autotuner, ThreadPoolExecutor(threads)
  run = tuner.run

  def compile_all(self, *args, **kwargs):
    with suppress(Exception), triton.AsyncCompileMode(pool, ignore_errors=True):
      self.warmup(*args, **{name: x for name, x in kwargs.items() if name != "warmup"})
    return run(self, *args, **kwargs)

  def once(call, **_):
    call()
    return [0.0, 0.0, 0.0]

  with mock.patch.multiple(tuner, run=compile_all, do_bench=staticmethod(once)):
    for mode in case.modes(modes):
      fla_call(case, mode, dtype, Result(case.name, mode, "fla"))()


def fla_measure(case: Case, mode: str, dtype: str, iterations: int) -> Result:
  """What `measure` does for JAX."""
  os.environ["FLA_CACHE_RESULTS"] = "0"
  torch: Any = importlib.import_module("torch")
  triton: Any = importlib.import_module("triton")
  # The autotuner takes a tenth of its usual time for each of some hundred configurations.
  quick = staticmethod(functools.partial(triton.testing.do_bench, warmup=2.5, rep=10))
  result = Result(case.name, mode, "fla")
  with mock.patch.object(triton.runtime.autotuner.Autotuner, "do_bench", quick):
    operator = fla_call(case, mode, dtype, result)
    operator()

  def call():
    results = operator()
    torch.cuda.synchronize()
    return results

  call()
  torch.cuda.reset_peak_memory_stats()
  call()
  result.memory_mb = torch.cuda.max_memory_allocated() / 1e6
  result.wall_ms = wall_ms(call, iterations)
  with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
    for _ in range(iterations):
      call()
  # Copies and fills of memory are no kernels; JAX's are not counted either.
  events = [x for x in profile.events() if "CUDA" in str(x.device_type) and x.name[:3] != "Mem"]
  events.sort(key=lambda event: event.time_range.start)
  result.kernel_ms = median_call([x.time_range.elapsed_us() / 1e3 for x in events], iterations)
  return result


class Fla:
  """Its processes: several that compile, beside this one, then one that measures, alone."""

  def __init__(self, cases: list[Case], modes: Iterable[str], dtype: str):
    # What is compiled hardly depends on B and T.
    short = [case.short() for case in cases if not case.decode]
    alike = {dataclasses.replace(case, name="", B=1): case for case in short}.values()
    cpus, self.spawn = os.cpu_count() or 1, multiprocessing.get_context("spawn")
    self.compiling = ProcessPoolExecutor(min(cpus, len(alike)), self.spawn)
    args = list(modes), dtype, max(1, cpus // len(alike))
    self.futures = [self.compiling.submit(fla_compile, case, *args) for case in alike]
    self.measuring = ProcessPoolExecutor(1, self.spawn)
    self.measuring.submit(importlib.import_module, "fla.ops.gated_delta_product")

  def wait(self) -> None:
    """Until all is compiled. What fails here fails again, and is reported, in `measure`."""
    concurrent.futures.wait(self.futures)
    self.compiling.shutdown()

  def measure(self, *args) -> Result:
    try:
      return self.measuring.submit(fla_measure, *args).result()
    except Exception:  # after which its process may be dead, or its GPU context
      self.measuring.shutdown(wait=False)
      self.measuring = ProcessPoolExecutor(1, self.spawn)
      raise

  def close(self) -> None:
    for executor in (self.compiling, self.measuring):
      executor.shutdown(wait=False, cancel_futures=True)
