"""The state of the training pipeline, named by age, and what goes in and out of a step."""

from typing import Any, NamedTuple

import jax

from xrex.lookup import LookupPin
from xrex.pooling import Bags
from xrex.tokens import CompressedTokens
from xrex.update import GradientUpdate, UpdateResult


class Batch(NamedTuple):
    """One batch of a training stream.

    Attributes:
      token_ids: shape=(tokens_per_batch,), integers; of `Embeddings` the ids of each feature, by
        its name (see `Feature`)
      inputs: what the loss needs besides the rows: any pytree of arrays and numbers, random keys
        among them. Leaves whose first axis divides evenly are sharded over the data axis, others
        replicated.

    Both are copied: their memory may be written to as soon as the call that takes the batch
    returns.
    """

    token_ids: Any
    inputs: Any


class StartedLookup(NamedTuple):
    """What has been started for a batch before its step.

    Attributes:
      tokens: the batch's distinct ids
      rows: its rows in flight
      bags: where its ids are pooled; None where each has a row of its own
    """

    tokens: CompressedTokens
    rows: LookupPin
    bags: Bags | None = None


class PipelineState(NamedTuple):
    """Everything that a step reads and writes: a plain pytree.

    Attributes:
      table: shape=(vocab, emb_width), sharded `P(None, table_axis)`; of `Embeddings` one for each
        stack, by its name. So it is with all that belongs to a table.
      rule_state: state of the table's update rule
      dense_params: parameters of the dense model; those that are no floating-point numbers are
        left alone
      optimizer_state: state of the dense optimizer
      step: batches trained so far.  # shape=(), dtype=jnp.int32
      current_batch: batch `step`, which the next step trains on; None when idle
      current_lookup: what was started for it; None when idle, and with staleness 0, where its own
        step reads the rows
      previous_update: gradients of batch `step - 1`, which the next step or `flush` applies; not
        pending where there are none to apply; None when idle, and with staleness 0
    """

    table: jax.Array
    rule_state: Any
    dense_params: Any
    optimizer_state: Any
    step: jax.Array
    current_batch: Batch | None = None
    current_lookup: StartedLookup | None = None
    previous_update: GradientUpdate | None = None

    @property
    def has_pending_update(self) -> bool:
        """Whether gradients of the batch before are still to be applied. Waits for them."""
        updates = jax.tree.leaves(self.previous_update, is_leaf=is_in_flight)
        return any(bool(update.pending) for update in updates)


class StepMetrics(NamedTuple):
    """What one step tells, replicated.

    Attributes:
      loss: of the batch that was trained.  # shape=(), the loss function's dtype
      skipped: whether the batch changed nothing at all: neither the dense parameters, nor the
        optimizer's state, nor table, rule state and clock. So it is when a gradient, a bound of the
        sums of gradients, the rule's learning rate or what the optimizer made of it is not finite.
        The loss itself does not decide: it may be infinite where its gradients are not.
        # shape=(), dtype=bool
      dropped: its tokens with an id inside the table that found no room in `num_unique`: those of
        the largest ids. They trained nothing. Watch it, or make `num_unique` large enough.
        # shape=(), dtype=jnp.int32
      update: the result of the table update that this call applied: with staleness 1 that of the
        batch before, except in `finish`, where it is its own. Not valid, and zeros, where there was
        none: in the first step, after a skipped batch, after `flush`. Of `Embeddings` one for each
        stack; what it drops there are places without an id.
      aux: what the loss function returned beside the loss; () if nothing
      out_of_range: ids of the batch outside their tables; of `Embeddings`.  # shape=()
      cut: ids of the batch left out for lack of room in a bag's `max_ids` or in `capacity`; of
        `Embeddings`.  # shape=()
    """

    loss: jax.Array
    skipped: jax.Array
    dropped: jax.Array
    update: UpdateResult
    aux: Any = ()
    out_of_range: Any = None
    cut: Any = None


def detach_bags(state: PipelineState) -> tuple[PipelineState, Any]:
    """A state without the bags of what is in flight, and those.

    They are not donated with it: of the next batch they may be others, or none.
    """
    in_flight = (state.current_lookup, state.previous_update)
    bags = jax.tree.map(lambda each: each.bags, in_flight, is_leaf=is_in_flight)
    lookup, update = jax.tree.map(
        lambda each: each._replace(bags=None), in_flight, is_leaf=is_in_flight
    )
    return state._replace(current_lookup=lookup, previous_update=update), bags


def attach_bags(state: PipelineState, bags: Any) -> PipelineState:
    """Undoes `detach_bags`."""
    lookup, update = jax.tree.map(
        lambda each, bags: each._replace(bags=bags),
        (state.current_lookup, state.previous_update),
        bags,
        is_leaf=is_in_flight,
    )
    return state._replace(current_lookup=lookup, previous_update=update)


def is_in_flight(part: Any) -> bool:
    """Whether a part of a state is what is in flight of one table or stack."""
    return isinstance(part, StartedLookup | GradientUpdate)
