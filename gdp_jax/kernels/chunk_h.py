"""The sweep of the state over a sequence's chunks, forward and backward."""

import jax
import jax.numpy as jnp
from jax import lax

from gdp_jax import config, inputs, metadata
from gdp_jax.kernels import pallas
from gdp_jax.metadata import CHUNK_SIZE


def chunk_gated_delta_product_fwd_h(
  k: jax.Array,
  w: jax.Array,
  u: jax.Array,
  g: jax.Array | None = None,
  initial_state: jax.Array | None = None,
  output_final_state: bool = False,
  chunk_size: int = CHUNK_SIZE,
  cu_seqlens: jax.Array | None = None,
  num_householder: int = 1,
  *,
  implementation: str = "pallas",
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """The forward sweep, row chunk by row chunk:

      v_new = u - w S;   S <- 2^G_last S + sum_i 2^(G_last - G_i) k_i v_new_i^T

  Two chunkings meet here: a token chunk of C tokens is M row chunks of C rows, the last ones
  possibly empty, and S is stored at each token chunk's start. The decay of a partial chunk ends at
  its last valid row.

  Args:
    k: keys [B, R, H, K].
    w, u: WY factors [B, R, HV, K] and [B, R, HV, V].
    g: cumulative log2 decay within row chunks [B, R, HV], or None.
    initial_state: [N, HV, K, V], any float dtype, or None for zeros.
    output_final_state: whether to return it.
    chunk_size: C, a power of two of at least 16.
    cu_seqlens: offsets in the row stream, int [N+1], multiples of num_householder; or None.
    num_householder: M, rows of a token.
    implementation: "pallas" or "interpret".

  Returns:
    h: states at the start of each token chunk, k's dtype, [B, NC, HV, K, V]. Packed, NC is
      `metadata.num_chunks(T, N, C)`, chunks in stream order, unused ones 0.
    v_new: [B, R, HV, V], u's dtype; 0 in rows of no sequence.
    final_state: [N, HV, K, V] in fp32, or None.

  Source: Gated Delta Networks, arXiv 2412.06464; `core.ssm.ops.gdp.chunk_h` of Megatron Core.
  """
  return _fwd_h(
    k, u, w, None, None, g, initial_state, output_final_state, chunk_size, cu_seqlens,
    num_householder, implementation, "chunk_gated_delta_product_fwd_h",
  )  # fmt: skip


def chunk_gated_delta_product_fwd_wy_h(
  k: jax.Array,
  v: jax.Array,
  beta: jax.Array,
  A: jax.Array,
  g: jax.Array | None = None,
  initial_state: jax.Array | None = None,
  output_final_state: bool = False,
  cu_seqlens: jax.Array | None = None,
  num_householder: int = 1,
  *,
  implementation: str = "pallas",
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """`recompute_w_u_fwd` and `chunk_gated_delta_product_fwd_h` in one: w and u are never written.

  v_new = Ti (beta (v - 2^G (k S))) is u - w S with one more dependent product, less traffic, and
  less rounding: what is rounded is the difference, not its two parts.

  Args:
    k, v, beta: keys [B, R, H, K], values [B, R, HV, V], step sizes [B, R, HV].
    A: the inverted block Ti [B, R, HV, C], in k's dtype.
    g, initial_state, output_final_state, cu_seqlens, num_householder, implementation: as for
      `chunk_gated_delta_product_fwd_h`.

  Returns:
    h, v_new, final_state as `chunk_gated_delta_product_fwd_h`.

  Source: this project.
  """
  return _fwd_h(
    k, v, None, A, beta, g, initial_state, output_final_state, A.shape[-1], cu_seqlens,
    num_householder, implementation, "chunk_gated_delta_product_fwd_wy_h",
  )  # fmt: skip


def chunk_gated_delta_product_effects(
  k: jax.Array,
  v: jax.Array,
  beta: jax.Array,
  A: jax.Array,
  g: jax.Array | None = None,
  cu_seqlens: jax.Array | None = None,
  num_householder: int = 1,
  *,
  implementation: str = "pallas",
) -> jax.Array:
  """What each sequence does to the state that enters it: S_out = P S_in + F.

  The sweep of the values [v | 0] from the state [0 | I], of which only the end is kept.

  Args:
    k, v, beta, A, g, cu_seqlens, num_householder, implementation: as for
      `chunk_gated_delta_product_fwd_wy_h`.

  Returns:
    [F | P], [N, HV, K, V + K] in fp32.

  Source: this project.
  """
  return _fwd_h(
    k, v, None, A, beta, g, None, True, A.shape[-1], cu_seqlens, num_householder, implementation,
    "chunk_gated_delta_product_effects", effects=True,
  )[2]  # fmt: skip


def _fwd_h(
  k, x, w, A, beta, g, initial_state, output_final_state, C, cu_seqlens, M, implementation, stage,
  effects=False,
):  # fmt: skip
  """The forward sweeps; x is u where there is w, v where there is A."""
  name = "v" if w is None else "u"
  sizes = inputs.check_stage(
    M, **{
      "k": (k, "B R H K"), name: (x, "B R HV V"), "w": (w, "B R HV K"),
      "A": (A, "B R HV C"), "beta": (beta, "B R HV"),
      "g": (g, "B R HV"), "initial_state": (initial_state, "N HV K V"),
    },
  )  # fmt: skip
  B, R, K, HV, V = (sizes[c] for c in ("B", "R", "K", "HV", "V"))
  N, NC, bounds = _sequences(B, R, M, C, cu_seqlens)
  _check_sequences("initial_state", sizes, N)
  flat = lambda x: None if x is None else x.reshape(B * R, *x.shape[2:])
  columns = V + K if effects else V  # of a state
  cfg = config.choose(stage, K, columns, k.dtype, N * HV, M)
  unroll = _unroll(cfg, M)
  h, v_new, final_state = pallas.call(
    _fwd_h_kernel,
    bounds,
    flat(k),
    flat(x),
    flat(w),
    flat(A),
    flat(beta),
    flat(g),
    initial_state,
    grid=(bounds.shape[0], HV, -(-columns // cfg.block_v)),
    out_shape=(
      None if effects else jax.ShapeDtypeStruct((B * NC, HV, K, V), k.dtype),
      None if effects else jax.ShapeDtypeStruct((B * R, HV, V), x.dtype),
      jax.ShapeDtypeStruct((N, HV, K, columns), jnp.float32) if output_final_state else None,
    ),
    config=cfg,
    implementation=implementation,
    name="gdp_" + stage,
    dot=None,
    C=C,
    M=M,
    N=N,
    whole=metadata.all_whole(R, max(M, unroll) * C, cu_seqlens),
    unroll=unroll,
    block_k=cfg.block_k,
    block_v=cfg.block_v,
  )
  if effects:
    return None, None, final_state
  return h.reshape(B, NC, HV, K, V), v_new.reshape(B, R, HV, V), final_state


def _unroll(cfg, M):
  if M % cfg.unroll and cfg.unroll % M:
    raise ValueError(
      f"a Config's unroll must divide num_householder={M} or be a multiple, got {cfg.unroll}"
    )
  return cfg.unroll


def _check_sequences(name, sizes, N):
  if sizes.get("N", N) != N:
    raise ValueError(f"{name} must have N={N} sequences, got {sizes['N']}")


def _sequences(B, R, M, C, cu_seqlens):
  """Number of sequences, of token chunks a batch row, and where they lie."""
  bounds = metadata.sequence_bounds(B, R, M, C, cu_seqlens)
  if cu_seqlens is None:
    return B, -(-(R // M) // C), bounds
  N = cu_seqlens.shape[0] - 1
  return N, metadata.num_chunks(R // M, N, C), bounds


def _fwd_h_kernel(
  bounds_ref,  # [N or N+1, 4]
  k_ref,  # [B*R, H, K]
  x_ref,  # [B*R, HV, V]: u where there is w, v where there is Ti
  w_ref,  # [B*R, HV, K] or None
  Ti_ref,  # [B*R, HV, C] or None, with
  beta_ref,  # [B*R, HV] or None
  g_ref,  # [B*R, HV] or None
  initial_ref,  # [N, HV, K, V] or None
  h_ref,  # [B*NC, HV, K, V] and
  v_new_ref,  # [B*R, HV, V]; both None for effects, with
  final_ref,  # [N, HV, K, V + K]; else [N, HV, K, V] or None
  *,
  dot,
  C,
  M,
  N,
  whole,
  unroll,
  block_k,
  block_v,
):
  """A program owns one sequence of one value head, and block_v columns of its state.

  Sequence N is the padding behind the last offset: the same walk with no valid row writes zeros.
  """
  n, hv, block = (pallas.program_id(i) for i in range(3))
  HV = x_ref.shape[1]
  head = hv // (HV // k_ref.shape[1])
  start, stop, write_stop, chunk0 = (pallas.load_scalar(bounds_ref, n, i) for i in range(4))
  real = n < N
  i = jnp.arange(C, dtype=jnp.int32)
  V, effects = x_ref.shape[2], h_ref is None
  v_cols, v_exists = pallas.columns(block, final_ref.shape[3] if effects else V, block_v)
  x_exists = v_cols < V if effects else v_exists
  k_blocks = pallas.blocks(k_ref.shape[2], block_k)
  state = _State(hv, k_blocks, v_cols, v_exists)

  def row_chunk(c, S, may_be_first):
    first_row = start + c * C
    rows = first_row + i
    valid, written = (pallas.below(rows, end, whole) for end in (stop, write_stop))
    if may_be_first and not effects:
      # Beyond the last valid row there is no chunk, and no place to store its state.
      is_first = None if unroll % M == 0 else lax.rem(c, M) == 0
      keep = pallas.both(pallas.below(first_row, stop, whole), is_first)
      state.store(h_ref, chunk0 + lax.div(c, M), S, keep)
    k = [
      pallas.load(pallas.tile(k_ref, rows, head, cols), pallas.mask(valid, exists))
      for cols, exists in k_blocks
    ]
    x = pallas.load(pallas.tile(x_ref, rows, hv, v_cols), pallas.mask(valid, x_exists))
    x = x.astype(jnp.float32)
    if g_ref is not None:
      g = pallas.load(g_ref.at[rows, hv], valid)
      to_end, g_last = _to_end(g_ref, g, hv, valid, first_row, stop, C)
    if w_ref is not None:
      v_new = x
      for S_b, (cols, exists) in zip(S, k_blocks, strict=True):
        w = pallas.load(pallas.tile(w_ref, rows, hv, cols), pallas.mask(valid, exists))
        v_new -= dot(w, S_b.astype(w.dtype))
    else:
      beta = pallas.load(beta_ref.at[rows, hv], valid)
      kS = sum(dot(k_b, S_b.astype(k_b.dtype)) for k_b, S_b in zip(k, S, strict=True))
      if g_ref is not None:
        kS *= jnp.exp2(g)[:, None]
      Ti = pallas.load(pallas.tile(Ti_ref, rows, hv, i), pallas.mask(valid))
      v_new = _through_unit(dot, Ti, beta[:, None] * (x - kS))
    if not effects:
      view = pallas.tile(v_new_ref, rows, hv, v_cols)
      pallas.store(view, v_new, pallas.mask(written, v_exists))

    if g_ref is not None:
      v_new *= to_end[:, None]
      S = [S_b * jnp.exp2(g_last) for S_b in S]
    v_new = v_new.astype(k_ref.dtype)
    return tuple(S_b + dot(k_b, v_new, trans_a=True) for S_b, k_b in zip(S, k, strict=True))

  def step(s, S):
    for u in range(unroll):
      S = row_chunk(s * unroll + u, S, may_be_first=u % M == 0)
    return S

  if effects:  # of the columns behind those of v, the identity
    S = tuple(jnp.where(cols[:, None] + V == v_cols[None, :], 1.0, 0.0) for cols, _ in k_blocks)
  else:
    S = state.load(initial_ref, jnp.minimum(n, N - 1), real, block_k, block_v)
  S = lax.fori_loop(0, lax.div(write_stop - start + (unroll * C - 1), unroll * C), step, S)
  if final_ref is not None:
    state.store(final_ref, jnp.minimum(n, N - 1), S, real)
  if effects:
    return

  def zero_state(slot, _):
    state.store(h_ref, slot, state.load(None, 0, real, block_k, block_v), None)
    return ()

  # What the table of chunks has room for and these offsets leave unused.
  unused = jnp.where(real, h_ref.shape[0], chunk0)
  lax.fori_loop(unused, h_ref.shape[0], zero_state, ())


def chunk_gated_delta_product_bwd_h(
  q: jax.Array,
  k: jax.Array,
  beta: jax.Array,
  A: jax.Array,
  do: jax.Array,
  dv: jax.Array,
  g: jax.Array | None = None,
  g_tokens: jax.Array | None = None,
  scale: float | None = None,
  dfinal_state: jax.Array | None = None,
  output_dinitial_state: bool = True,
  cu_seqlens: jax.Array | None = None,
  num_householder: int = 1,
  *,
  implementation: str = "pallas",
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """The reverse sweep: row chunk by row chunk, dS being the cotangent of the state that leaves it,

      dv_new = dv + 2^(G_last - G) (k dS);   dres = Ti^T dv_new
      dS <- 2^G_last dS - (beta 2^G k)^T dres;   at a token chunk's first row chunk
      dS <- dS + scale (2^G_t q)^T do

  Args:
    q: queries [B, T, H, K].
    k: keys [B, R, H, K].
    beta: step sizes [B, R, HV].
    A: the inverted block Ti, see `chunk_gated_delta_product_fwd_wy_h`.
    do: cotangent of o [B, T, HV, V].
    dv: what `chunk_gated_delta_product_bwd_o` adds to v_new's cotangent [B, R, HV, V].
    g: cumulative log2 decay within row chunks [B, R, HV], or None; g_tokens: within token chunks
      [B, T, HV].
    scale: default K**-0.5.
    dfinal_state: cotangent of the final state [N, HV, K, V], or None for zeros.
    output_dinitial_state: whether to return the initial state's.
    cu_seqlens: offsets in the row stream, int [N+1], or None.
    num_householder: M.
    implementation: "pallas" or "interpret".

  Returns:
    dh: dS of each row chunk, k's dtype, [B, NC * M, HV, K, V] as from
      `chunk_gated_delta_product_states`; unused ones are not written.
    dres: cotangent of beta (v - 2^G (k S)) [B, R, HV, V], dv's dtype, in dv's place where that is
      not needed any more; 0 in rows of no sequence.
    dinitial_state: [N, HV, K, V] in fp32, or None.

  Source: this project; checked against autodiff of the recurrence.
  """
  M = num_householder
  sizes = inputs.check_stage(
    M, q=(q, "B T H K"), k=(k, "B R H K"), beta=(beta, "B R HV"), A=(A, "B R HV C"),
    do=(do, "B T HV V"), dv=(dv, "B R HV V"),
    g=(g, "B R HV"), g_tokens=(g_tokens, "B T HV"), dfinal_state=(dfinal_state, "N HV K V"),
  )  # fmt: skip
  B, R, K, HV, V, C = (sizes[c] for c in ("B", "R", "K", "HV", "V", "C"))
  if (g is None) != (g_tokens is None):
    raise ValueError("g and g_tokens must both be given, or both be None")
  N, NC, bounds = _sequences(B, R, M, C, cu_seqlens)
  _check_sequences("dfinal_state", sizes, N)
  flat = lambda x: None if x is None else x.reshape(-1, *x.shape[2:])
  cfg = config.choose("chunk_gated_delta_product_bwd_h", K, V, k.dtype, N * HV, M)
  unroll = _unroll(cfg, M)
  dh, dres, dinitial_state = pallas.call(
    _bwd_h_kernel,
    bounds,
    flat(q),
    flat(k),
    flat(beta),
    flat(A),
    flat(do),
    flat(dv),
    flat(g),
    flat(g_tokens),
    dfinal_state,
    grid=(bounds.shape[0], HV, -(-V // cfg.block_v)),
    out_shape=(
      jax.ShapeDtypeStruct((B * NC * M, HV, K, V), k.dtype),
      jax.ShapeDtypeStruct((B * R, HV, V), dv.dtype),
      jax.ShapeDtypeStruct((N, HV, K, V), jnp.float32) if output_dinitial_state else None,
    ),
    in_place={6: 1},  # dres of dv
    config=cfg,
    implementation=implementation,
    name="gdp_chunk_gated_delta_product_bwd_h",
    dot=None,
    scale=K**-0.5 if scale is None else scale,
    C=C,
    M=M,
    N=N,
    whole=metadata.all_whole(R, max(M, unroll) * C, cu_seqlens),
    unroll=unroll,
    block_k=cfg.block_k,
    block_v=cfg.block_v,
  )
  return dh.reshape(B, NC * M, HV, K, V), dres.reshape(B, R, HV, V), dinitial_state


def _bwd_h_kernel(
  bounds_ref,  # [N or N+1, 4]
  q_ref,  # [B*T, H, K]
  k_ref,  # [B*R, H, K]
  beta_ref,  # [B*R, HV]
  Ti_ref,  # [B*R, HV, C]
  do_ref,  # [B*T, HV, V]
  dv_ref,  # [B*R, HV, V]
  g_ref,  # [B*R, HV] or None, with
  g_tokens_ref,  # [B*T, HV] or None
  dfinal_ref,  # [N, HV, K, V] or None
  dh_ref,  # [B*NC*M, HV, K, V]
  dres_ref,  # [B*R, HV, V]
  dinitial_ref,  # [N, HV, K, V] or None
  *,
  dot,
  scale,
  C,
  M,
  N,
  whole,
  unroll,
  block_k,
  block_v,
):
  """A program owns one sequence of one value head, and block_v columns of its state."""
  n, hv, block = (pallas.program_id(i) for i in range(3))
  HV = dv_ref.shape[1]
  head = hv // (HV // k_ref.shape[1])
  start, stop, write_stop, chunk0 = (pallas.load_scalar(bounds_ref, n, i) for i in range(4))
  real = n < N
  i = jnp.arange(C, dtype=jnp.int32)
  v_cols, v_exists = pallas.columns(block, dv_ref.shape[2], block_v)
  k_blocks = pallas.blocks(k_ref.shape[2], block_k)
  state = _State(hv, k_blocks, v_cols, v_exists)

  def row_chunk(c, dS, may_be_first):
    first_row = start + c * C
    rows = first_row + i
    valid, written = (pallas.below(rows, end, whole) for end in (stop, write_stop))
    state.store(dh_ref, chunk0 * M + c, dS, pallas.below(first_row, stop, whole))
    k = [
      pallas.load(pallas.tile(k_ref, rows, head, cols), pallas.mask(valid, exists))
      for cols, exists in k_blocks
    ]
    beta = pallas.load(beta_ref.at[rows, hv], valid)
    dv = pallas.load(pallas.tile(dv_ref, rows, hv, v_cols), pallas.mask(valid, v_exists))
    if g_ref is not None:
      g = pallas.load(g_ref.at[rows, hv], valid)
      to_end, g_last = _to_end(g_ref, g, hv, valid, first_row, stop, C)

    kdS = sum(dot(k_b, dS_b.astype(k_b.dtype)) for k_b, dS_b in zip(k, dS, strict=True))
    if g_ref is not None:
      kdS *= to_end[:, None]
      beta *= jnp.exp2(g)
      dS = [dS_b * jnp.exp2(g_last) for dS_b in dS]
    Ti = pallas.load(pallas.tile(Ti_ref, rows, hv, i), pallas.mask(valid))
    dres = _through_unit(dot, Ti, kdS + dv.astype(jnp.float32), trans_a=True)
    pallas.store(pallas.tile(dres_ref, rows, hv, v_cols), dres, pallas.mask(written, v_exists))
    minus_dres = (dres * -beta[:, None]).astype(k_ref.dtype)  # a product adds for nothing
    if may_be_first:
      dS = through_output(c, first_row, dS)
    return tuple(dS_b + dot(k_b, minus_dres, trans_a=True) for dS_b, k_b in zip(dS, k, strict=True))

  def through_output(c, first_row, dS):
    """dS and what comes to the state that enters a token chunk, through the chunk's own output."""
    tokens = lax.div(first_row, M) + i
    in_sequence = pallas.below(tokens, lax.div(stop, M), whole)
    is_first = None if unroll % M == 0 else lax.rem(c, M) == 0
    view = pallas.tile(do_ref, tokens, hv, v_cols)
    do = pallas.load(view, pallas.mask(in_sequence, v_exists, is_first))
    do = do.astype(jnp.float32) * scale
    if g_ref is not None:
      g_t = pallas.load(g_tokens_ref.at[tokens, hv], pallas.both(in_sequence, is_first))
      do *= jnp.exp2(g_t)[:, None]
    do = do.astype(q_ref.dtype)
    new = []
    for dS_b, (cols, k_exists) in zip(dS, k_blocks, strict=True):
      view = pallas.tile(q_ref, tokens, head, cols)
      q = pallas.load(view, pallas.mask(in_sequence, k_exists, is_first))
      new.append(dS_b + dot(q, do, trans_a=True))
    return new

  steps = lax.div(write_stop - start + (unroll * C - 1), unroll * C)

  def step(s, dS):
    for u in reversed(range(unroll)):
      dS = row_chunk((steps - 1 - s) * unroll + u, dS, may_be_first=u % M == 0)
    return dS

  dS = state.load(dfinal_ref, jnp.minimum(n, N - 1), real, block_k, block_v)
  dS = lax.fori_loop(0, steps, step, dS)
  if dinitial_ref is not None:
    state.store(dinitial_ref, jnp.minimum(n, N - 1), dS, real)


def chunk_gated_delta_product_states(
  k: jax.Array,
  v_new: jax.Array,
  h: jax.Array,
  g: jax.Array | None = None,
  chunk_size: int = CHUNK_SIZE,
  cu_seqlens: jax.Array | None = None,
  num_householder: int = 1,
  *,
  implementation: str = "pallas",
) -> jax.Array:
  """The states at the start of each row chunk, as the backward pass needs them.

  From those of the token chunks, all at once: no sweep.

  Args:
    k: keys [B, R, H, K].
    v_new, h: of `chunk_gated_delta_product_fwd_wy_h`, [B, R, HV, V] and [B, NC, HV, K, V].
    g: cumulative log2 decay within row chunks [B, R, HV], or None.
    chunk_size: C.
    cu_seqlens: offsets in the row stream, int [N+1], or None.
    num_householder: M.
    implementation: "pallas" or "interpret".

  Returns:
    S [B, NC * M, HV, K, V] in k's dtype, row chunk m of token chunk c at c*M + m. Those of a
    partial token chunk's empty row chunks, and of unused chunks, are not written.

  Source: this project.
  """
  M, C = num_householder, chunk_size
  sizes = inputs.check_stage(
    M, k=(k, "B R H K"), v_new=(v_new, "B R HV V"), h=(h, "B NC HV K V"), g=(g, "B R HV"),
  )  # fmt: skip
  if M == 1:
    return h
  B, R, K, HV, V, NC = (sizes[c] for c in ("B", "R", "K", "HV", "V", "NC"))
  tokens = None if cu_seqlens is None else cu_seqlens // M
  bounds = metadata.chunk_bounds(B, R // M, C, tokens)
  flat = lambda x: None if x is None else x.reshape(-1, *x.shape[2:])
  cfg = config.choose("chunk_gated_delta_product_states", K, V, k.dtype)
  blocks = -(-K // cfg.block_k), -(-V // cfg.block_v)
  S = pallas.call(
    _states_kernel,
    bounds,
    flat(k),
    flat(v_new),
    flat(h),
    flat(g),
    grid=(B * NC, HV, blocks[0] * blocks[1]),
    out_shape=jax.ShapeDtypeStruct((B * NC * M, HV, K, V), k.dtype),
    config=cfg,
    implementation=implementation,
    name="gdp_chunk_gated_delta_product_states",
    dot=None,
    C=C,
    M=M,
    whole=metadata.all_whole(R, M * C, cu_seqlens),
    block_k=cfg.block_k,
    block_v=cfg.block_v,
  )
  return S.reshape(B, NC * M, HV, K, V)


def _states_kernel(
  bounds_ref,  # [NC, 3], of the token stream
  k_ref,  # [B*R, H, K]
  v_new_ref,  # [B*R, HV, V]
  h_ref,  # [B*NC, HV, K, V]
  g_ref,  # [B*R, HV] or None
  S_ref,  # [B*NC*M, HV, K, V]
  *,
  dot,
  C,
  M,
  whole,
  block_k,
  block_v,
):
  """A program owns block_k rows and block_v columns of one token chunk's states of one head."""
  c, hv, block = (pallas.program_id(i) for i in range(3))
  V = v_new_ref.shape[2]
  v_blocks = -(-V // block_v)
  head = hv // (v_new_ref.shape[1] // k_ref.shape[1])
  first, stop = (pallas.load_scalar(bounds_ref, c, i) * M for i in range(2))
  i = jnp.arange(C, dtype=jnp.int32)
  k_cols, k_exists = pallas.columns(lax.div(block, v_blocks), k_ref.shape[2], block_k)
  v_cols, v_exists = pallas.columns(lax.rem(block, v_blocks), V, block_v)
  view = lambda ref, slot: ref.at[slot, hv, k_cols[:, None], v_cols[None, :]]

  def store(m, S):
    exists = pallas.below(first + m * C, stop, whole)
    pallas.store(view(S_ref, c * M + m), S, pallas.mask(k_exists, v_exists, exists))

  def row_chunk(m, S):
    store(m, S)
    first_row = first + m * C
    rows = first_row + i
    valid = pallas.below(rows, stop, whole)
    k = pallas.load(pallas.tile(k_ref, rows, head, k_cols), pallas.mask(valid, k_exists))
    v_new = pallas.load(pallas.tile(v_new_ref, rows, hv, v_cols), pallas.mask(valid, v_exists))
    if g_ref is not None:
      g = pallas.load(g_ref.at[rows, hv], valid)
      to_end, g_last = _to_end(g_ref, g, hv, valid, first_row, stop, C)
      v_new = (v_new.astype(jnp.float32) * to_end[:, None]).astype(k.dtype)
      S *= jnp.exp2(g_last)
    return S + dot(k, v_new, trans_a=True)

  has_rows = pallas.below(first, stop, whole)
  S = pallas.load(view(h_ref, c), pallas.mask(k_exists, v_exists, has_rows)).astype(jnp.float32)
  store(M - 1, lax.fori_loop(0, M - 1, row_chunk, S))


class _State:
  """The [K, block_v] part of a state that a program owns, as one tile for each block of K."""

  def __init__(self, hv, k_blocks, v_cols, v_exists):
    self.hv, self.k_blocks, self.v_cols, self.v_exists = hv, k_blocks, v_cols, v_exists

  def load(self, ref, index, where, block_k, block_v):
    """Tiles in fp32 of ref [.., HV, K, V] at `index`; zeros if there is none."""
    if ref is None:
      return tuple(jnp.zeros((block_k, block_v), jnp.float32) for _ in self.k_blocks)
    return tuple(
      pallas.load(self._view(ref, index, cols), self._mask(exists, where)).astype(jnp.float32)
      for cols, exists in self.k_blocks
    )

  def store(self, ref, index, S, where):
    for S_b, (cols, exists) in zip(S, self.k_blocks, strict=True):
      pallas.store(self._view(ref, index, cols), S_b, self._mask(exists, where))

  def _view(self, ref, index, cols):
    return ref.at[index, self.hv, cols[:, None], self.v_cols[None, :]]

  def _mask(self, exists, where):
    return pallas.mask(exists, self.v_exists, where)


def _through_unit(dot, Ti, x, **transposed):
  """Ti x, of which only Ti's part off the diagonal sees x rounded: the diagonal is 1."""
  rounded = x.astype(Ti.dtype)
  return x - rounded.astype(jnp.float32) + dot(Ti, rounded, **transposed)


def _to_end(g_ref, g, hv, valid, first_row, stop, C):
  """2^(G_last - G) of each row, 1 past the end, and G_last, at the last valid row."""
  last = jnp.minimum(first_row + C, stop) - 1
  g_last = pallas.load(g_ref.at[last, hv], None if valid is None else first_row < stop)
  # A row past the end was read as G = 0: its exponent would be of no sign.
  return jnp.exp2(pallas.keep(valid, g_last - g)), g_last
