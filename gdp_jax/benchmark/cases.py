"""The named cases, their inputs, and the program of an implementation or of the recurrence.

B batch, T tokens, M Householder copies, H query/key heads, HV value heads, K and V head dims.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

import gdp_jax

MODES = ("forward", "backward", "decode")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta")
# The largest relative L2 errors against the recurrence in fp32. A decoded state is fp32 always.
BOUNDS = {
  "bfloat16": dict(o=6e-3, state=1e-5) | dict.fromkeys(GRADIENTS, 1e-2) | dict(dg=2e-2, dbeta=2e-2),
  "float32": dict(o=1e-5, state=1e-5) | dict.fromkeys(GRADIENTS, 1e-4),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """Sizes to time, with gates. `cu_seqlens` are the offsets of packed sequences.

  With `decode` these are B requests of one token each, over a pool of as many states.
  `num_segments` is for implementations that know it.
  """

  name: str
  B: int
  T: int
  H: int
  HV: int
  K: int
  V: int
  M: int
  cu_seqlens: tuple[int, ...] | None = None
  decode: bool = False
  num_segments: int = 1

  def short(self, T: int = 512) -> "Case":
    """The same with at most T tokens, for what takes them one by one."""
    if self.T <= T:
      return self
    cu_seqlens = self.cu_seqlens and tuple(t * T // self.T for t in self.cu_seqlens)
    return dataclasses.replace(self, T=T, cu_seqlens=cu_seqlens)

  def tiny(self) -> "Case":
    """The same in proportion, for a CPU."""
    B, H = min(self.B, 4), max(1, self.H // 8)
    HV, K, V = H * (self.HV // self.H), self.K // 8, self.V // 8
    return dataclasses.replace(self.short(128), B=B, H=H, HV=HV, K=K, V=V)

  def modes(self, modes: Iterable[str]) -> list[str]:
    """Those of the modes that this case has."""
    return [mode for mode in modes if (mode == "decode") == self.decode]

  def __str__(self):
    sizes = " ".join(f"{x}{getattr(self, x)}" for x in ("B", "T", "H", "HV", "K", "V", "M"))
    if self.num_segments > 1:
      sizes += f" in {self.num_segments} segments"
    return f"{sizes} packed {list(self.cu_seqlens)}" if self.cu_seqlens else sizes


CASES = {
  case.name: case
  for case in (
    Case("main", 1, 8192, 16, 16, 128, 128, 2),
    Case("batch", 4, 4096, 16, 16, 128, 128, 2),
    Case("long", 1, 65536, 16, 16, 128, 128, 2),
    Case("packed", 1, 8192, 16, 16, 128, 128, 2, (0, 100, 1000, 3000, 5000, 8192)),
    Case("m3", 4, 4096, 16, 16, 128, 128, 3),
    Case("m1", 1, 8192, 16, 16, 128, 128, 1),
    Case("few_heads", 1, 8192, 4, 4, 128, 128, 2),
    Case("segments", 1, 8192, 4, 4, 128, 128, 2, num_segments=8),
    Case("k64", 4, 4096, 16, 16, 64, 64, 2),
    Case("wide", 2, 4096, 6, 6, 256, 512, 2),
    Case("gva", 1, 8192, 4, 16, 128, 128, 2),
    Case("decode", 128, 1, 32, 32, 128, 128, 2, decode=True),
  )
}
DECODE_TABLE = {
  (name := f"decode_{requests}_m{M}"): Case(name, requests, 1, 32, 32, 128, 128, M, decode=True)
  for M in (1, 2, 3)
  for requests in (1, 8, 32, 128, 512)
}


def make_inputs(case: Case, dtype: str) -> tuple[jax.Array | None, dict[str, jax.Array]]:
  """The pool of states, or None, and the other arguments by name; `do` is o's cotangent."""
  B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
  R = T * case.M
  keys = iter(jax.random.split(jax.random.key(0), 8))
  normal = lambda *shape: jax.random.normal(next(keys), shape)
  k = normal(B, R, H, K)
  inputs = dict(
    q=normal(B, T, H, K).astype(dtype),
    k=(k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(dtype),
    v=normal(B, R, HV, V).astype(dtype),
    g=-0.1 * jnp.abs(normal(B, T, HV)),
    beta=2 * jax.nn.sigmoid(normal(B, R, HV)),
  )
  if case.decode:
    slots = jax.random.permutation(next(keys), jnp.arange(B, dtype=jnp.int32))
    return normal(B, HV, K, V), inputs | dict(state_indices=slots)
  inputs["do"] = normal(B, T, HV, V).astype(dtype)
  if case.cu_seqlens is not None:
    inputs["cu_seqlens"] = jnp.asarray(case.cu_seqlens, jnp.int32)
  return None, inputs


def program(case: Case, mode: str, implementation: str) -> Callable:
  """f(state, inputs) -> (results by name, state), by an implementation or the recurrence."""
  options: dict[str, Any] = dict(num_householder=case.M, implementation=implementation)
  chunked = functools.partial(
    gdp_jax.chunk_gated_delta_product, **options, num_segments=case.num_segments
  )
  widen = lambda inputs: dict(inputs)
  if implementation == "recurrence":  # it sees the same values, but computes and returns fp32
    chunked = functools.partial(gdp_jax.recurrent_gated_delta_product, num_householder=case.M)
    widen = lambda inputs: {
      name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in inputs.items()
    }

  def forward(state, inputs):
    return dict(o=chunked(**widen(inputs))[0]), state

  def backward(state, inputs):
    return with_gradients(chunked, widen(inputs)), state

  def decode(state, inputs):
    if implementation == "recurrence":
      inputs = widen(inputs)
      slots = inputs.pop("state_indices")
      o, last = chunked(**inputs, initial_state=state[slots], output_final_state=True)
      return dict(o=o), state.at[slots].set(last)
    o, state = gdp_jax.fused_recurrent_gated_delta_product(**inputs, **options, state=state)
    return dict(o=o), state

  return dict(forward=forward, backward=backward, decode=decode)[mode]


def with_gradients(operator: Callable, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """o and the gradients of a chunked operator, by name, for o's cotangent `do`."""
  inputs = dict(inputs)
  do, cu_seqlens = inputs.pop("do"), inputs.pop("cu_seqlens", None)
  o, vjp = jax.vjp(lambda x: operator(**x, cu_seqlens=cu_seqlens)[0], inputs)
  (gradients,) = vjp(do)
  return dict(o=o) | {f"d{name}": gradient for name, gradient in gradients.items()}


def without_do(mode, state, inputs):
  """A program's arguments: `do` is for a backward pass only."""
  return state, {name: x for name, x in inputs.items() if name != "do" or mode == "backward"}
