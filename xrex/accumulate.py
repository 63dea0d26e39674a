"""Loss and gradients of a batch, whole or in micro-batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrex import partition
from xrex.context import AsyncEmbContextHandle

LossFunction = Callable[[Any, jax.Array, Any], jax.Array]


class Gradients(NamedTuple):
    """Loss and gradients of one batch.

    Attributes:
      loss: shape=()
      dense: like the dense parameters
      rows: shape=(tokens_per_batch, emb_width), the rows' dtype, sharded over the data axis
    """

    loss: jax.Array
    dense: Any
    rows: jax.Array


def loss_and_gradients(
    loss_fn: LossFunction, params: Any, rows: jax.Array, inputs: Any, *, in_flight: Any = ()
) -> tuple[Gradients, Any]:
    """Loss and gradients of one batch, with an exchange tied in between the two passes.

    Args:
      loss_fn: `loss_fn(params, rows, inputs) -> ()`.
      params: the dense parameters.
      rows: (tokens_per_batch, emb_width).
      inputs: any pytree.
      in_flight: arrays about to be exchanged. What is returned for them is not available before
        the loss is known, and the backward pass does not begin before they are there: so their
        exchange finds the whole backward pass to travel beside.

    Returns:
      The gradients, and `in_flight`.

    Raises:
      ValueError: the loss is not a scalar.
    """
    loss, backward = jax.vjp(lambda params, rows: loss_fn(params, rows, inputs), params, rows)
    if jnp.shape(loss) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"loss_fn must return a floating-point scalar, not {loss.dtype}{jnp.shape(loss)}"
        )
    cotangent = jnp.ones_like(loss)
    _, cotangent, in_flight = jax.lax.optimization_barrier((loss, cotangent, in_flight))
    return Gradients(loss, *backward(cotangent)), in_flight


def accumulated_gradients(
    handle: AsyncEmbContextHandle,
    loss_fn: LossFunction,
    params: Any,
    rows: jax.Array,
    inputs: Any,
    *,
    steps: int,
    in_flight: Any = (),
) -> tuple[Gradients, Any]:
    """`loss_and_gradients`, averaged over `steps` micro-batches.

    Each rank cuts its own tokens and its own part of each leaf of `inputs` into `steps` runs, so
    nothing moves between ranks. The exchange of `in_flight` travels beside the last micro-batch's
    backward pass.
    """
    if steps == 1:
        return loss_and_gradients(loss_fn, params, rows, inputs, in_flight=in_flight)
    parts = _split(handle, (rows, inputs), steps)

    def accumulate(total: Any, part: Any) -> tuple[Any, jax.Array]:
        gradients, _ = loss_and_gradients(loss_fn, params, *part)
        total = jax.tree.map(jnp.add, total, (gradients.loss, gradients.dense))
        return total, gradients.rows

    last, in_flight = loss_and_gradients(
        loss_fn, params, *jax.tree.map(lambda x: x[-1], parts), in_flight=in_flight
    )
    total, row_gradients = jax.lax.scan(
        accumulate, (last.loss, last.dense), jax.tree.map(lambda x: x[:-1], parts)
    )
    row_gradients = jnp.concatenate([row_gradients, last.rows[None]])
    loss, dense, row_gradients = jax.tree.map(
        lambda x: x / jnp.asarray(steps, x.dtype), (*total, row_gradients)
    )
    return Gradients(loss, dense, _merge(handle, row_gradients)), in_flight


def _split(handle: AsyncEmbContextHandle, tree: Any, steps: int) -> Any:
    """Each rank's part of every leaf in `steps` runs: (n, ...) -> (steps, n / steps, ...)."""
    spec = partition.token_spec(handle)
    split = partition.shard_map(
        handle,
        lambda x: x.reshape(steps, -1, *x.shape[1:]),
        (spec,),
        partition.micro_batch_spec(handle),
    )
    return jax.tree.map(lambda x: split(partition.place(handle, x, spec)), tree)


def _merge(handle: AsyncEmbContextHandle, x: jax.Array) -> jax.Array:
    """Undoes `_split` for one array."""
    spec = partition.micro_batch_spec(handle)
    merge = partition.shard_map(
        handle,
        lambda x: x.reshape(-1, *x.shape[2:]),
        (spec,),
        partition.token_spec(handle),
    )
    return merge(partition.place(handle, x, spec))
