"""A small language model of gated delta product layers.

B batch, T tokens, N sequences, S slots of a pool.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Dtype
from jax import lax

from gdp_jax import metadata
from gdp_jax.nn import packing
from gdp_jax.nn.gated_delta_product import GatedDeltaProduct, GatedDeltaProductState, split_init
from gdp_jax.sharding import Axis


@dataclass(frozen=True)
class GatedDeltaProductConfig:
  """The sizes and options of a `GatedDeltaProductLM`.

  Attributes:
    vocab_size: number of tokens that there are.
    num_hidden_layers: number of blocks.
    hidden_size, expand_v, head_dim, num_heads, num_v_heads, num_householder, use_forget_gate,
      use_output_gate, use_short_conv, conv_size, conv_bias, norm_eps, allow_neg_eigval: as for
      `GatedDeltaProduct`; norm_eps is that of the other norms too.
    hidden_ratio: width of the MLP: 2/3 of this many times hidden_size, rounded up to a multiple of
      256.
    intermediate_size: width of the MLP; None: by hidden_ratio.
    initializer_range: standard deviation of the initial embedding and projections.
    remat: compute each block again in the backward pass, rather than keep what it computed.

  Example:
    >>> from gdp_jax.nn import GatedDeltaProductConfig
    >>> config = GatedDeltaProductConfig(vocab_size=256, hidden_size=512, num_hidden_layers=4)
    >>> config.mlp_size
    1536
  """

  vocab_size: int = 32000
  num_hidden_layers: int = 21
  hidden_size: int = 2048
  expand_v: float = 2
  head_dim: int = 256
  num_heads: int = 6
  num_v_heads: int | None = None
  num_householder: int = 2
  use_forget_gate: bool = True
  use_output_gate: bool = True
  use_short_conv: bool = True
  conv_size: int = 4
  conv_bias: bool = False
  norm_eps: float = 1e-5
  allow_neg_eigval: bool = True
  hidden_ratio: float = 4
  intermediate_size: int | None = None
  initializer_range: float = 0.02
  remat: bool = False

  def __post_init__(self):
    for name in ("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size"):
      size = getattr(self, name)
      if size is not None and size < 1:
        raise ValueError(f"{name} must be at least 1, got {size}")
    if self.hidden_ratio <= 0:
      raise ValueError(f"hidden_ratio must be above 0, got {self.hidden_ratio}")

  @property
  def mlp_size(self) -> int:
    """Width of the MLP."""
    if self.intermediate_size is not None:
      return self.intermediate_size
    return -(-int(self.hidden_size * self.hidden_ratio * 2 / 3) // 256) * 256


class SwiGLU(nnx.Module):
  """(silu(x W_gate) * (x W_up)) W_down, of x [..., hidden_size]. Source: arXiv 2002.05202."""

  def __init__(self, hidden_size: int, intermediate_size: int, *, dtype, param_dtype, kernel_init,
               rngs, axis=None):  # fmt: skip
    linear = partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    up = partial(linear, hidden_size, intermediate_size)
    self.gate_proj = up(kernel_init=split_init(kernel_init, None, axis))
    self.up_proj = up(kernel_init=split_init(kernel_init, None, axis))
    self.down_proj = linear(
      intermediate_size, hidden_size, kernel_init=split_init(kernel_init, axis, None)
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
  """x + layer(norm(x)), then x + MLP(norm(x)); called as `GatedDeltaProduct` is."""

  def __init__(self, config: GatedDeltaProductConfig, *, dtype, param_dtype, implementation, rngs,
               **axes):  # fmt: skip
    kernel_init = nnx.initializers.normal(config.initializer_range)
    common: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    norm = partial(nnx.RMSNorm, config.hidden_size, epsilon=config.norm_eps, **common)
    self.attn_norm = norm()
    self.attn = GatedDeltaProduct(
      config.hidden_size, config.expand_v, config.head_dim, config.num_heads, config.num_v_heads,
      num_householder=config.num_householder, use_forget_gate=config.use_forget_gate,
      use_output_gate=config.use_output_gate, use_short_conv=config.use_short_conv,
      conv_size=config.conv_size, conv_bias=config.conv_bias, norm_eps=config.norm_eps,
      allow_neg_eigval=config.allow_neg_eigval, implementation=implementation,
      kernel_init=kernel_init, **common, **axes,
    )  # fmt: skip
    self.mlp_norm = norm()
    self.mlp = SwiGLU(
      config.hidden_size, config.mlp_size, kernel_init=kernel_init, axis=axes["head_axis"], **common
    )

  def __call__(self, x, state=None, cu_seqlens=None, state_indices=None):
    y, state = self.attn(self.attn_norm(x), state, cu_seqlens, state_indices=state_indices)
    return self._mlp(x + y), state

  def step(self, x, state, state_indices=None):
    y, state = self.attn.step(self.attn_norm(x), state, state_indices)
    return self._mlp(x + y), state

  def _mlp(self, x):
    return x + self.mlp(self.mlp_norm(x))


class GatedDeltaProductLM(nnx.Module):
  """A language model: embedding, blocks of a `GatedDeltaProduct` and an MLP, norm, tied head.

  It is called in the ways the layer is, with tokens in the place of x, logits in that of y, and a
  tuple of the layers' states for a state. Packed documents and slots of a pool work as there, but
  that logits of padding mean nothing.

  Attributes:
    embeddings: nnx.Embed, also the head.
    layers: nnx.List of blocks, each with attn_norm, attn, mlp_norm and mlp.
    norm: nnx.RMSNorm.

  Args:
    config: GatedDeltaProductConfig.
    dtype: of the computation; None: that of the parameters. Logits are fp32.
    param_dtype: of the parameters, but for A_log and dt_bias, which are fp32.
    implementation: of the operators, as for `gdp_jax.chunk_gated_delta_product`.
    batch_axis, head_axis, sequence_axis: axes of a mesh, as for `GatedDeltaProduct`; tokens are to
      lie on it as P(batch_axis, sequence_axis). The MLP's width is split over head_axis too.
    rngs: a stream `params` of keys.

  Raises:
    ValueError: naming the argument, what was expected and what was given.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gdp_jax.nn import GatedDeltaProductConfig, GatedDeltaProductLM, next_token_loss
    >>> config = GatedDeltaProductConfig(
    ...     vocab_size=50, num_hidden_layers=1, hidden_size=32, num_heads=2, head_dim=8)
    >>> model = GatedDeltaProductLM(config, rngs=nnx.Rngs(0))
    >>> tokens = jnp.array([[1, 2, 3, 4, 5, 6]])
    >>> logits, _ = model(tokens, cu_seqlens=jnp.array([0, 4, 6]))  # two documents
    >>> float(next_token_loss(logits, tokens, cu_seqlens=jnp.array([0, 4, 6]))) > 0
    True
    >>> state = model.initialize_state(batch_size=1)
    >>> logits, state = model.step(tokens[:, :1], state)
    >>> logits.shape
    (1, 1, 50)

  Source: DeltaProduct, arXiv 2502.10297; names of flash-linear-attention's model.
  """

  def __init__(
    self,
    config: GatedDeltaProductConfig,
    *,
    dtype: Dtype | None = None,
    param_dtype: Dtype = jnp.float32,
    implementation: str | None = None,
    batch_axis: Axis = None,
    head_axis: Axis = None,
    sequence_axis: Axis = None,
    rngs: nnx.Rngs,
  ):
    common: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    self.config = config
    self.embeddings = nnx.Embed(
      config.vocab_size, config.hidden_size,
      embedding_init=nnx.initializers.normal(config.initializer_range), **common,
    )  # fmt: skip
    axes = dict(batch_axis=batch_axis, head_axis=head_axis, sequence_axis=sequence_axis)
    block = partial(Block, config, implementation=implementation, **common, **axes)
    self.layers = nnx.List([block() for _ in range(config.num_hidden_layers)])
    self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.norm_eps, **common)

  def initialize_state(
    self, batch_size: int, dtype: Dtype = jnp.float32
  ) -> tuple[GatedDeltaProductState, ...]:
    """Each layer's `GatedDeltaProduct.initialize_state`: of N sequences, or S slots."""
    return tuple(layer.attn.initialize_state(batch_size, dtype) for layer in self.layers)

  def __call__(
    self,
    tokens: jax.Array | np.ndarray,
    state: tuple[GatedDeltaProductState, ...] | None = None,
    cu_seqlens: jax.Array | np.ndarray | list[int] | tuple[int, ...] | None = None,
    *,
    segment_ids: jax.Array | np.ndarray | None = None,
    max_segments: int | None = None,
    state_indices: jax.Array | np.ndarray | list[int] | None = None,
  ) -> tuple[jax.Array, tuple[GatedDeltaProductState, ...] | None]:
    """Computes the logits of the next token at each token: training and prefill.

    Args:
      tokens: int [B, T], each in 0..vocab_size-1.
      state, cu_seqlens, segment_ids, max_segments, state_indices: as for `GatedDeltaProduct`.

    Returns:
      (logits, state): logits [B, T, vocab_size], fp32, and the state after the last token; None if
      none was given.

    Raises:
      TypeError, ValueError: naming the argument, what was expected and what was given.
    """
    tokens = _check_tokens(tokens)
    shape = tokens.shape
    packing.check_segment_ids_alone(
      segment_ids, max_segments, state=state, cu_seqlens=cu_seqlens, state_indices=state_indices
    )
    if segment_ids is not None:
      cu_seqlens, _ = packing.pack_segment_ids(segment_ids, max_segments, *shape)
      tokens = tokens.reshape(1, -1)
    x, state = self._hidden(tokens, state, cu_seqlens, state_indices)
    return self._logits(x).reshape(*shape, -1), state

  def step(
    self,
    tokens: jax.Array | np.ndarray,
    state: tuple[GatedDeltaProductState, ...],
    state_indices: jax.Array | np.ndarray | list[int] | None = None,
  ) -> tuple[jax.Array, tuple[GatedDeltaProductState, ...]]:
    """Decodes: takes the next token, or the next few, of each of N sequences.

    Args:
      tokens: int [N, T] with T >= 1, each in 0..vocab_size-1.
      state, state_indices: as for `GatedDeltaProduct.step`.

    Returns:
      (logits, state): logits [N, T, vocab_size], fp32, and the state after the last token.

    Raises:
      TypeError, ValueError: naming the argument, what was expected and what was given.
    """
    if state is None:
      raise ValueError("step needs a state: see initialize_state")
    self._check_state(state)
    x = self.embeddings(_check_tokens(tokens))
    new_state = []
    for layer, layer_state in zip(self.layers, state, strict=True):
      x, layer_state = layer.step(x, layer_state, state_indices)
      new_state.append(layer_state)
    return self._logits(x), tuple(new_state)

  def generate(
    self,
    prompt: jax.Array | np.ndarray,
    max_new_tokens: int,
    *,
    temperature: float | jax.Array = 0.0,
    key: jax.Array | None = None,
    prompt_lengths: jax.Array | np.ndarray | list[int] | None = None,
  ) -> jax.Array:
    """Goes on with each prompt: one prefill, then one step a token, in a `lax.scan`.

    Args:
      prompt: int [B, T] with T >= 1.
      max_new_tokens: how many tokens to add, a static int of at least 1.
      temperature: 0: the most likely token; above 0: samples of softmax(logits / temperature). A
        Python number or a scalar array, traced or not.
      key: of the samples; needed unless temperature is the number 0.
      prompt_lengths: int [B], tokens of each prompt, at least 1; those behind, at a row's end, are
        padding. None: all are T long. Not with a model's batch_axis.

    Returns:
      int32 [B, max_new_tokens].

    Raises:
      TypeError, ValueError: naming the argument, what was expected and what was given.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from gdp_jax.nn import GatedDeltaProductConfig, GatedDeltaProductLM
      >>> config = GatedDeltaProductConfig(
      ...     vocab_size=50, num_hidden_layers=1, hidden_size=32, num_heads=2, head_dim=8)
      >>> model = GatedDeltaProductLM(config, rngs=nnx.Rngs(0))
      >>> generate = nnx.jit(GatedDeltaProductLM.generate, static_argnames="max_new_tokens")
      >>> prompt = jnp.array([[1, 2, 3], [7, 0, 0]])
      >>> generate(model, prompt, max_new_tokens=4, prompt_lengths=jnp.array([3, 1])).shape
      (2, 4)
    """
    prompt = _check_tokens(prompt, "prompt")
    B, T = prompt.shape
    if T < 1:
      raise ValueError(f"prompt must have at least one token, T >= 1, got shape {prompt.shape}")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, (int, np.integer)):
      raise TypeError(f"max_new_tokens must be a Python int, got {type(max_new_tokens).__name__}")
    if max_new_tokens < 1:
      raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    greedy = isinstance(temperature, (int, float)) and temperature == 0
    if isinstance(temperature, (int, float)) and temperature < 0:
      raise ValueError(f"temperature must be at least 0, got {temperature}")
    if not greedy and key is None:
      raise ValueError(f"key is needed unless temperature is the number 0, got {temperature}")

    def choose(logits, key):
      best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
      if greedy:
        return best
      heat = jnp.maximum(temperature, 1e-6)
      sample = jax.random.categorical(key, logits / heat).astype(jnp.int32)
      return jnp.where(jnp.asarray(temperature) > 0, sample, best)

    state = self.initialize_state(B)
    if prompt_lengths is None:
      x, state = self._hidden(prompt, state)
      last = x[:, -1]
    else:
      lengths = _check_lengths(prompt_lengths, B, T)
      # All rows as one, each of them two sequences: the prompt, and its padding in slot -1.
      row = jnp.arange(B, dtype=jnp.int32)
      starts = row * T
      offsets = jnp.stack([starts, starts + lengths], axis=1).reshape(-1)
      cu_seqlens = jnp.append(offsets, jnp.int32(B * T))
      slots = jnp.stack([row, jnp.full_like(row, -1)], axis=1).reshape(-1)
      x, state = self._hidden(prompt.reshape(1, -1), state, cu_seqlens, slots)
      last = x[0, starts + lengths - 1]

    keys = None if key is None else jax.random.split(key, max_new_tokens)
    first = choose(self._logits(last), None if keys is None else keys[0])

    def next_token(carry, key):
      state, token = carry
      logits, state = self.step(token[:, None], state)
      token = choose(logits[:, 0], key)
      return (state, token), token

    _, rest = lax.scan(
      next_token, (state, first), None if keys is None else keys[1:], length=max_new_tokens - 1
    )
    return jnp.concatenate([first[:, None], rest.T], axis=1)

  def _hidden(self, tokens, state=None, cu_seqlens=None, state_indices=None):
    """What the last block returns, and the new state."""
    self._check_state(state)
    x = self.embeddings(tokens)
    call = lambda layer, x, state: layer(x, state, cu_seqlens, state_indices)
    if self.config.remat:
      call = nnx.remat(call)
    new_state = []
    for n, layer in enumerate(self.layers):
      x, layer_state = call(layer, x, None if state is None else state[n])
      new_state.append(layer_state)
    return x, None if state is None else tuple(new_state)

  def _logits(self, x):
    x, embedding = self.norm(x), self.embeddings.embedding[...]
    return jnp.matmul(x, embedding.T.astype(x.dtype), preferred_element_type=jnp.float32)

  def _check_state(self, state):
    if state is None:
      return
    if not isinstance(state, tuple) or len(state) != len(self.layers):
      raise ValueError(f"state must be a tuple of {len(self.layers)} layers' states, got"
                       f" {type(state).__name__}")  # fmt: skip


