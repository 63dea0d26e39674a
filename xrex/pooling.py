"""Bags: ids whose rows are pooled before they travel; their gradient is spread after it travelled.

A bag is a weighted sum of rows. A rank has its columns of every row, so it adds up its columns of
each bag and sends bags instead of tokens. In one shard, G ranks: of the T ids of a rank the first S
are for a row of their own; the others, up to a capacity of C, belong to B bags, one bag after the
other. So a rank gets O = S + B rows, S of single ids and then B of bags.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import api as kernels
from xrex import exchange
from xrex.layout.handle import AsyncEmbContextHandle


class Bags(NamedTuple):
    """The bags of a batch; one shard's, or all ranks' in rank order. Sharded over the data axis.

    Attributes:
      lengths: ids of each bag.  # shape=(bags,), dtype=jnp.int32
      scales: a factor of each bag's rows, such as 1 / length for a mean.
        # shape=(bags,), dtype=jnp.float32
      weights: a further factor of each id's row; None means 1.
        # shape=(capacity,), dtype=jnp.float32
    """

    lengths: jax.Array
    scales: jax.Array
    weights: jax.Array | None = None


class PackedIds(NamedTuple):
    """A batch's ids of one stack, some of them in bags. Sharded over the data axis.

    Attributes:
      ids: rank after rank, those of single ids and then those of bags; -1 where there is none.
        # shape=(group_size * ids_per_rank,), dtype=jnp.int32
      bags: where the latter belong
    """

    ids: jax.Array
    bags: Bags


class Slots(NamedTuple):
    """Where each id's row goes, of all ranks.

    Attributes:
      rows: the row that travels, counted over all ranks' rows; -1 where there is none.
        # shape=(G, T), dtype=jnp.int32
      factors: what the id's row is multiplied by in it.  # shape=(G, T), dtype=jnp.float32
    """

    rows: jax.Array
    factors: jax.Array


def ids_and_bags(packed: jax.Array | PackedIds) -> tuple[jax.Array, Bags | None]:
    """The ids of a stack, and the bags of those that are in any."""
    return packed if isinstance(packed, PackedIds) else (packed, None)


def gather_ids_and_bags(
    handle: AsyncEmbContextHandle, per_id: jax.Array, bags: Bags | None
) -> tuple[jax.Array, Bags | None]:
    """Every rank's values per id, (T,) -> (G * T,), and its bags, (G, ...) each, by one collective.

    The values are 32 bits each: ids, or their segments.
    """
    if bags is None:
        return exchange.gather_tokens(handle, per_id), None
    arrays, treedef = jax.tree.flatten((per_id, bags))
    per_id, bags = jax.tree.unflatten(treedef, exchange.gather_together(handle, *arrays))
    return per_id.reshape(-1), bags


def slots(handle: AsyncEmbContextHandle, bags: Bags, ids_per_rank: int) -> Slots:
    """Where the ids of several ranks go.

    With 2 single ids, bags of 2 and 1 ids and a capacity of 4, the ids of the first rank go to the
    rows 0, 1, 2, 2, 3 and -1.

    Args:
      handle: the layout.
      bags: of those ranks, (ranks, ...) each.
      ids_per_rank: single ids and capacity.
    """
    rows_per_rank = handle.tokens_per_rank
    ranks, bags_per_rank = bags.lengths.shape
    singles = rows_per_rank - bags_per_rank
    bag, of_bags = _bags_of_ids(bags, ids_per_rank - singles)
    single = jnp.broadcast_to(jnp.arange(singles, dtype=jnp.int32), (ranks, singles))
    first_row = rows_per_rank * jnp.arange(ranks, dtype=jnp.int32)[:, None]
    return Slots(
        jnp.concatenate(
            [single + first_row, jnp.where(bag >= 0, singles + bag + first_row, -1)], axis=1
        ),
        jnp.concatenate([jnp.ones((ranks, singles), jnp.float32), of_bags], axis=1),
    )


def _bags_of_ids(bags: Bags, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The bag of each id among its rank's, -1 behind the last, and the id's factor in it."""
    ranks, bags_per_rank = bags.lengths.shape
    # How many bags have ended at each position: integers, whose order of addition is free.
    ended = jnp.zeros((ranks, capacity + 1), jnp.int32)
    ends = jnp.cumsum(bags.lengths, axis=1)
    ended = ended.at[jnp.arange(ranks)[:, None], ends].add(1, mode="drop")
    bag = jnp.cumsum(ended, axis=1)[:, :capacity]
    factors = jnp.take_along_axis(bags.scales, jnp.minimum(bag, bags_per_rank - 1), axis=1)
    if bags.weights is not None:
        factors = factors * bags.weights
    is_in_bag = bag < bags_per_rank
    return jnp.where(is_in_bag, bag, -1), jnp.where(is_in_bag, factors, 0.0)


def pool(handle: AsyncEmbContextHandle, rows: jax.Array, bags: Bags) -> jax.Array:
    """The rows that travel, of all ranks' ids' rows: (G * T, w) -> (G, O, w).

    A bag is summed in float32, one id after the other, and rounded once.
    """
    ranks, bags_per_rank = bags.lengths.shape
    singles = handle.tokens_per_rank - bags_per_rank
    by_rank = rows.reshape(ranks, len(rows) // ranks, -1)
    bag, factors = _bags_of_ids(bags, by_rank.shape[1] - singles)
    first_bag = bags_per_rank * jnp.arange(ranks, dtype=jnp.int32)[:, None]
    in_bags = by_rank[:, singles:].astype(jnp.float32) * factors[:, :, None]
    sums, _ = kernels.segment_sum(
        in_bags.reshape(-1, rows.shape[1]),
        jnp.where(bag >= 0, bag + first_bag, -1).reshape(-1),
        ranks * bags_per_rank,
        dtype=rows.dtype,
        implementation=handle.implementation,
    )
    pooled = sums.astype(rows.dtype).reshape(ranks, bags_per_rank, -1)
    return jnp.concatenate([by_rank[:, :singles], pooled], axis=1)


def spread(
    handle: AsyncEmbContextHandle, gradients: jax.Array, bags: Bags, num_ids: int
) -> jax.Array:
    """Each id's gradient, of those of the rows that travelled: (G * O, w) -> (G * T, w) float32."""
    ranks = len(bags.lengths)
    rows, factors = slots(handle, bags, num_ids // ranks)
    rows = jnp.where(rows >= 0, rows, len(gradients)).reshape(-1)
    found = gradients.at[rows].get(mode="fill", fill_value=0)
    return found.astype(jnp.float32) * factors.reshape(-1, 1)


def sum_of_sizes(
    handle: AsyncEmbContextHandle, sizes: jax.Array, bags: Bags, segment_ids: jax.Array
) -> jax.Array:
    """The sum of one rank's ids' gradients' sizes, of those of its rows: (O,), (T,) -> ().

    Those of ids that train no row do not count.
    """
    rows, factors = slots(handle, jax.tree.map(lambda x: x[None], bags), len(segment_ids))
    sizes = sizes.at[rows[0]].get(mode="fill", fill_value=0) * jnp.abs(factors[0])
    return jnp.sum(jnp.where(segment_ids >= 0, sizes, 0))
