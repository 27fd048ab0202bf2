"""The benchmark: its cases are right, a wrong result is never timed, its numbers are all there."""

import dataclasses
import json
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close

import gdp_jax
from gdp_jax.benchmark import __main__ as command
from gdp_jax.benchmark import measure, tune
from gdp_jax.benchmark.cases import (
  BOUNDS,
  CASES,
  DECODE_TABLE,
  Case,
  make_inputs,
  program,
  without_do,
)
from gdp_jax.config import Config

ONCE = ["--iterations", "1"]
DECODE = ["--cases", "decode", *ONCE]
NUMBERS = ("kernel_ms", "wall_ms", "memory_mb", "of_copy")
COMPILED = {}


def compile_once(lowered):
  key = lowered.as_text(), lowered.in_tree, lowered.out_tree
  if key not in COMPILED:
    COMPILED[key] = lowered.compile()
  return COMPILED[key]


@pytest.fixture(autouse=True)
def quick_compilation(monkeypatch):
  """Compiling is what takes time: on a CPU nothing is optimised, and no program compiled twice."""
  later = measure.compile_later
  once = lambda lower: SimpleNamespace(compile=partial(compile_once, lower()))
  monkeypatch.setattr(measure, "compile_later", lambda pool, f: later(pool, lambda: once(f)))
  jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("name", CASES)
def test_shapes(name):
  case = CASES[name]
  (mode,) = case.modes(("forward", "decode"))
  args = without_do(mode, *jax.eval_shape(partial(make_inputs, case, "bfloat16")))
  implementations = ("xla", "recurrence")
  got, expected = (jax.eval_shape(program(case, mode, i), *args) for i in implementations)
  shapes = lambda results: jax.tree.map(jnp.shape, results)
  assert shapes(got) == shapes(expected)
  assert got[0]["o"].shape == (case.B, case.T, case.HV, case.V)
  assert got[0]["o"].dtype == jnp.bfloat16 and expected[0]["o"].dtype == jnp.float32


def test_values():
  # All in which a case can differ from main and decode, which test_numbers has.
  case = dataclasses.replace(CASES["packed"].tiny(), H=1, HV=3, V=24, M=3)
  with ThreadPoolExecutor() as pool:
    programs = measure.Programs(pool, "bfloat16")
    for implementation in ("xla", "recurrence"):
      programs.add(case, "forward", implementation)
  errors = measure.check(programs, case, "forward", "xla")
  assert errors.keys() == {"o"} and errors["o"] < BOUNDS["bfloat16"]["o"]


def test_shrinking_keeps_what_matters():
  for case in (CASES | DECODE_TABLE).values():
    for small in (case.short(), case.tiny()):
      assert small.T <= 512 and small.HV // small.H == case.HV // case.H
      assert (small.M, small.decode) == (case.M, case.decode)
      if case.cu_seqlens:
        lengths = np.diff(small.cu_seqlens)
        assert len(lengths) == 5 and lengths.min() > 0 and lengths.sum() == small.T
    assert case.short(case.T) is case


def test_numbers(tmp_path, capsys):
  path = tmp_path / "numbers.json"
  command.main(["--cases", "main,decode", "--json", str(path), *ONCE])
  table = capsys.readouterr().out
  assert "the cases are shrunk" in table and "kernel times are not available" in table
  found = json.loads(path.read_text())
  assert found["versions"]["jax"] == jax.__version__ and found["machine"]["device"]
  assert found["commit"] is None or len(found["commit"].removesuffix("-dirty")) == 40
  assert found["cases"]["main"] == dataclasses.asdict(CASES["main"].tiny())
  assert found["errors"]["main, xla"].keys() == {"o", "dq", "dk", "dv", "dg", "dbeta"}
  assert found["errors"]["decode, xla"].keys() == {"o", "state"}
  rows = [(r["case"], r["mode"], r["implementation"]) for r in found["results"]]
  modes = [("main", "forward"), ("main", "backward"), ("decode", "decode")]
  assert rows == [(*mode, i) for mode in modes for i in ("xla", "recurrence")]
  for row in found["results"]:
    assert all(row[name] > 0 for name in ("wall_ms", "memory_mb")) and not row["note"]
    assert row["kernel_ms"] is row["of_copy"] is None
    assert f"{row['wall_ms']:.3f}" in table


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_wrong_result_is_not_timed(error, monkeypatch, capsys):
  operator = gdp_jax.fused_recurrent_gated_delta_product

  def wrong(*args, **kwargs):
    o, state = operator(*args, **kwargs)
    return o + jnp.asarray(error, o.dtype), state

  monkeypatch.setattr(gdp_jax, "fused_recurrent_gated_delta_product", wrong)
  monkeypatch.setattr(command, "measure", None)  # calling it would be an error
  with pytest.raises(SystemExit, match="^FAILED, so nothing is timed: the error of o in bfloat16,"
                     " case decode, xla, is .*, above 6e-03$"):  # fmt: skip
    command.main(DECODE)
  assert "wall" not in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["recurrence", "xla"])
