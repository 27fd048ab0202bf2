"""The command line, what runs in which order, and the table."""

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

import gdp_jax
from gdp_jax.benchmark.cases import BOUNDS, CASES, DECODE_TABLE, MODES, Case
from gdp_jax.benchmark.fla import Fla
from gdp_jax.benchmark.measure import (
  Programs,
  Result,
  check,
  copy_bandwidth,
  has_cuda,
  measure,
  reason,
)
from gdp_jax.benchmark.several import CASE_OF_AXIS, report_spread, spread
from gdp_jax.benchmark.tune import TUNED, tune


def installed(package: str) -> bool:
  return importlib.util.find_spec(package) is not None


def run(cases: list[Case], options: argparse.Namespace) -> dict[str, Any]:
  """Checks, then times: relative errors, the bandwidth of a copy, and a list of Result.

  Raises:
    SystemExit: a result is wrong.
  """
  cuda, fla = has_cuda(), None
  implementations = ["pallas", "xla"] if cuda and options.peers else ["pallas" if cuda else "xla"]
  ours = implementations[0]
  if options.scan or (options.peers and not cuda):
    implementations.append("recurrence")
  jobs = [(c, m, i) for c in cases for m in c.modes(options.only) for i in implementations]
  # The last mode of a case checks the others: a backward pass also returns o.
  checks = {(case, i): mode for case, mode, i in jobs if i != "recurrence"}
  fla_jobs = [(c, m, "fla") for c in cases for m in c.modes(options.only) if m != "decode"]
  takes_it = options.dtype == "bfloat16" and installed("torch") and installed("fla")
  if options.peers and cuda and fla_jobs and takes_it:
    fla = Fla(cases, options.only, options.dtype)
    jobs += fla_jobs
  pool = ThreadPoolExecutor(os.cpu_count())
  programs = Programs(pool, options.dtype)
  progress = tqdm(total=len(checks) + len(jobs), unit="step", leave=False, disable=None)
  try:
    progress.set_description("trace")
    for (case, implementation), mode in checks.items():
      programs.add(case.short(), mode, implementation)
      programs.add(case.short(), mode, "recurrence")
    for case, mode, implementation in jobs:
      if implementation != "fla":
        programs.add(case, mode, implementation)

    errors: dict[str, dict[str, float]] = {}
    failures: dict[tuple[Case, str], str] = {}
    for (case, implementation), mode in checks.items():
      progress.set_description(f"check {case.name} {implementation}")
      try:
        found = check(programs, case.short(), mode, implementation)
        errors[f"{case.name}, {implementation}"] = found
      except Exception as error:
        if implementation == ours:
          raise
        failures[case, implementation] = reason(error)
      progress.update()
    wrong = [
      f"the error of {name} in {options.dtype}, case {what}, is {error:.1e}, above {bound:.0e}"
      for what, found in errors.items()
      for name, error in found.items()
      if not error <= (bound := BOUNDS[options.dtype][name])  # so that NaN fails too
    ]
    if wrong:
      sys.exit("FAILED, so nothing is timed: " + "; ".join(wrong))

    progress.set_description("compile")
    concurrent.futures.wait(programs.futures.values())
    if fla:
      fla.wait()
    copy, results = copy_bandwidth(options.iterations), []
    for case, mode, implementation in jobs:
      progress.set_description(f"time {case.name} {mode} {implementation}")
      result = Result(case.name, mode, implementation)
      result.note = failures.get((case, implementation), "")
      try:
        if fla and implementation == "fla":
          result = fla.measure(case, mode, options.dtype, options.iterations)
        elif not result.note:
          measure(result, *programs.get(case, mode, implementation), options.iterations, copy)
      except Exception as error:
        result.note = reason(error)
      results.append(result)
      progress.update()
  finally:
    progress.close()
    pool.shutdown(wait=False, cancel_futures=True)
    if fla:
      fla.close()
  order = [(case.name, mode) for case, mode, _ in jobs]
  results.sort(key=lambda result: order.index((result.case, result.mode)))
  return dict(ours=ours, errors=errors, copy_bytes_per_s=copy, results=results)


