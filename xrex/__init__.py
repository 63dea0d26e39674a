"""xrex: an asynchronous, sharded embedding runtime for JAX."""

from xrex.context import (
    AsyncEmbContextHandle,
    check_single_shard_per_rank,
    make_context_handle,
    single_shard_per_rank,
)
from xrex.explain import LayoutReport, explain_layout
from xrex.lookup import (
    LookupPin,
    lookup_done,
    lookup_done_per_shard,
    lookup_start,
    lookup_start_per_shard,
)
from xrex.pipeline import Pipeline, make_pipeline
from xrex.pipeline_state import Batch, PipelineState, StepMetrics
from xrex.rules import RowwiseAdagrad, RowwiseAdagradState, UpdateRule
from xrex.tokens import CompressedTokens, compress_token_ids, compress_token_ids_per_shard
from xrex.update import (
    GradientUpdate,
    UpdatePin,
    UpdateResult,
    update_done,
    update_start,
    update_start_per_shard,
)

__version__ = "0.1.0"

__all__ = [
    "AsyncEmbContextHandle",
    "Batch",
    "CompressedTokens",
    "GradientUpdate",
    "LayoutReport",
    "LookupPin",
    "Pipeline",
    "PipelineState",
    "RowwiseAdagrad",
    "RowwiseAdagradState",
    "StepMetrics",
    "UpdatePin",
    "UpdateResult",
    "UpdateRule",
    "check_single_shard_per_rank",
    "compress_token_ids",
    "compress_token_ids_per_shard",
    "explain_layout",
    "lookup_done",
    "lookup_done_per_shard",
    "lookup_start",
    "lookup_start_per_shard",
    "make_context_handle",
    "make_pipeline",
    "single_shard_per_rank",
    "update_done",
    "update_start",
    "update_start_per_shard",
]