def test_failed_measurement(broken, monkeypatch, capsys):

  def fail(result, *args):
    if result.implementation == broken:
      raise RuntimeError("out of something\nand more")
    measure.measure(result, *args)

  monkeypatch.setattr(command, "measure", fail)
  if broken == "xla":  # what the benchmark is about
    with pytest.raises(SystemExit, match="^FAILED: decode decode could not be timed$"):
      command.main(DECODE)
  else:
    command.main(DECODE)
  table = capsys.readouterr().out
  assert table.count("failed: RuntimeError: out of something\n") == 1
  assert "recurrence" in table and "xla" in table


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (["--cases", "main,mian"], "no case is called 'mian', but main, batch, .*, decode_512_m3"),
    (["--only", "training"], "no mode is called 'training', but forward, backward, decode"),
    (["--stages", "wy"], "no stage is called 'wy', but chunk_local_cumsum, "),
    (["--cases", "decode", "--only", "forward"], "none of these cases has any of these modes"),
    (["--iterations", "0"], "--iterations must be at least 1, got 0"),
    (["--json", "nowhere/x.json"], "--json: there is no folder nowhere"),
    (["--tune", "main"], f"--tune needs a CUDA GPU, but JAX runs on {jax.default_backend()}"),
  ],
)
def test_bad_option(options, message, monkeypatch, capsys):
  monkeypatch.setattr(command, "has_cuda", lambda: False)
  with pytest.raises(SystemExit) as e:
    command.main(options)
  assert e.value.code == 2
  assert message.split(".*")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
  ("what", "message"),
  [
    ("mian", "--tune takes one of main, batch, "),
    ("1,64,2,2,16,16", "or B,T,H,HV,K,V,M, got 1,64,2,2,16,16"),
    ("1,64,2,3,16,16,1", "HV a multiple of H, got B1 T64 H2 HV3"),
    ("1,0,2,2,16,16,1", "sizes must be at least 1"),
    ("1,100,2,2,16,16,1", "whole chunks of 64 tokens"),
    ("packed", "not packed, got"),
  ],
)
def test_bad_case_to_tune(what, message, monkeypatch, capsys):
  monkeypatch.setattr(command, "has_cuda", lambda: True)
  with pytest.raises(SystemExit):
    command.main(["--tune", what])
  assert message in capsys.readouterr().err


def test_list(monkeypatch, capsys):
  # As `python -m` does it.
  monkeypatch.delitem(sys.modules, command.__name__)
  monkeypatch.setattr(sys, "argv", ["benchmark", "--list"])
  runpy.run_module("gdp_jax.benchmark", run_name="__main__", alter_sys=True)
  listed = capsys.readouterr().out.splitlines()
  assert len(listed) == len(CASES) + 15
  assert listed[0].split() == ["main", "B1", "T8192", "H16", "HV16", "K128", "V128", "M2"]
  assert "packed [0, 100, 1000, 3000, 5000, 8192]" in listed[3]


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_several_devices(tmp_path, capsys):
  """On the CPU's virtual devices, where the ratio means nothing."""
  path = tmp_path / "numbers.json"
  command.main(["--devices", "2", "--tiny", "--dtype", "float32", "--json", str(path), *ONCE])
  lines = json.loads(path.read_text())["devices"]
  axes = ["batch_axis", "head_axis", "sequence_axis"]
  assert [line["axis"] for line in lines] == [axis for axis in axes for _ in range(2)]
  assert all(min(line["wall_ms"]) > 0 and not line["note"] for line in lines)
  assert capsys.readouterr().out.count("sequence_axis") == 2
  with pytest.raises(SystemExit):
    command.main(["--devices", "100"])
  assert f"--devices must be 2 to {jax.device_count()}, got 100" in capsys.readouterr().err


