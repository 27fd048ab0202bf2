"""State tracking in permutation groups: the task that more than one Householder a token is for.

A sequence of random permutations is read one by one; at each the model says what all so far compose
to. One token's update of the state must be able to be any permutation. A Householder step reflects,
which swaps two elements, if its step size may exceed 1 (negative eigenvalues): S3, whose elements
are at most two swaps, needs M = 2, and S5, at most four, M = 4, in one layer.

Source: DeltaProduct, arXiv 2502.10297, whose recipe is `Recipe`'s default.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from gdp_jax.nn import GatedDeltaProduct


@dataclasses.dataclass(frozen=True)
class Recipe:
  """One run. The model has no convolution and no gates: nothing else can mix the tokens."""

  degree: int = 3  # permutations of how many
  num_householder: int = 2
  allow_neg_eigval: bool = True
  num_heads: int = 8
  head_dim: int = 32
  length: int = 128
  test_length: int = 512
  batch_size: int = 1024
  steps: int = 5000
  learning_rate: float = 1e-3
  short_steps: int = 0  # of the steps, the first ones, at half the length
  seed: int = 0

  @property
  def name(self):
    sign = "negative eigenvalues too" if self.allow_neg_eigval else "positive eigenvalues only"
    return f"S{self.degree}, M = {self.num_householder}, {sign}"


@functools.cache
def multiplication_table(degree: int) -> np.ndarray:
  """[G, G]: the index of the permutation that applies a, then b."""
  elements = list(itertools.permutations(range(degree)))
  index = {p: i for i, p in enumerate(elements)}
  return np.array([[index[tuple(b[i] for i in a)] for b in elements] for a in elements])


def sample(key, recipe: Recipe, batch_size: int, length: int):
  """Random elements [B, T], and the product of all up to each [B, T]."""
  table = jnp.asarray(multiplication_table(recipe.degree))
  tokens = jax.random.randint(key, (batch_size, length), 0, len(table))
  return tokens, jax.lax.associative_scan(lambda a, b: table[a, b], tokens, axis=1)


class Model(nnx.Module):
  """Embedding, one gated delta product, one MLP, a class for each element of the group."""

  def __init__(self, recipe: Recipe, *, dtype=None, rngs: nnx.Rngs):
    size, group = recipe.num_heads * recipe.head_dim, len(multiplication_table(recipe.degree))
    # A product with one-hot tokens, not nnx.Embed: with so few rows that one's gradient, a scatter
    # of all tokens into them, takes a GPU several times as long as everything else.
    self.embed = nnx.Linear(
      group, size, use_bias=False, kernel_init=nnx.initializers.normal(size**-0.5), dtype=dtype,
      rngs=rngs,
    )  # fmt: skip
    self.mixer_norm = nnx.RMSNorm(size, dtype=dtype, rngs=rngs)
    self.mixer = GatedDeltaProduct(
      size, expand_v=1, head_dim=recipe.head_dim, num_heads=recipe.num_heads,
      num_householder=recipe.num_householder, allow_neg_eigval=recipe.allow_neg_eigval,
      use_forget_gate=False, use_output_gate=False, use_short_conv=False, dtype=dtype, rngs=rngs,
    )  # fmt: skip
    self.mlp_norm = nnx.RMSNorm(size, dtype=dtype, rngs=rngs)
    self.up = nnx.Linear(size, 4 * size, dtype=dtype, rngs=rngs)
    self.down = nnx.Linear(4 * size, size, dtype=dtype, rngs=rngs)
    self.head = nnx.Linear(size, group, dtype=dtype, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(jax.nn.one_hot(tokens, self.embed.in_features))
    x = x + self.mixer(self.mixer_norm(x))[0]
    x = x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))
    return self.head(x).astype(jnp.float32)


def train(recipe: Recipe, *, dtype=None, block: int = 100, progress: bool = True) -> dict:
  """Trains on `recipe.length`, tests on `recipe.test_length`.

  Returns:
    The recipe; the loss and the accuracy in training, after each `block` steps; the
    accuracy at each position of longer sequences; the seconds that it took.
  """
  model = Model(recipe, dtype=dtype, rngs=nnx.Rngs(recipe.seed))
  rate = optax.warmup_cosine_decay_schedule(
    0, recipe.learning_rate, min(200, recipe.steps // 5), recipe.steps
  )
  transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-6))
  optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)

  def step(length, carry, key):
    model, optimizer = carry

    def loss(model):
      tokens, products = sample(key, recipe, recipe.batch_size, length)
      logits = model(tokens)
      right = jnp.mean(jnp.argmax(logits, -1) == products)
      return optax.softmax_cross_entropy_with_integer_labels(logits, products).mean(), right

    (value, right), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return (model, optimizer), (value, right)

  @functools.partial(nnx.jit, static_argnums=0)
  def steps(length, model, optimizer, keys):
    return nnx.scan(functools.partial(step, length))((model, optimizer), keys)[1]

  @nnx.jit
  def test(model, key):
    tokens, products = sample(key, recipe, 256, recipe.test_length)
    return jnp.mean(jnp.argmax(model(tokens), -1) == products, axis=0)

  begin, losses, accuracies, seconds = time.perf_counter(), [], [], []
  keys = jax.random.split(jax.random.key(recipe.seed + 1), recipe.steps)
  with tqdm(
    total=recipe.steps, desc=recipe.name, disable=not progress, file=sys.stdout, ncols=120
  ) as bar:
    for first in range(0, recipe.steps, block):
      last = time.perf_counter()
      length = recipe.length // (2 if first < recipe.short_steps else 1)
      value, right = steps(length, model, optimizer, keys[first : first + block])
      losses.append(float(value[-1]))
      seconds.append((time.perf_counter() - last) / len(value))
      accuracies.append(float(right[-1]))
      bar.set_postfix(loss=f"{losses[-1]:.3f}", accuracy=f"{accuracies[-1]:.3f}")
      bar.update(len(value))
  by_position = np.asarray(test(model, jax.random.key(recipe.seed + 2)))
  return dict(
    recipe=dataclasses.asdict(recipe),
    loss=losses,
    accuracy=accuracies,
    accuracy_by_position=[round(float(x), 4) for x in by_position],
    seconds=round(time.perf_counter() - begin, 1),
    seconds_per_step=float(np.median(seconds)),
  )


def main(argv: list[str] | None = None) -> None:
  """Trains recipes from the command line and keeps their curves: the full ones want a GPU."""
  parser = argparse.ArgumentParser(description="State tracking in permutation groups.")
  parser.add_argument("--degree", type=int, default=3, help="permutations of how many")
  parser.add_argument("--num-householder", type=int, nargs="+", default=[1, 2])
  parser.add_argument("--positive", action="store_true", help="also without negative eigenvalues")
  parser.add_argument("--batch-size", type=int, default=Recipe.batch_size)
  parser.add_argument("--steps", type=int, default=Recipe.steps)
  parser.add_argument("--short-steps", type=int, default=0, help="of them, at half the length")
  parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
  parser.add_argument("--json", required=True, help="file for the results")
  options = parser.parse_args(argv)
  results = []
  for M in options.num_householder:
    for allow_neg_eigval in (True, False) if options.positive else (True,):
      recipe = Recipe(
        degree=options.degree, num_householder=M, allow_neg_eigval=allow_neg_eigval,
        batch_size=options.batch_size, steps=options.steps, short_steps=options.short_steps,
      )  # fmt: skip
      results.append(train(recipe, dtype=options.dtype))
      with open(options.json, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
  main()
