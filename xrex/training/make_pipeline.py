"""Makes a pipeline of a model: of tables and features, or of one table."""

import inspect
from collections.abc import Callable
from typing import Any, overload

from xrex.checks import check_devices, check_vocab
from xrex.embeddings.embeddings import Embeddings
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.layout.layout import is_positive_integer
from xrex.rules.base import RuleOrSchedule
from xrex.table_set import TableSet, TableStack
from xrex.training.config import DenseOptimizer, LossFunction, StepConfig
from xrex.training.pipeline import Pipeline
from xrex.training.single_table import SingleTable


@overload
def make_pipeline(
    embeddings: Embeddings,
    loss_fn: LossFunction,
    dense_optimizer: DenseOptimizer,
    *,
    staleness: int = 0,
    accumulation_steps: int = 1,
    per_example: Any = None,
) -> Pipeline: ...


@overload
def make_pipeline(
    handle: AsyncEmbContextHandle,
    rule: RuleOrSchedule,
    loss_fn: LossFunction,
    dense_optimizer: DenseOptimizer,
    *,
    vocab: int,
    staleness: int = 0,
    accumulation_steps: int = 1,
    per_example: Any = None,
) -> Pipeline: ...


def make_pipeline(
    *model: Any,
    staleness: int = 0,
    accumulation_steps: int = 1,
    per_example: Any = None,
    **named: Any,
) -> Pipeline:
    """Makes the training steps of a model.

    `make_pipeline(embeddings, loss_fn, dense_optimizer)` for tables and features, or
    `make_pipeline(handle, rule, loss_fn, dense_optimizer, vocab=...)` for one table whose ids are
    the batch's.

    Args:
      embeddings: the tables and features; each table has its rule.
      handle: the layout of the one table.
      rule: its update rule, or a function from a batch's number (a traced int32) to one, for
        schedules: `lambda step: xrex.RowwiseAdagrad(learning_rate=schedule(step))`.
      vocab: its rows.
      loss_fn: `loss_fn(dense_params, embedded, inputs)` returns the loss, a floating-point scalar,
        or (loss, aux) with any pytree of arrays as aux, which reaches the metrics. `embedded` are
        the features' rows by name, (batch_size, width) or (batch_size, max_ids, width), or the rows
        of the one table, (tokens_per_batch, emb_width); of the table's dtype, sharded over the data
        axis.
      dense_optimizer: any `optax.GradientTransformation`; one with extra arguments gets `value`
        (the loss), `grad` and `value_fn`.
      staleness: 0 for exact synchronous training, 1 to overlap.
      accumulation_steps: micro-batches in a batch. The loss is called for each, with its part of
        the rows and of every leaf of the inputs that is per example, and with all other leaves
        (constants, counters, random keys) whole; loss and gradients are averaged in float32, and
        tables and dense model are updated once.
      per_example: which leaves of the inputs are per example: a tree prefix of booleans, such as
        {"labels": True, "class_weights": False}. By default those whose first axis is `batch_size`
        (or `tokens_per_batch`) long. Name them where examples have several tokens each, or where a
        constant happens to be as long. Matters to `accumulation_steps` alone.

    Raises:
      ValueError: a parameter is out of its range, micro-batches do not divide a rank's examples, or
        the mesh has no devices.
      TypeError: an argument is missing or unknown.
    """
    first = model[0] if model else named.get("embeddings")
    of: Callable[..., Any] = _model_of_table
    if isinstance(first, Embeddings):
        of = _model_of_embeddings
    try:
        arguments = inspect.signature(of).bind(*model, **named)
    except TypeError as error:
        raise TypeError(f"make_pipeline: {error}") from None
    tables, loss_fn, dense_optimizer = of(*arguments.args, **arguments.kwargs)
    check_devices(tables.handle)
    if staleness not in (0, 1) or isinstance(staleness, bool):
        raise ValueError(f"staleness={staleness!r} must be 0 (synchronous) or 1 (overlapped)")
    if not is_positive_integer(accumulation_steps):
        raise ValueError(f"accumulation_steps={accumulation_steps!r} must be a positive integer")
    per_rank = tables.batch_size // tables.handle.group_size
    if per_rank % accumulation_steps:
        raise ValueError(
            f"accumulation_steps={accumulation_steps} does not divide the "
            f"{per_rank} tokens of each rank"
        )
    steps = int(accumulation_steps)
    return Pipeline(
        StepConfig(tables, loss_fn, dense_optimizer, int(staleness), steps, per_example)
    )


def _model_of_embeddings(
    embeddings: Embeddings, loss_fn: LossFunction, dense_optimizer: DenseOptimizer
) -> tuple[TableSet, LossFunction, DenseOptimizer]:
    return embeddings, loss_fn, dense_optimizer


def _model_of_table(
    handle: AsyncEmbContextHandle,
    rule: RuleOrSchedule,
    loss_fn: LossFunction,
    dense_optimizer: DenseOptimizer,
    *,
    vocab: int,
) -> tuple[TableSet, LossFunction, DenseOptimizer]:
    check_devices(handle)
    check_vocab(vocab)
    return SingleTable(TableStack(handle, rule, vocab)), loss_fn, dense_optimizer
