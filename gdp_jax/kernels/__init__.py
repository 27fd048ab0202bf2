"""The stages as Pallas kernels (Triton backend), each by itself. `gdp_jax.xla` has their twins."""

from gdp_jax.kernels.chunk_h import (
  chunk_gated_delta_product_bwd_h,
  chunk_gated_delta_product_effects,
  chunk_gated_delta_product_fwd_h,
  chunk_gated_delta_product_fwd_wy_h,
  chunk_gated_delta_product_states,
)
from gdp_jax.kernels.chunk_o import (
  chunk_gated_delta_product_bwd_o,
  chunk_gated_delta_product_fwd_o,
)
from gdp_jax.kernels.cumsum import chunk_local_cumsum
from gdp_jax.kernels.fused_recurrent import fused_recurrent_gated_delta_product_fwd
from gdp_jax.kernels.prepare import prepare_fwd
from gdp_jax.kernels.scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
from gdp_jax.kernels.solve_tril import solve_tril
from gdp_jax.kernels.wy_fast import chunk_gated_delta_product_bwd_wy, recompute_w_u_fwd

__all__ = [
  "chunk_gated_delta_product_bwd_h",
  "chunk_gated_delta_product_bwd_o",
  "chunk_gated_delta_product_bwd_wy",
  "chunk_gated_delta_product_effects",
  "chunk_gated_delta_product_fwd_h",
  "chunk_gated_delta_product_fwd_o",
  "chunk_gated_delta_product_fwd_wy_h",
  "chunk_gated_delta_product_states",
  "chunk_local_cumsum",
  "chunk_scaled_dot_kkt_fwd",
  "fused_recurrent_gated_delta_product_fwd",
  "prepare_fwd",
  "recompute_w_u_fwd",
  "solve_tril",
]
