"""The small language model: generation, packing, slots, training with optax, checkpoints by orbax.

B batch, T tokens, N sequences, S slots of a pool.
"""

import dataclasses
import functools
import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from cases import assert_close, assert_raises, assert_same_bits, quick_jit
from flax import nnx

from gdp_jax.nn import GatedDeltaProductConfig, GatedDeltaProductLM, next_token_loss

VOCABULARY = 19
# Large weights, so that tokens differ in what follows them.
CONFIG = GatedDeltaProductConfig(
  vocab_size=VOCABULARY, num_hidden_layers=2, hidden_size=16, head_dim=8, num_heads=2,
  intermediate_size=24, initializer_range=0.5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _full_precision():
  # On a GPU fp32 projections are tf32 by default, 1e-3.
  with jax.default_matmul_precision("highest"):
    yield


def make_model(config=CONFIG, **options):
  """A model with the parameters that it begins with, or much alike."""
  # Drawn by NumPy: initialisers would be compiled, for each shape anew.
  model = nnx.eval_shape(lambda: GatedDeltaProductLM(config, **options, rngs=nnx.Rngs(0)))
  graphdef, state = nnx.split(model)
  rng = np.random.default_rng(0)

  def draw(path, p):
    ranges = dict(A_log=(-1, 2.7), dt_bias=(-7, -2), scale=(1, 1))
    deviation = 0.5 if "conv" in path[-2] else config.initializer_range
    x = (
      rng.uniform(*ranges[path[-1]], p.shape)
      if path[-1] in ranges
      else (deviation * rng.standard_normal(p.shape))
    )
    return p.replace(jnp.asarray(x, p.dtype))

  return nnx.merge(graphdef, nnx.map_state(draw, state))


@functools.cache
def compiled(method, *static):
  """The jitted method of a model of CONFIG."""
  graphdef, params = nnx.split(make_model())

  def f(params, *args, **kwargs):
    return getattr(nnx.merge(graphdef, params), method)(*args, **kwargs)

  return functools.partial(quick_jit(f, static_argnames=static), params)


call = lambda *args, **kwargs: compiled("__call__", "max_segments")(*args, **kwargs)
step = lambda *args, **kwargs: compiled("step")(*args, **kwargs)
generate = lambda *args, **kwargs: compiled("generate", "max_new_tokens")(*args, **kwargs)


def make_tokens(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, VOCABULARY, shape).astype(np.int32)


def by_recomputation(prompt, lengths, max_new_tokens):
  """Greedy generation that computes every prompt and all that follows it anew for each token."""
  B, T = prompt.shape
  tokens = np.zeros((B, T + max_new_tokens), np.int32)
  tokens[:, :T] = prompt
  row, end = np.arange(B), np.array(lengths)
  for _ in range(max_new_tokens):
    logits = np.asarray(call(tokens)[0])  # causal: what is behind does not matter
    tokens[row, end] = np.argmax(logits[row, end - 1], axis=-1)
    end += 1
  return np.stack([tokens[b, n : n + max_new_tokens] for b, n in enumerate(lengths)])


# Generation


def test_generation_equals_recomputation():
  prompt = make_tokens(3, 5)
  expected = by_recomputation(prompt, [5, 5, 5], 12)
  assert len(np.unique(expected)) > 4  # it does not just repeat itself
  np.testing.assert_array_equal(generate(prompt, max_new_tokens=12), expected)


def test_generation_from_prompts_of_several_lengths():
  prompt, lengths = make_tokens(3, 5), np.array([4, 1, 5])
  expected = by_recomputation(prompt, lengths, 12)
  for padding in (0, VOCABULARY - 1):
    prompt[np.arange(5) >= lengths[:, None]] = padding
    actual = generate(prompt, max_new_tokens=12, prompt_lengths=lengths)
    np.testing.assert_array_equal(actual, expected)


def test_sampling():
  prompt = make_tokens(64, 2)
  sample = lambda temperature, seed: generate(
    prompt, max_new_tokens=3, temperature=jnp.float32(temperature), key=jax.random.key(seed)
  )
  greedy = np.asarray(generate(prompt, max_new_tokens=1))
  np.testing.assert_array_equal(sample(1e-6, 0)[:, :1], greedy)
  np.testing.assert_array_equal(sample(0.0, 0)[:, :1], greedy)
  np.testing.assert_array_equal(sample(1.0, 0), sample(1.0, 0))
  assert np.any(sample(1.0, 0) != sample(1.0, 1))
  # Hot enough, all tokens are equally likely: 192 draws hit a given half of them 96 +- 7 times.
  draws = np.asarray(sample(1e6, 0))
  assert len(np.unique(draws)) == VOCABULARY and 60 < np.sum(draws < VOCABULARY // 2) < 130


def test_slots_of_a_pool():
  tokens = make_tokens(2, 9)
  logits, _ = call(tokens)
  pool = make_model().initialize_state(4)
  row = np.concatenate([tokens[0, :3], tokens[1, :7], make_tokens(2)])[None]
  slots = np.array([3, 1, -1], np.int32)
  packed, pool = call(row, pool, jnp.array([0, 3, 10, 12]), state_indices=slots)
  expected = np.concatenate([logits[0, :3], logits[1, :7]])
  assert_close(dict(logits=packed[0, :10]), dict(logits=expected), 1e-5, "prefill")
  for t in range(2):
    token = np.stack([tokens[0, 3 + t], tokens[1, 7 + t], 0])[:, None]
    decoded, pool = step(token, pool, slots)
    expected = np.stack([logits[0, 3 + t], logits[1, 7 + t]])
    assert_close(dict(logits=decoded[:2, 0]), dict(logits=expected), 1e-5, "decode")
  assert not any(jnp.any(x[jnp.array([0, 2])]) for x in jax.tree.leaves(pool))


# Packing and the loss


def test_documents_do_not_see_each_other():
  tokens = make_tokens(2, 12)
  ids = np.array([[1] * 5 + [2] * 7, [2] * 4 + [3] * 6 + [0] * 2])
  run = lambda tokens: np.asarray(call(tokens, segment_ids=ids, max_segments=4)[0])
  logits, changed = run(tokens), tokens.copy()
  changed[1, :4] = (changed[1, :4] + 1) % VOCABULARY
  changed[1, 10:] = 0
  others = np.array([[True] * 12, [False] * 4 + [True] * 6 + [False] * 2])
  assert_same_bits(dict(y=run(changed)[others]), dict(y=logits[others]), "other documents")
  assert np.all(np.any(run(changed)[1, :4] != logits[1, :4], axis=-1))
  alone, _ = call(tokens[1:, 4:10])
  assert_close(dict(y=logits[1:, 4:10]), dict(y=alone), 1e-5, "a document alone")


def test_loss():
  rng = np.random.default_rng(0)
  logits, tokens = rng.standard_normal((2, 6, VOCABULARY)), make_tokens(2, 6)
  log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  nll = -np.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
  logits = jnp.asarray(logits, jnp.float32)
  loss = lambda n=slice(None), **packing: float(next_token_loss(logits[n], tokens[n], **packing))
  assert math.isclose(loss(), nll.mean(), rel_tol=1e-5)
  ids = np.array([[4, 4, 4, 1, 1, 1], [2, 2, 3, 0, 0, 0]])
  kept = [nll[0, 0], nll[0, 1], nll[0, 3], nll[0, 4], nll[1, 0]]
  assert math.isclose(loss(segment_ids=ids), np.mean(kept), rel_tol=1e-5)
  one = slice(0, 1)
  assert math.isclose(loss(one, cu_seqlens=[0, 3, 3, 5]), np.mean(nll[0, [0, 1, 3]]), rel_tol=1e-5)
  assert loss(one, cu_seqlens=jnp.array([0, 0])) == 0
  assert float(next_token_loss(logits[:, :1], tokens[:, :1])) == 0


# Training


def batches(count):
  """Sequences that can be learnt: each token is the one before it plus 1."""
  start = np.random.default_rng(1).integers(0, VOCABULARY, (count, 8, 1))
  return ((start + np.arange(12)) % VOCABULARY).astype(np.int32)


def make_training():
  config = dataclasses.replace(
    CONFIG, num_hidden_layers=1, num_householder=1, initializer_range=0.1
  )
  model = make_model(config)
  return model, nnx.Optimizer(model, optax.adamw(2e-2), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, tokens):
  def loss(model):
    return next_token_loss(model(tokens)[0], tokens)

  value, gradients = nnx.value_and_grad(loss)(model)
  optimizer.update(model, gradients)
  return value


def test_training_goes_on_from_a_checkpoint(tmp_path):
  data = batches(30)
  model, optimizer = make_training()
  losses = [float(train_step(model, optimizer, tokens)) for tokens in data[:20]]
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "checkpoint", nnx.state((model, optimizer)))
  expected = [float(train_step(model, optimizer, tokens)) for tokens in data[20:]]
  assert losses[0] > 2.5 and expected[-1] < 2  # log 19 is 2.9

  model, optimizer = make_training()
  abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state((model, optimizer)))
  with ocp.StandardCheckpointer() as checkpointer:
    nnx.update((model, optimizer), checkpointer.restore(tmp_path / "checkpoint", abstract))
  actual = [float(train_step(model, optimizer, tokens)) for tokens in data[20:]]
  # On a GPU the embedding's gradient is summed in no fixed order.
  rtol = 0 if jax.default_backend() == "cpu" else 1e-3
  np.testing.assert_allclose(actual, expected, rtol=rtol)


