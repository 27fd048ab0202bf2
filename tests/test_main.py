"""The main job fails loudly. That it works is in test_readme.py."""

import jax.numpy as jnp
import pytest

from gdp_jax import __main__ as main_job


def test_error_above_bound(monkeypatch, capsys):
  monkeypatch.setattr(main_job, "BOUNDS", {"float32": 0.0})
  with pytest.raises(SystemExit, match=r"^FAILED: the error of o in float32, .*, above 0e\+00"):
    main_job.main(["--tokens", "100"])
  assert "ok:" not in capsys.readouterr().out


def test_nan_fails(monkeypatch):
  nan = {"o": float("nan"), "final_state": 0.0}
  monkeypatch.setattr(main_job, "measure", lambda *_: [main_job.Row("float32", "xla", 1.0, nan)])
  with pytest.raises(SystemExit, match="the error of o in float32, xla, is nan"):
    main_job.main(["--tokens", "100"])


def test_no_documents(monkeypatch, tmp_path):
  (tmp_path / "a.py").write_bytes(b"x = 1\n")
  monkeypatch.setattr(main_job.sysconfig, "get_path", lambda _: str(tmp_path))
  with pytest.raises(SystemExit, match="has 6 bytes of Python source, 100 were asked for"):
    main_job.main(["--tokens", "100"])


@pytest.mark.parametrize("option", ["--tokens", "--num-householder"])
def test_bad_option(option, capsys):
  with pytest.raises(SystemExit) as e:
    main_job.main([option, "0"])
  assert e.value.code == 2
  assert "must be at least 1" in capsys.readouterr().err


def test_documents_and_inputs():
  documents = main_job.read_documents(1000)
  assert sum(map(len, documents)) == 1000 and len(documents) >= 4
  inputs = main_job.make_inputs(documents, 3)
  assert inputs["k"].shape == (1, 3000, main_job.H, main_job.K)
  assert int(inputs["cu_seqlens"][-1]) == 1000
  assert jnp.all(inputs["g"] < 0) and jnp.all((inputs["beta"] > 0) & (inputs["beta"] < 2))


def test_relative_error():
  assert main_job.relative_error(jnp.array([3.0, 4.0]), jnp.array([3.0, 0.0])) == pytest.approx(
    4 / 3
  )
