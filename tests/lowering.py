"""Lowering for CUDA on a machine that has none: it finds much that interpret mode lets pass."""

import contextlib

import jax
from jax._src.mesh import AbstractDevice  # not public yet
from jax.sharding import AbstractMesh, use_abstract_mesh


@contextlib.contextmanager
def cuda_target():
  """Tells code that is lowered in here, for CUDA, that it is for an H200."""
  device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
  with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
    yield


def lower_for_cuda(f, *args, **kwargs) -> str:
  """The StableHLO text of `f`, jitted and lowered for CUDA; the arguments may be abstract."""
  with cuda_target():
    return jax.jit(f).trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).as_text()


def count_kernels(text: str) -> int:
  """Triton kernels in a lowered module's text."""
  return text.count("custom_call @__gpu$xla.gpu.triton")