def test_remat_keeps_less_and_changes_nothing():
  tokens, results, kept = batches(1)[0], [], []
  for remat in (False, True):
    config = dataclasses.replace(CONFIG, remat=remat, num_hidden_layers=1, num_householder=1)
    graphdef, params = nnx.split(make_model(config))

    def loss(params, graphdef=graphdef):
      model = nnx.merge(graphdef, params)
      logits, _ = model(tokens.reshape(1, -1), cu_seqlens=[0, 50, 96])
      return next_token_loss(logits, tokens.reshape(1, -1))

    results.append(dict(enumerate(jax.tree.leaves(quick_jit(jax.value_and_grad(loss))(params)))))
    residuals = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params)[1], params)
    kept.append(sum(x.size for x in jax.tree.leaves(residuals)))
  # The same operations, but compiled into other loops: 1.5e-5 is measured.
  assert_close(results[1], results[0], 1e-4, "remat")
  assert kept[1] < kept[0] / 2, kept


def test_bfloat16():
  config = dataclasses.replace(CONFIG, initializer_range=0.1)
  logits = []
  for dtype in (jnp.bfloat16, None):
    model = make_model(config, dtype=dtype)
    logits.append(quick_jit(lambda tokens, model=model: model(tokens)[0])(make_tokens(2, 9)))
    assert logits[-1].dtype == jnp.float32
  # Two blocks of a dozen roundings in a row, each 1.6e-3: 2e-2 is measured.
  assert_close(dict(logits=logits[0]), dict(logits=logits[1]), 3e-2, "bfloat16")


