"""Loss and gradients of a batch, whole or in micro-batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrex import placement
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.training import dense_params, inputs, overlap
from xrex.training.config import LossFunction, StepConfig


class Gradients(NamedTuple):
    """Loss and gradients of one batch.

    Attributes:
      loss: shape=()
      aux: what the loss function returned beside the loss; () if nothing. With micro-batches, each
        leaf has a first axis of their number.
      dense: like the trainable part of the dense parameters (`xrex.training.dense_params`)
      embedded: like what the loss function saw of the tables, sharded over the data axis
    """

    loss: jax.Array
    aux: Any
    dense: Any
    embedded: Any


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
    embedded: Any,
    batch_inputs: Any,
    *,
    beside: Exchange = NO_EXCHANGE,
) -> tuple[Gradients, Any]:
    """Loss and gradients of one batch, with an exchange beside the backward pass.

    Args:
      loss_fn: `loss_fn(params, embedded, inputs)` returns a floating-point scalar, or (scalar,
        aux).
      params: the dense parameters.
      embedded: rows of the tables; any pytree.
      batch_inputs: any pytree.
      beside: what to exchange. It is not issued before the loss is known, the backward pass does
        not begin before what it sends is there, and its last weight gradient waits for what
        arrives, if it can (see `xrex.training.overlap`): so the exchange travels beside the
        backward pass.

    Returns:
      The gradients, and what arrives.

    Raises:
      ValueError: the loss is not a floating-point scalar.
    """
    trainable, fixed = dense_params.split(params)

    def of_trainable(trainable: Any, embedded: Any) -> tuple[jax.Array, Any]:
        return loss_and_aux(loss_fn(dense_params.merge(trainable, fixed), embedded, batch_inputs))

    loss, backward, aux = jax.vjp(of_trainable, trainable, embedded, has_aux=True)
    cotangent = jnp.ones_like(loss)
    _, cotangent, ready = jax.lax.optimization_barrier((loss, cotangent, beside.ready))
    (dense, of_embedded), arrived = overlap.run_beside(backward, cotangent, beside.send(ready))
    return Gradients(loss, aux, dense, of_embedded), arrived


def loss_and_aux(returned: Any) -> tuple[jax.Array, Any]:
    """The loss, and what a loss function returned beside it.

    Raises:
      ValueError: the loss is not a floating-point scalar.
    """
    loss, aux = returned, ()
    if isinstance(returned, tuple) and len(returned) == 2:
        loss, aux = returned
    is_number = isinstance(loss, jax.Array | np.ndarray | np.generic | float)
    if not is_number or np.shape(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        error = ValueError(
            f"loss_fn must return a floating-point scalar, not {_describe(returned)}"
        )
        error.add_note("Return the loss alone, or (loss, aux) with any pytree of arrays as aux.")
        raise error
    return jnp.asarray(loss), aux


def _describe(value: Any) -> str:
    """What a loss function returned, for an error."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"{value.dtype}{value.shape}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(map(_describe, value)) or 'nothing'}"
    return "None" if value is None else f"a {type(value).__name__}"


def gradients_of(
    config: StepConfig,
    params: Any,
    embedded: Any,
    batch_inputs: Any,
    *,
    beside: Exchange = NO_EXCHANGE,
) -> tuple[Gradients, Any]:
    """`loss_and_gradients` of a pipeline's batch, averaged over its micro-batches.

    Each rank cuts its own tokens, and its own part of each leaf of the inputs that is per example,
    into runs, so nothing moves between ranks; every micro-batch gets the other leaves whole. Totals
    are float32 (or wider), whatever the parameters' dtype. The exchange travels beside the last
    micro-batch's backward pass.
    """
    steps, loss_fn, handle = config.accumulation_steps, config.loss_fn, config.handle
    if steps == 1:
        gradients, arrived = loss_and_gradients(
            loss_fn, params, embedded, batch_inputs, beside=beside
        )
        return gradients._replace(embedded=_pinned(handle, gradients.embedded)), arrived
    split, whole = inputs.split(config, batch_inputs)
    parts = _cut(handle, (embedded, split), steps)

    def of_part(part: Any, beside: Exchange = NO_EXCHANGE) -> tuple[Gradients, Any]:
        embedded, split = part
        return loss_and_gradients(
            loss_fn, params, embedded, inputs.merge(split, whole), beside=beside
        )

    def accumulate(total: Any, part: Any) -> tuple[Any, Any]:
        gradients, _ = of_part(part)
        return _add(total, (gradients.loss, gradients.dense)), (gradients.embedded, gradients.aux)

    last, arrived = of_part(jax.tree.map(lambda x: x[-1], parts), beside)
    # Not from the last one's gradients: the others would wait for the exchange with them.
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, _total_dtype(x)), (last.loss, last.dense))
    total, (of_parts, aux) = jax.lax.scan(
        accumulate, nothing, jax.tree.map(lambda x: x[:-1], parts)
    )
    total = _add(total, (last.loss, last.dense))
    loss, dense = jax.tree.map(
        lambda x, like: (x / jnp.asarray(steps, x.dtype)).astype(like.dtype),
        total,
        (last.loss, last.dense),
    )
    of_parts, aux = jax.tree.map(
        lambda x, last: jnp.concatenate([x, last[None]]), (of_parts, aux), (last.embedded, last.aux)
    )
    of_embedded = jax.tree.map(
        lambda x: _uncut(handle, (x.astype(jnp.float32) / steps).astype(x.dtype)), of_parts
    )
    return Gradients(loss, aux, dense, _pinned(handle, of_embedded)), arrived


def _total_dtype(x: jax.Array) -> jax.typing.DTypeLike:
    return x.dtype if x.dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, part)


def _pinned(handle: AsyncEmbContextHandle, embedded: Any) -> Any:
    """The gradients of rows as they travel: XLA would replicate those of some losses."""
    return jax.tree.map(
        lambda x: placement.constrain(handle, x, placement.per_example_spec(handle, x.ndim)),
        embedded,
    )


def _cut(handle: AsyncEmbContextHandle, tree: Any, steps: int) -> Any:
    """Each rank's part of every leaf in `steps` runs: (n, ...) -> (steps, n / steps, ...)."""
    spec = placement.token_spec(handle)
    cut = placement.shard_map(
        handle,
        lambda x: x.reshape(steps, -1, *x.shape[1:]),
        (spec,),
        placement.micro_batch_spec(handle),
    )
    return jax.tree.map(lambda x: cut(placement.place(handle, x, spec)), tree)


def _uncut(handle: AsyncEmbContextHandle, x: jax.Array) -> jax.Array:
    """Undoes `_cut` for one array."""
    spec = placement.micro_batch_spec(handle)
    uncut = placement.shard_map(
        handle,
        lambda x: x.reshape(-1, *x.shape[2:]),
        (spec,),
        placement.token_spec(handle),
    )
    return uncut(placement.place(handle, x, spec))
