"""Where each leaf of the pipeline's state lies, and how a state of any arrays comes there.

Every step returns its state in these shardings and with these types: so the next one finds the
program that is compiled already. A state may be put together from saved arrays, NumPy's or JAX's,
whole or in parts; what lies elsewhere is brought to its place at the next call.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrex import placement
from xrex.checks import check_fits
from xrex.layout.handle import AsyncEmbContextHandle
from xrex.lookup import LookupPin
from xrex.tokens import CompressedTokens, compressed_specs
from xrex.training import dense_params
from xrex.training.state import PipelineState, StartedLookup, is_in_flight
from xrex.update import GradientUpdate, update_specs


def in_place(handle: AsyncEmbContextHandle, state: PipelineState) -> PipelineState:
    """The state with every leaf on the mesh; leaves that are in their places are not copied.

    The batch that is held is not looked at.

    Raises:
      ValueError: a leaf was donated to an earlier call, or has an integer that does not fit in the
        type that it gets on the devices.
      TypeError: a dense leaf is no array or number.
    """
    batch, state = state.current_batch, state._replace(current_batch=None)
    for path, leaf in jax.tree.leaves_with_path(state):
        if isinstance(leaf, jax.Array) and not _is_traced(leaf) and leaf.is_deleted():
            error = ValueError(
                f"the state's {jax.tree_util.keystr(path).lstrip('.')} was donated to an earlier "
                "call, which returned a newer state"
            )
            error.add_note("Use only the newest state; `run(...).state` is the newest of a run.")
            raise error
        if not isinstance(leaf, jax.Array):  # In every step but the first they all are.
            check_fits(jax.tree_util.keystr(path).lstrip("."), leaf)
    dense_params.check("dense_params", state.dense_params)
    dense_params.check("optimizer_state", state.optimizer_state)
    # One type, whatever the number was saved as.
    state = state._replace(step=_as_step(state.step))
    shardings = state_shardings(handle, state)
    state = jax.tree.map(
        lambda wanted, part: jax.tree.map(lambda leaf: _put(leaf, wanted), part), shardings, state
    )
    return state._replace(current_batch=batch)


def state_shardings(handle: AsyncEmbContextHandle, state: PipelineState) -> Any:
    """The shardings of a state that holds no batch: a tree prefix of it, with a leaf for each leaf.

    Dense parameters and the optimizer's state stay as they came, if that was on the mesh.
    """

    def chosen(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not _is_traced(leaf):
            if placement.is_on_mesh(handle, leaf):
                return placement.as_returned(handle, leaf)
        elif isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            return leaf.sharding
        return placement.sharding(handle, placement.REPLICATED, np.ndim(leaf))

    return PipelineState(
        table=_shardings(handle, state.table, placement.table_spec(handle)),
        rule_state=_shardings(
            handle, state.rule_state, placement.state_specs(handle, state.rule_state)
        ),
        dense_params=jax.tree.map(chosen, state.dense_params),
        optimizer_state=jax.tree.map(chosen, state.optimizer_state),
        step=_shardings(handle, state.step, placement.REPLICATED),
        current_lookup=in_flight_shardings(handle, state.current_lookup),
        previous_update=in_flight_shardings(handle, state.previous_update),
    )


def in_flight_shardings(handle: AsyncEmbContextHandle, in_flight: Any) -> Any:
    """Those of lookups that were started, or of deferred updates: of arrays, or of shapes.

    One for all that the bags have, and also where there are none.
    """

    def of(each: StartedLookup | GradientUpdate) -> Any:
        is_update = isinstance(each, GradientUpdate)
        specs = update_specs(handle) if is_update else _lookup_specs(handle)
        # The next batch may have weights where this one has none.
        bags = placement.sharding(handle, placement.token_spec(handle), 1)
        return _shardings(handle, each._replace(bags=None), specs)._replace(bags=bags)

    return jax.tree.map(of, in_flight, is_leaf=is_in_flight)


def _lookup_specs(handle: AsyncEmbContextHandle) -> StartedLookup:
    tokens: CompressedTokens = compressed_specs(handle)
    return StartedLookup(tokens, LookupPin(placement.received_spec(handle)))  # type: ignore[arg-type]


def _shardings(handle: AsyncEmbContextHandle, tree: Any, specs: Any) -> Any:
    """The sharding of each leaf; specs are a prefix of the tree."""
    return jax.tree.map(
        lambda spec, part: jax.tree.map(
            lambda leaf: placement.sharding(handle, spec, np.ndim(leaf)), part
        ),
        specs,
        tree,
        is_leaf=_is_spec,
    )


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, jax.sharding.PartitionSpec)


def _put(leaf: Any, wanted: Any) -> Any:
    if _is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, jax.Array) and leaf.sharding == wanted and not placement.is_weak(leaf):
        return leaf
    return placement.put_copy(leaf, wanted)


def _as_step(step: Any) -> Any:
    if isinstance(step, jax.ShapeDtypeStruct) or _is_traced(step):
        return step
    if isinstance(step, jax.Array):
        return step if step.dtype == jnp.int32 else step.astype(jnp.int32)
    return jnp.asarray(step, jnp.int32)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)
