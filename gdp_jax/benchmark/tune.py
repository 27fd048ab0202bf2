"""Searches, for each stage of a case, the block sizes with which its kernel is fastest."""

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from tqdm import tqdm

from gdp_jax import config, kernels
from gdp_jax.benchmark.cases import BOUNDS, Case, make_inputs, program, without_do
from gdp_jax.benchmark.measure import compile_later, kernel_ms, reason

# The stages that can be tuned, and which fields of a Config each looks at.
WARPS = ("num_warps",)
ALL = ("block_k", "block_v", "num_warps", "num_stages")
SWEEP = (*ALL, "unroll")
TUNED = {
  "chunk_local_cumsum": WARPS,
  "chunk_scaled_dot_kkt_fwd": ("block_k", "num_warps", "num_stages"),
  "solve_tril": WARPS,
  "chunk_gated_delta_product_fwd_wy_h": SWEEP,
  "chunk_gated_delta_product_fwd_o": ALL,
  "chunk_gated_delta_product_states": ALL,
  "chunk_gated_delta_product_bwd_o": ALL,
  "chunk_gated_delta_product_bwd_h": SWEEP,
  "chunk_gated_delta_product_bwd_wy": ALL,
  "fused_recurrent_gated_delta_product_fwd": ("block_v", "num_warps"),
}


def stage_calls(case: Case, dtype: str, implementation: str) -> dict[str, tuple[Callable, list]]:
  """For each stage that a pass takes, f and arrays: it is called there as f(*arrays)."""
  calls: dict[str, tuple[Callable, tuple]] = {}

  def recorder(name):
    stage = getattr(kernels, name)

    def call(*args, **kwargs):
      leaves, tree = jax.tree.flatten((args, kwargs))
      arrays = [x for x in leaves if isinstance(x, jax.Array)]
      others = [None if isinstance(x, jax.Array) else x for x in leaves]

      def f(*arrays):
        left = iter(arrays)
        args, kwargs = jax.tree.unflatten(tree, [next(left) if x is None else x for x in others])
        return stage(*args, **kwargs)

      jax.debug.callback(lambda *arrays: calls.update({name: (f, arrays)}), *arrays)
      return stage(*args, **kwargs)

    return call

  mode = "decode" if case.decode else "backward"
  args = without_do(mode, *jax.jit(make_inputs, static_argnums=(0, 1))(case, dtype))
  # What was traced before has no recorder in it, and what is traced here is for nothing else.
  jax.clear_caches()
  with mock.patch.multiple(kernels, **{name: recorder(name) for name in TUNED}):
    jax.block_until_ready(jax.jit(program(case, mode, implementation))(*args))
  jax.effects_barrier()
  jax.clear_caches()
  return {name: (f, jax.device_put(list(x), jax.devices()[0])) for name, (f, x) in calls.items()}


def candidates(stage: str, K: int, V: int, chosen: config.Config) -> list[config.Config]:
  """The chosen Config first, then what else is worth a try."""
  blocks = lambda size: [block for block in (16, 32, 64, 128) if block < 2 * max(size, 16)]
  fields = TUNED[stage]
  values = dict(
    block_k=blocks(K)[-2:],
    block_v=blocks(V),
    num_warps=(4, 8) if fields in (ALL, SWEEP) else (1, 2, 4, 8),
    num_stages=(1, 2, 3),
    unroll=(1, 2),
  )
  tried = itertools.product(*(values[field] for field in fields))
  others = [dataclasses.replace(chosen, **dict(zip(fields, x, strict=True))) for x in tried]
  return [chosen, *(other for other in others if other != chosen)]


@functools.partial(jax.jit, static_argnames="summed")
def largest_error(got, expected, summed: bool) -> jax.Array:
  """The largest relative error among several arrays, or that of their sum."""
  got, expected = ([x.astype(jnp.float32) for x in jax.tree.leaves(x)] for x in (got, expected))
  if summed:
    got, expected = [sum(got)], [sum(expected)]
  norm = lambda x: jnp.linalg.norm(x.ravel())
  errors = [norm(x - y) / norm(y) for x, y in zip(got, expected, strict=True)]
  return jnp.max(jnp.stack(errors))


def lower(f: Callable, arrays: list, cfg: config.Config) -> Any:
  """A stage's f(*arrays), lowered with this Config."""
  with mock.patch.object(config, "choose", lambda *_, **__: cfg):
    return jax.jit(lambda *arrays: f(*arrays)).lower(*arrays)


def chosen_config(f: Callable, arrays: list) -> config.Config:
  """The Config that is chosen for a stage's f(*arrays)."""
  with mock.patch.object(config, "choose", wraps=config.choose) as choose:
    jax.eval_shape(lambda *arrays: f(*arrays), *arrays)
  return config.choose(*choose.call_args.args, **choose.call_args.kwargs)


def tune(case: Case, stages: list[str], dtype: str, iterations: int) -> list[dict[str, Any]]:
  """For each stage the fastest Config whose results are those of the chosen one; prints both."""
  if kernel_ms(lambda: jnp.ones(1) + 1, 1) is None:
    sys.exit("FAILED: --tune needs kernel times, which this jaxlib cannot measure")
  pool, jobs = ThreadPoolExecutor(os.cpu_count()), []
  for stage, (f, arrays) in stage_calls(case, dtype, "pallas").items():
    if stage in stages:
      for cfg in candidates(stage, case.K, case.V, chosen_config(f, arrays)):
        future = compile_later(pool, functools.partial(lower, f, arrays, cfg))
        jobs.append((stage, cfg, arrays, future))
  # Not while times are taken: the profiler comes and goes, and expects no other thread.
  concurrent.futures.wait([future for *_, future in jobs])
  found = []
  with tqdm(total=len(jobs), unit="Config", leave=False, disable=None) as progress:
    for stage, of_stage in itertools.groupby(jobs, lambda job: job[0]):
      progress.set_description(stage)
      times: dict[config.Config, float] = {}
      skipped: dict[config.Config, str] = {}
      expected = None
      for _, cfg, arrays, future in of_stage:
        try:
          call = functools.partial(future.result(), *arrays)
          expected = call() if expected is None else expected  # the chosen Config is the first
          error = float(largest_error(call(), expected, summed=stage == "solve_tril"))
          if not error <= max(BOUNDS[dtype].values()):
            raise ValueError(f"its results differ from the chosen one's by {error:.1e}")
          times[cfg] = kernel_ms(call, iterations, "gdp_") or math.inf
        except Exception as error:
          if not times:
            raise
          skipped[cfg] = reason(error)
        progress.update()
      chosen, best = next(iter(times)), min(times, key=times.__getitem__)
      tqdm.write(f"{stage}, K={case.K}, V={case.V}, {dtype}: {len(times)} timed")
      tqdm.write(f"  chosen {times[chosen]:9.4f} ms  {chosen}")
      tqdm.write(f"  best   {times[best]:9.4f} ms  {best}")
      for cfg, why in skipped.items():
        tqdm.write(f"  {why}  {cfg}")
      found.append(
        dict(
          stage=stage,
          chosen=str(chosen),
          best=str(best),
          milliseconds={str(cfg): ms for cfg, ms in times.items()},
          skipped={str(cfg): why for cfg, why in skipped.items()},
        )
      )
  return found