# Options and errors


def test_config():
  layer = make_model().layers[0].attn
  for name in ("hidden_size", "num_heads", "num_householder", "conv_size", "allow_neg_eigval"):
    assert getattr(layer, name) == getattr(CONFIG, name)
  changed = dict(
    expand_v=1.5, num_v_heads=4, num_householder=3, use_forget_gate=False, use_output_gate=False,
    conv_size=3, conv_bias=True, norm_eps=1e-3, allow_neg_eigval=False,
  )  # fmt: skip
  config = GatedDeltaProductConfig(**(dataclasses.asdict(CONFIG) | changed))
  layer = make_model(config, implementation="xla", param_dtype=jnp.bfloat16).layers[1].attn
  assert (layer.head_v_dim, layer.num_v_heads, layer.num_householder) == (12, 4, 3)
  assert layer.a_proj is None and layer.g_proj is None and layer.q_conv.bias is not None
  assert (layer.conv_size, layer.o_norm.epsilon, layer.allow_neg_eigval) == (3, 1e-3, False)
  assert layer.implementation == "xla" and layer.q_proj.kernel.dtype == jnp.bfloat16
  no_conv = make_model(dataclasses.replace(CONFIG, use_short_conv=False))
  assert no_conv.initialize_state(2)[0].conv_state is None
  assert GatedDeltaProductConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
  assert GatedDeltaProductConfig().mlp_size == 5632  # 2048 * 4 * 2/3 = 5461.3, in 256s
  chex.assert_equal(hash(config), hash(dataclasses.replace(config)))


