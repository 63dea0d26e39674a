"""Loss and gradients of a batch, whole or in micro-batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrex import placement
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.training import overlap

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


class Exchange(NamedTuple):
    """An exchange to be issued between the two passes.

    Attributes:
      ready: what it sends; any pytree
      send: issues it; returns what arrives
    """

    ready: Any = ()
    send: Callable[[Any], Any] = lambda nothing: nothing


NO_EXCHANGE = Exchange()


def loss_and_gradients(
    loss_fn: LossFunction,
    params: Any,
    rows: jax.Array,
    inputs: Any,
    *,
    beside: Exchange = NO_EXCHANGE,
) -> tuple[Gradients, Any]:
    """Loss and gradients of one batch, with an exchange beside the backward pass.

    Args:
      loss_fn: `loss_fn(params, rows, inputs) -> ()`.
      params: the dense parameters.
      rows: (tokens_per_batch, emb_width).
      inputs: any pytree.
      beside: what to exchange. It is not issued before the loss is known, the backward pass does
        not begin before what it sends is there, and its last weight gradient waits for what
        arrives, if it can (see `xrex.training.overlap`): so the exchange travels beside the
        backward pass.

    Returns:
      The gradients, and what arrives.

    Raises:
      ValueError: the loss is not a scalar.
    """
    loss, backward = jax.vjp(lambda params, rows: loss_fn(params, rows, inputs), params, rows)
    if jnp.shape(loss) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"loss_fn must return a floating-point scalar, not {loss.dtype}{jnp.shape(loss)}"
        )
    cotangent = jnp.ones_like(loss)
    _, cotangent, ready = jax.lax.optimization_barrier((loss, cotangent, beside.ready))
    gradients, arrived = overlap.run_beside(backward, cotangent, beside.send(ready))
    return Gradients(loss, *gradients), arrived


def accumulated_gradients(
    handle: AsyncEmbContextHandle,
    loss_fn: LossFunction,
    params: Any,
    rows: jax.Array,
    inputs: Any,
    *,
    steps: int,
    beside: Exchange = NO_EXCHANGE,
) -> tuple[Gradients, Any]:
    """`loss_and_gradients`, averaged over `steps` micro-batches.

    Each rank cuts its own tokens and its own part of each leaf of `inputs` into `steps` runs, so
    nothing moves between ranks. The exchange travels beside the last micro-batch's backward pass.
    """
    if steps == 1:
        return loss_and_gradients(loss_fn, params, rows, inputs, beside=beside)
    parts = _split(handle, (rows, inputs), steps)

    def accumulate(total: Any, part: Any) -> tuple[Any, jax.Array]:
        gradients, _ = loss_and_gradients(loss_fn, params, *part)
        total = jax.tree.map(jnp.add, total, (gradients.loss, gradients.dense))
        return total, gradients.rows

    last, arrived = loss_and_gradients(
        loss_fn, params, *jax.tree.map(lambda x: x[-1], parts), beside=beside
    )
    # Not from the last one's gradients: the others would wait for the exchange with them.
    nothing = jax.tree.map(jnp.zeros_like, (last.loss, last.dense))
    total, row_gradients = jax.lax.scan(accumulate, nothing, jax.tree.map(lambda x: x[:-1], parts))
    total = jax.tree.map(jnp.add, total, (last.loss, last.dense))
    row_gradients = jnp.concatenate([row_gradients, last.rows[None]])
    loss, dense, row_gradients = jax.tree.map(
        lambda x: x / jnp.asarray(steps, x.dtype), (*total, row_gradients)
    )
    return Gradients(loss, dense, _merge(handle, row_gradients)), arrived


def _split(handle: AsyncEmbContextHandle, tree: Any, steps: int) -> Any:
    """Each rank's part of every leaf in `steps` runs: (n, ...) -> (steps, n / steps, ...)."""
    spec = placement.token_spec(handle)
    split = placement.shard_map(
        handle,
        lambda x: x.reshape(steps, -1, *x.shape[1:]),
        (spec,),
        placement.micro_batch_spec(handle),
    )
    return jax.tree.map(lambda x: split(placement.place(handle, x, spec)), tree)


def _merge(handle: AsyncEmbContextHandle, x: jax.Array) -> jax.Array:
    """Undoes `_split` for one array."""
    spec = placement.micro_batch_spec(handle)
    merge = placement.shard_map(
        handle,
        lambda x: x.reshape(-1, *x.shape[2:]),
        (spec,),
        placement.token_spec(handle),
    )
    return merge(placement.place(handle, x, spec))
