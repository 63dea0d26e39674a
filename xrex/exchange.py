"""The collectives over a communicator, one shard each: callable only inside `shard_map`.

Each is the identity on a communicator of one rank. Shapes: G ranks, T tokens per rank, w columns
per rank.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import api as kernels
from xrex.layout.handle import AsyncEmbContextHandle


def gather_tokens(handle: AsyncEmbContextHandle, x: jax.Array) -> jax.Array:
    """Every rank's tokens, in rank order: (T, ...) -> (G * T, ...)."""
    if not handle.table_axis:
        return x
    return jax.lax.all_gather(x, handle.table_axis, tiled=True)


def exchange_blocks(handle: AsyncEmbContextHandle, x: jax.Array) -> jax.Array:
    """Sends block g to rank g, and receives one from each: (G, ...) -> (G, ...).

    Out: block g is what rank g sent.
    """
    if not handle.table_axis:
        return x
    # As bits: XLA's CPU backend sends bfloat16 as float32, which does not keep the bits of a NaN.
    bits = jax.lax.all_to_all(kernels.as_bits(x), handle.table_axis, split_axis=0, concat_axis=0)
    return kernels.from_bits(bits, x.dtype)


def sum_over_ranks(handle: AsyncEmbContextHandle, x: jax.Array) -> jax.Array:
    """The sum over the communicator, with the same bits on every rank."""
    if not handle.table_axis:
        return x
    return jax.lax.psum(x, handle.table_axis)


def sum_and_any_over_ranks(
    handle: AsyncEmbContextHandle, x: jax.Array, flags: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The sum of a float32 (n,), and whether a flag (n,) is set on some rank, in one all-reduce.

    Flags travel as the digits of whole numbers, to a base above the number of ranks: sums of these
    carry nothing over, and float32 holds them exactly.
    """
    if not handle.table_axis:
        return x, flags
    base, digits = handle.group_size + 1, flags_per_float(handle.group_size)
    weights = jnp.asarray([base**digit for digit in range(digits)], jnp.int32)
    size = flags.shape[0]
    padded = jnp.pad(flags, (0, -size % digits)).reshape(-1, digits)
    packed = jnp.sum(jnp.where(padded, weights[None, :], 0), axis=1).astype(jnp.float32)
    total = sum_over_ranks(handle, jnp.concatenate([x, packed]))
    counts = total[size:, None].astype(jnp.int32) // weights[None, :] % base
    return total[:size], (counts > 0).reshape(-1)[:size]


def flags_per_float(group_size: int) -> int:
    """How many flags one float32 carries in `sum_and_any_over_ranks`."""
    digits = 1
    while (group_size + 1) ** (digits + 1) <= 2**24:
        digits += 1
    return digits


def blocks_to_rows(blocks: jax.Array) -> jax.Array:
    """Columns that arrived from each rank, side by side: (G, T, w) -> (T, G * w)."""
    group_size, tokens, width = blocks.shape
    return blocks.transpose(1, 0, 2).reshape(tokens, group_size * width)


def rows_to_blocks(rows: jax.Array, group_size: int) -> jax.Array:
    """Whole rows, cut into the columns of each rank: (T, G * w) -> (G, T, w)."""
    tokens, width = rows.shape
    return rows.reshape(tokens, group_size, width // group_size).transpose(1, 0, 2)