def test_kernel_times(monkeypatch):
  assert measure.has_cuda() or measure.kernel_ms(lambda: 0, 1) is None
  timings = [("a", 1.0), ("b", 10.0), ("a", 3.0), ("b", 20.0), ("a", 2.0), ("b", 90.0)]
  log = []
  ext = SimpleNamespace(
    _cupti_init=lambda: log.append("start"),
    _cupti_get_timings=lambda finalize: log.append("stop") or timings,
  )
  profiler = SimpleNamespace(mosaic_gpu_lib=SimpleNamespace(_mosaic_gpu_ext=ext))
  monkeypatch.setattr(measure, "has_cuda", lambda: True)
  monkeypatch.setattr(measure.importlib, "import_module", lambda name: profiler)
  call = lambda: log.append("call")
  assert measure.kernel_ms(call, 3) == 23.0
  assert log == ["call", "start", "call", "call", "call", "stop"]
  assert measure.kernel_ms(call, 3, "a") == 2.0
  assert measure.kernel_ms(call, 3, "c") is None
  assert measure.kernel_ms(call, 4) == 126 / 4  # not the same kernels in each call
  del ext._cupti_init
  assert measure.kernel_ms(call, 3) is None


def test_candidates():
  chosen = Config(128, 16, num_warps=4, num_stages=3)
  for stage, fields in tune.TUNED.items():
    tried = tune.candidates(stage, 128, 40, chosen)
    assert tried[0] == chosen and len(set(tried)) == len(tried) > 3
    for other in tried:
      changed = {f for f in tune.ALL if getattr(other, f) != getattr(chosen, f)}
      assert changed <= set(fields)
      assert other.block_k in (64, 128) and other.block_v in (16, 32, 64)


def test_stage_calls():
  # What is recorded is the stage's call in the operator; another Config gives the same.
  case = Case("small", 2, 1, 1, 2, 16, 24, 1, decode=True)
  calls = tune.stage_calls(case, "bfloat16", "interpret")
  assert calls.keys() == {"fused_recurrent_gated_delta_product_fwd"}
  ((f, arrays),) = calls.values()
  chosen = tune.chosen_config(f, arrays)
  assert (chosen.block_k, chosen.block_v) == (16, 32)
  lowered = tune.lower(f, arrays, dataclasses.replace(chosen, block_v=16))
  o, pool, _ = lowered.compile()(*arrays)
  args = jax.jit(make_inputs, static_argnums=(0, 1))(case, "bfloat16")
  expected, expected_pool = jax.jit(program(case, "decode", "interpret"))(*args)
  assert_close(dict(o=o, pool=pool), expected | dict(pool=expected_pool), 1e-3, "block_v=16")


def test_largest_error():
  x, y = jnp.array([3.0, 4.0]), jnp.array([100.0])
  error = tune.largest_error
  assert error([x, y], [x, y], summed=False) == 0
  assert error([x, y + 1], [x, y], summed=False) == pytest.approx(0.01)
  assert error([x + 1e-3, x], [x, x + 1e-3], summed=True) == 0
  assert jnp.isnan(error([x * jnp.nan, y], [x, y], summed=False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_on_gpu(dtype, tmp_path):
  path = tmp_path / "numbers.json"
  options = ["--cases", "main,decode", "--tiny", "--dtype", dtype, "--json", str(path)]
  command.main([*options, *ONCE, "--no-peers"])
  found = json.loads(path.read_text())
  assert found["copy_bytes_per_s"] > 1e10 and found["machine"]["driver"]
  assert [row["implementation"] for row in found["results"]] == ["pallas"] * 3
  assert all(row[name] > 0 for row in found["results"] for name in NUMBERS)


@pytest.mark.gpu
@pytest.mark.parametrize(
  ("case", "stage"),
  [("main", "solve_tril"), ("decode", "fused_recurrent_gated_delta_product_fwd")],
)
def test_tune_on_gpu(case, stage, tmp_path, capsys):
  path = tmp_path / "numbers.json"
  command.main(["--tune", case, "--tiny", "--stages", stage, "--json", str(path), *ONCE])
  (tuned,) = json.loads(path.read_text())["tuned"]
  assert tuned["stage"] == stage
  assert len(tuned["milliseconds"]) > 1 and min(tuned["milliseconds"].values()) > 0
  table = capsys.readouterr().out
  assert f"  {tuned['chosen']}\n" in table and f"  {tuned['best']}\n" in table