def describe() -> dict[str, Any]:
  """The machine, the versions of what matters, and the commit if the source is a checkout."""
  source, device = Path(__file__).resolve().parents[2], jax.devices()[0]

  def output(command):
    with suppress(OSError):
      done = subprocess.run(command.split(), capture_output=True, text=True, cwd=source)
      return done.stdout.strip() or None

  def version(package):
    with suppress(importlib.metadata.PackageNotFoundError):
      return importlib.metadata.version(package)

  driver = "nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader"
  commit = "git describe --always --abbrev=40 --exclude=* --dirty"
  versions = {package: version(package) for package in ("jax", "jaxlib", "torch", "triton")}
  versions |= dict(fla=version("flash-linear-attention") or version("fla-core"))
  return dict(
    machine=dict(device=device.device_kind, driver=output(driver) if has_cuda() else None),
    versions=dict(gdp_jax=gdp_jax.__version__, python=sys.version.split()[0]) | versions,
    commit=output(commit) if (source / ".git").exists() else None,
  )


def report(found: dict[str, Any], cases: list[Case], dtype: str) -> None:
  """Prints the largest errors and the table."""
  all_errors = [error for errors in found["errors"].values() for error in errors.items()]
  for name in dict(all_errors):
    largest = max(error for of, error in all_errors if of == name)
    print(f"largest error of {name:6}{largest:.1e}, of {BOUNDS[dtype][name]:.0e} allowed")
  copy = found["copy_bytes_per_s"]
  print(f"a copy: {copy / 1e12:.2f} TB/s" if copy else "kernel times are not available here")
  print("\nmode      implementation  kernels, ms   wall, ms  memory, MB  of copy")
  sizes = {case.name: case for case in cases}
  for name, results in itertools.groupby(found["results"], lambda result: result.case):
    print(f"{name}: {sizes[name]}")
    for r in results:
      numbers = (r.kernel_ms, ".3f"), (r.wall_ms, ".3f"), (r.memory_mb, ".0f"), (r.of_copy, ".1%")
      kernel, wall, memory, of_copy = ("-" if x is None else format(x, form) for x, form in numbers)
      line = f"{r.mode:10}{r.implementation:14}{kernel:>13}{wall:>11}{memory:>12}{of_copy:>9}"
      print(f"{line}  {r.note}".rstrip())


