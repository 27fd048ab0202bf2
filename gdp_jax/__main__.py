"""The main job, `python -m gdp_jax`: real text through the operator, checked and timed.

Source files of Python's standard library are the documents. Their bytes become q, k, v, g and beta
by fixed random projections; the documents are packed into one row with `cu_seqlens`, and what the
chunked operator returns is compared with the recurrence.

T tokens, M Householder copies, H query/key heads, HV value heads, K and V head dims.
"""

import argparse
import dataclasses
import statistics
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import gdp_jax

H, HV, K, V = 2, 4, 64, 64
# The largest relative L2 error. In bf16 it comes from rounding, by up to 2^-8 each time, what one
# stage hands on to the next.
BOUNDS = {"float32": 1e-5, "bfloat16": 6e-3}


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of the table; the recurrence itself has no errors."""

  dtype: str
  name: str
  seconds: float
  errors: dict[str, float] = dataclasses.field(default_factory=dict)


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    prog="python -m gdp_jax",
    description="Runs the gated delta product over real text, checks it against the recurrence"
    " and times it. Fails if an error is above its bound.",
  )
  parser.add_argument("--tokens", type=int, default=8192, help="bytes to read (%(default)s)")
  parser.add_argument(
    "--num-householder", type=int, default=2, help="updates a token, M (%(default)s)"
  )
  options = parser.parse_args(argv)
  T, M = options.tokens, options.num_householder
  if T < 1 or M < 1:
    parser.error("--tokens and --num-householder must be at least 1")

  documents = read_documents(T)
  device = jax.devices()[0]
  print(f"gdp_jax {gdp_jax.__version__} on {device.platform} ({device.device_kind}), ", end="")
  print(f"jax {jax.__version__}, Python {sys.version.split()[0]}")
  print(f"{len(documents)} sequences, {T} tokens, {M=}, {H=}, {HV=}, {K=}, {V=}\n", flush=True)

  rows = measure(make_inputs(documents, M), M)

  print("dtype     implementation          error of o  of state        time   tokens/s")
  for row in rows:
    o, state = (f"{e:.1e}" for e in row.errors.values()) if row.errors else ("", "")
    print(f"{row.dtype:9} {row.name:24}{o:>10}{state:>10}", end="")
    print(f"{row.seconds * 1e3:9.2f} ms{T / row.seconds:11,.0f}")
  failures = [
    f"the error of {what} in {row.dtype}, {row.name}, is {error:.1e}, above {BOUNDS[row.dtype]:.0e}"
    for row in rows
    for what, error in row.errors.items()
    if not error <= BOUNDS[row.dtype]  # so that NaN fails too
  ]
  if failures:
    sys.exit("FAILED: " + "; ".join(failures))
  print("\nok: all within", ", ".join(f"{bound:.0e} ({dtype})" for dtype, bound in BOUNDS.items()))


def read_documents(tokens: int) -> list[np.ndarray]:
  """Bytes of the standard library's modules in alphabetical order, a quarter of `tokens` at most
  of each, until there are `tokens` of them."""
  stdlib = Path(sysconfig.get_path("stdlib"))
  documents: list[np.ndarray] = []
  left = tokens
  for path in sorted(stdlib.glob("*.py")):
    text = path.read_bytes()[: min(left, max(tokens // 4, 1))]
    if text:
      documents.append(np.frombuffer(text, np.uint8))
      left -= len(text)
    if not left:
      return documents
  sys.exit(f"FAILED: {stdlib} has {tokens - left} bytes of Python source, {tokens} were asked for")


def make_inputs(documents: list[np.ndarray], M: int) -> dict[str, jax.Array]:
  """The operator's inputs in fp32, by random projections of the bytes that are always the same."""
  rng = np.random.default_rng(0)
  width = 64
  embedding = rng.normal(size=(256, width))
  # A byte and the three before it, so that keys repeat less often than letters do.
  taps = np.array([1.0, 0.7, 0.5, 0.3])
  mix = lambda x: sum(t * np.pad(x, ((i, 0), (0, 0)))[: len(x)] for i, t in enumerate(taps))
  x = np.concatenate([mix(embedding[d]) for d in documents]) / np.linalg.norm(taps)
  T = len(x)

  def project(*shape):
    return x @ rng.normal(size=(width, np.prod(shape))) / np.sqrt(width)

  values = dict(
    q=project(H, K).reshape(1, T, H, K),
    k=project(M, H, K).reshape(1, T * M, H, K),
    v=project(M, HV, V).reshape(1, T * M, HV, V),
    # -softplus, and heads that forget at different rates.
    g=(-np.geomspace(0.1, 0.8, HV) * np.logaddexp(0, project(HV))).reshape(1, T, HV),
    beta=2 / (1 + np.exp(-project(M, HV))).reshape(1, T * M, HV),  # 2 sigmoid
  )
  inputs = {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
  return inputs | dict(cu_seqlens=jnp.asarray(np.cumsum([0, *map(len, documents)]), jnp.int32))


def measure(inputs: dict[str, jax.Array], M: int) -> list[Row]:
  """Runs the recurrence and each implementation that this device has, in every dtype."""
  static: dict[str, Any] = dict(
    num_householder=M, output_final_state=True, use_qk_l2norm_in_kernel=True
  )
  recurrence = partial(gdp_jax.recurrent_gated_delta_product, **static)
  chunk = partial(gdp_jax.chunk_gated_delta_product, **static)
  # What the default is here is read off the program that it makes.
  has_kernels = "triton" in jax.jit(chunk).lower(**inputs).as_text()
  names: dict[str | None, str] = {None: "xla (default here)"}
  if has_kernels:
    names = {None: "pallas (default here)", "xla": "xla"}

  rows = []
  total = len(BOUNDS) * (1 + len(names))
  with tqdm(total=total, unit="run", leave=False, disable=None) as progress:
    for dtype in BOUNDS:
      rounded = inputs | {name: inputs[name].astype(dtype) for name in "qkv"}
      # The oracle sees the same values, but computes and returns fp32.
      exact = rounded | {name: rounded[name].astype(jnp.float32) for name in "qkv"}
      progress.set_description(f"{dtype}, recurrence")
      expected, seconds = run(recurrence, exact)
      progress.update()
      if dtype == "float32":
        rows.append(Row(dtype, "recurrence (lax.scan)", seconds))
      for implementation, name in names.items():
        progress.set_description(f"{dtype}, {name}")
        got, seconds = run(partial(chunk, implementation=implementation), rounded)
        progress.update()
        errors = {"o": relative_error(got[0], expected[0]),
                  "final_state": relative_error(got[1], expected[1])}  # fmt: skip
        rows.append(Row(dtype, name, seconds, errors))
  return rows


def run(f, inputs):
  """The result of f(**inputs), compiled, and the seconds that it takes: the median of 5 calls."""
  f = jax.jit(f).lower(**inputs).compile()
  result = jax.block_until_ready(f(**inputs))
  times = []
  for _ in range(5):
    start = time.perf_counter()
    jax.block_until_ready(f(**inputs))
    times.append(time.perf_counter() - start)
  return result, statistics.median(times)


def relative_error(got: jax.Array, expected: jax.Array) -> float:
  """||got - expected|| / ||expected||."""
  x, y = np.asarray(got, np.float64), np.asarray(expected, np.float64)
  return float(np.linalg.norm(x - y) / np.linalg.norm(y))


if __name__ == "__main__":
  main()
