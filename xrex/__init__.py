"""xrex: an asynchronous, sharded embedding runtime for JAX."""

from xrex.checked_pmap.pmap import pmap
from xrex.embeddings.embeddings import Embeddings
from xrex.embeddings.feature import Feature, Ragged
from xrex.embeddings.table import Table
from xrex.layout.explain import LayoutReport, explain_layout
from xrex.layout.handle import (
    AsyncEmbContextHandle,
    check_single_shard_per_rank,
    make_context_handle,
    single_shard_per_rank,
)
from xrex.layout.layout import Layout
from xrex.lookup import (
    LookupPin,
    lookup_done,
    lookup_done_per_shard,
    lookup_start,
    lookup_start_per_shard,
)
from xrex.rules import RowwiseAdagrad, RowwiseAdagradState, UpdateRule
from xrex.tokens import (
    CompressedTokens,
    UniqueTokens,
    compress_token_ids,
    compress_token_ids_per_shard,
)
from xrex.training.make_pipeline import make_pipeline
from xrex.training.pipeline import Pipeline
from xrex.training.run import Run
from xrex.training.state import Batch, PipelineState, StepMetrics
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
    "Embeddings",
    "Feature",
    "GradientUpdate",
    "Layout",
    "LayoutReport",
    "LookupPin",
    "Pipeline",
    "PipelineState",
    "Ragged",
    "RowwiseAdagrad",
    "RowwiseAdagradState",
    "Run",
    "StepMetrics",
    "Table",
    "UniqueTokens",
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
    "pmap",
    "single_shard_per_rank",
    "update_done",
    "update_start",
    "update_start_per_shard",
]
