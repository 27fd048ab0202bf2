"""The gated delta product for JAX."""

from gdp_jax.chunk import chunk_gated_delta_product
from gdp_jax.fused_recurrent import fused_recurrent_gated_delta_product, rollback
from gdp_jax.inputs import check_inputs
from gdp_jax.metadata import segment_ids_to_cu_seqlens
from gdp_jax.prepare import prepare
from gdp_jax.reference import recurrent_gated_delta_product

__version__ = "0.1.0"

__all__ = [
  "check_inputs",
  "chunk_gated_delta_product",
  "fused_recurrent_gated_delta_product",
  "prepare",
  "recurrent_gated_delta_product",
  "rollback",
  "segment_ids_to_cu_seqlens",
]