def parse(argv: list[str] | None) -> tuple[list[Case], argparse.Namespace]:
  """The cases, and the other options."""
  parser = argparse.ArgumentParser(
    prog="python -m gdp_jax.benchmark",
    description="Compares the operators with the recurrence, then times them. Fails, and prints no"
    " times, if a result is wrong. On a CPU the cases are shrunk.",
  )
  add, words = parser.add_argument, lambda text: [word for word in text.split(",") if word]
  add("--cases", type=words, metavar="A,B", help="names of cases (all but the decode table's)")
  add("--decode-table", action="store_true", help="and decode of 1 to 512 requests, M = 1, 2, 3")
  add("--only", type=words, metavar="A,B", default=MODES, help=", ".join(MODES) + " (all)")
  add("--dtype", choices=list(BOUNDS), default="bfloat16", help="of q, k and v (%(default)s)")
  add("--iterations", type=int, default=10, help="each time is the median of them (%(default)s)")
  add("--json", type=Path, metavar="FILE", help="file for all the numbers")
  add("--peers", action=argparse.BooleanOptionalAction, default=True,
      help="also time the XLA implementation, and flash-linear-attention if installed")  # fmt: skip
  add("--scan", action="store_true", help="also time the recurrence, which is slow")
  add("--tiny", action="store_true", help="shrink the cases on a GPU too")
  add("--list", action="store_true", help="print the cases, and end")
  add("--devices", type=int, metavar="N", help="time N devices against one, and nothing else")
  add("--tune", metavar="CASE", help="search the best Configs for a case or for B,T,H,HV,K,V,M")
  add("--stages", type=words, metavar="A,B", default=TUNED, help="what to tune (all stages)")
  options = parser.parse_args(argv)

  known = CASES | DECODE_TABLE
  given = [*(options.cases or CASES), *(DECODE_TABLE if options.decode_table else ())]
  for what, names, allowed in (
    ("case", given, known), ("mode", options.only, MODES), ("stage", options.stages, TUNED),
  ):  # fmt: skip
    for name in names:
      if name not in allowed:
        parser.error(f"no {what} is called {name!r}, but {', '.join(allowed)}")
  if options.iterations < 1:
    parser.error(f"--iterations must be at least 1, got {options.iterations}")
  if options.json and not options.json.parent.is_dir():
    parser.error(f"--json: there is no folder {options.json.parent}")
  if options.devices is not None:
    if not 2 <= options.devices <= jax.device_count():
      parser.error(f"--devices must be 2 to {jax.device_count()}, got {options.devices}")
    return [CASES[name] for name in CASE_OF_AXIS.values()], options
  if not options.tune:
    cases = [known[name] for name in dict.fromkeys(given) if known[name].modes(options.only)]
    return cases or parser.error("none of these cases has any of these modes"), options

  if not has_cuda():
    parser.error(f"--tune needs a CUDA GPU, but JAX runs on {jax.default_backend()}")
  if options.tune in known:
    case = known[options.tune]
  else:
    try:
      B, T, H, HV, K, V, M = map(int, options.tune.split(","))
      case = Case("tuned", B, T, H, HV, K, V, M)
    except ValueError:
      parser.error(f"--tune takes one of {', '.join(known)} or B,T,H,HV,K,V,M, got {options.tune}")
    if min(B, T, H, HV, K, V, M) < 1 or HV % H:
      parser.error(f"--tune: sizes must be at least 1 and HV a multiple of H, got {case}")
  if case.cu_seqlens or (case.T % 64 and not case.decode):
    # The last states of a partial chunk are not written, and could not be compared.
    parser.error(f"--tune takes whole chunks of 64 tokens, not packed, got {case}")
  return [case], options


def main(argv: list[str] | None = None) -> None:
  # PyTorch's processes share the GPU's memory with this one.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  cases, options = parse(argv)
  if options.list:
    for case in (CASES | DECODE_TABLE).values():
      print(f"{case.name:16}{case}")
    return
  about = describe()
  versions = [f"{name} {version}" for name, version in about["versions"].items() if version]
  print(about["machine"]["device"], options.dtype, *versions, sep=", ")
  if options.tiny or not has_cuda():
    cases = [case.tiny() for case in cases]
    print("the cases are shrunk: on a GPU, and at full size, all is different")
  elif options.peers and not options.devices and not installed("fla"):
    print("flash-linear-attention is not installed")
  about |= dict(dtype=options.dtype, cases={case.name: dataclasses.asdict(case) for case in cases})
  if options.devices:
    lines = []
    axes = tqdm(CASE_OF_AXIS, unit="axis", leave=False, disable=None)
    for case, axis in zip(cases, axes, strict=True):
      axes.set_description(axis)
      lines += spread(case, axis, options.devices, options.dtype, options.iterations)
    report_spread(lines, cases)
    about |= dict(devices=[dataclasses.asdict(line) for line in lines])
  elif options.tune:
    about |= dict(tuned=tune(cases[0], options.stages, options.dtype, options.iterations))
  else:
    found = run(cases, options)
    report(found, cases, options.dtype)
    about |= found | dict(results=[dataclasses.asdict(result) for result in found["results"]])
  if options.json:
    options.json.write_text(json.dumps(about, indent=2) + "\n")
  for result in about.get("results", []):
    if result["implementation"] == about["ours"] and result["wall_ms"] is None:
      sys.exit(f"FAILED: {result['case']} {result['mode']} could not be timed")


if __name__ == "__main__":
  main()