def next_token_loss(
  logits: jax.Array,
  tokens: jax.Array | np.ndarray,
  *,
  cu_seqlens: jax.Array | np.ndarray | None = None,
  segment_ids: jax.Array | np.ndarray | None = None,
) -> jax.Array:
  """Mean cross-entropy of each token given those before it, in nats.

  Neither a document's first token nor padding is predicted.

  Args:
    logits: [B, T, vocab_size], any float dtype; computed in fp32.
    tokens: int [B, T].
    cu_seqlens: int [N+1], offsets of packed documents, with B = 1; or
    segment_ids: int [B, T], documents as runs of equal ids; 0 is padding.

  Returns:
    A scalar, fp32; 0 if there is nothing to be predicted.

  Raises:
    ValueError: naming the argument, what was expected and what was given.

  Example:
    >>> import jax.numpy as jnp
    >>> from gdp_jax.nn import next_token_loss
    >>> loss = next_token_loss(jnp.zeros((1, 4, 8)), jnp.array([[1, 2, 3, 4]]))
    >>> round(float(loss), 3)  # log 8
    2.079
  """
  if logits.ndim != 3 or tokens.shape != logits.shape[:2]:
    raise ValueError(f"logits must have shape [B, T, vocab_size] for tokens of shape"
                     f" {tokens.shape}, got {logits.shape}")  # fmt: skip
  if cu_seqlens is not None and segment_ids is not None:
    raise ValueError("segment_ids cannot be combined with cu_seqlens")
  B, T = tokens.shape
  counted = jnp.ones((B, max(T - 1, 0)), bool)
  if cu_seqlens is not None:
    offsets, _ = packing.check_cu_seqlens(cu_seqlens, B, T)
    assert offsets is not None
    offsets = metadata.sanitize_cu_seqlens(offsets, T)
    t = jnp.arange(T)
    segment_ids = jnp.where(t < offsets[-1], 1 + metadata.sequence_of(t, offsets), 0)[None]
  if segment_ids is not None:
    if segment_ids.shape != tokens.shape:
      raise ValueError(f"segment_ids must have tokens' shape {tokens.shape},"
                       f" got {segment_ids.shape}")  # fmt: skip
    counted = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
  log_p = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
  loss = -jnp.take_along_axis(log_p, jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
  return jnp.sum(jnp.where(counted, loss, 0)) / jnp.maximum(jnp.sum(counted), 1)


def _check_tokens(tokens, name="tokens"):
  if not hasattr(tokens, "dtype") or not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise TypeError(f"{name} must be an integer array, got {type(tokens).__name__}"
                    f" of dtype {getattr(tokens, 'dtype', None)}")  # fmt: skip
  if tokens.ndim != 2:
    raise ValueError(f"{name} must have shape [B, T], got {tokens.shape}")
  return jnp.asarray(tokens)


def _check_lengths(lengths, B, T):
  if isinstance(lengths, (list, tuple)):
    lengths = np.asarray(lengths)
  if not hasattr(lengths, "dtype") or not jnp.issubdtype(lengths.dtype, jnp.integer):
    raise TypeError(f"prompt_lengths must be an integer array, got {type(lengths).__name__}"
                    f" of dtype {getattr(lengths, 'dtype', None)}")  # fmt: skip
  if lengths.shape != (B,):
    raise ValueError(f"prompt_lengths must have shape [B] = {(B,)}, got {lengths.shape}")
  if isinstance(lengths, np.ndarray) and ((lengths < 1) | (lengths > T)).any():
    raise ValueError(f"prompt_lengths must lie in 1..T with T={T}, got {lengths.tolist()}")
  return jnp.clip(lengths, 1, T).astype(jnp.int32)