TOKENS = make_tokens(2, 5)
BAD_CALLS = {
  "tokens-float": (dict(tokens=np.zeros((2, 5))), TypeError, ["tokens", "integer", "float64"]),
  "tokens-list": (dict(tokens=[[1]]), TypeError, ["tokens", "integer", "list"]),
  "tokens-rank": (dict(tokens=TOKENS[0]), ValueError, ["tokens", "[B, T]", "(5,)"]),
  "state": (dict(state=()), ValueError, ["state", "tuple of 2 layers'", "tuple"]),
  "ids-alone": (dict(segment_ids=TOKENS), ValueError, ["segment_ids", "max_segments"]),
  "max-alone": (dict(max_segments=3), ValueError, ["max_segments", "segment_ids"]),
  "rows": (dict(cu_seqlens=[0, 5]), ValueError, ["cu_seqlens", "B=1", "B=2"]),
}
BAD_PROMPTS = {
  "prompt": (dict(prompt=np.zeros((2, 5))), TypeError, ["prompt", "integer", "float64"]),
  "no-prompt": (dict(prompt=TOKENS[:, :0]), ValueError, ["prompt", "T >= 1", "(2, 0)"]),
  "max-float": (dict(max_new_tokens=2.0), TypeError, ["max_new_tokens", "int", "float"]),
  "max-zero": (dict(max_new_tokens=0), ValueError, ["max_new_tokens", "at least 1", "0"]),
  "cold": (dict(temperature=-1.0), ValueError, ["temperature", "at least 0", "-1.0"]),
  "no-key": (dict(temperature=0.5), ValueError, ["key", "temperature", "0.5"]),
  "lengths-shape": (dict(prompt_lengths=[1]), ValueError, ["prompt_lengths", "[B] = (2,)", "(1,)"]),
  "lengths-range": (dict(prompt_lengths=[1, 6]), ValueError, ["prompt_lengths", "T=5", "[1, 6]"]),
  "lengths-dtype": (dict(prompt_lengths=np.ones(2)), TypeError, ["prompt_lengths", "float64"]),
}
BAD_LOSSES = {
  "shape": (dict(logits=np.zeros((2, 4, 8))), ["logits", "(2, 5)", "(2, 4, 8)"]),
  "both": (dict(segment_ids=TOKENS, cu_seqlens=[0, 5]), ["segment_ids", "cu_seqlens"]),
  "ids": (dict(segment_ids=TOKENS[:1]), ["segment_ids", "(2, 5)", "(1, 5)"]),
  "rows": (dict(cu_seqlens=[0, 5]), ["cu_seqlens", "B=1", "B=2"]),
}
BAD_CONFIGS = {
  "layers": (dict(num_hidden_layers=0), ["num_hidden_layers", "at least 1", "0"]),
  "mlp": (dict(intermediate_size=0), ["intermediate_size", "at least 1", "0"]),
  "ratio": (dict(hidden_ratio=0), ["hidden_ratio", "above 0", "0"]),
}
bad_model = functools.cache(make_model)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
  arguments, error, parts = BAD_CALLS[name]
  assert_raises(error, parts, bad_model(), **(dict(tokens=TOKENS) | arguments))


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(name):
  arguments, error, parts = BAD_PROMPTS[name]
  arguments = dict(prompt=TOKENS, max_new_tokens=2) | arguments
  assert_raises(error, parts, bad_model().generate, **arguments)


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_bad_losses(name):
  arguments, parts = BAD_LOSSES[name]
  arguments = dict(logits=np.zeros((2, 5, 8)), tokens=TOKENS) | arguments
  assert_raises(ValueError, parts, next_token_loss, **arguments)


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs(name):
  arguments, parts = BAD_CONFIGS[name]
  assert_raises(
    ValueError, parts, lambda **changed: dataclasses.replace(CONFIG, **changed), **arguments
  )


def test_bad_steps():
  step = bad_model().step
  assert_raises(ValueError, ["step needs a state"], step, tokens=TOKENS, state=None)
