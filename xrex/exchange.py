"""The collectives over a communicator, one shard each: callable only inside `shard_map`.

Each is the identity on a communicator of one rank. Shapes: G ranks, T tokens per rank, w columns
per rank.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import api as kernels
from xrex.layout.handle import AsyncEmbContextHandle


def gather_tokens(handle: AsyncEmbContextHandle, x: jax.Array) -> jax.Array:
    """Every rank's tokens, in rank order: (T, ...) -> (G * T, ...)."""
    if not handle.table_axis:
        return x
    return jax.lax.all_gather(x, handle.table_axis, tiled=True)


def gather_together(handle: AsyncEmbContextHandle, *arrays: jax.Array) -> list[jax.Array]:
    """Every rank's part of several arrays by one collective: (n,) of 32 bits each -> (G, n)."""
    ends = np.cumsum([len(x) for x in arrays])
    gathered = gather_tokens(handle, jnp.concatenate([x.view(jnp.int32) for x in arrays]))
    gathered = gathered.reshape(-1, ends[-1])
    parts = jnp.split(gathered, ends[:-1].tolist(), axis=1)
    return [part.view(x.dtype) for part, x in zip(parts, arrays, strict=True)]


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


def blocks_to_rows(blocks: jax.Array) -> jax.Array:
    """Columns that arrived from each rank, side by side: (G, T, w) -> (T, G * w)."""
    group_size, tokens, width = blocks.shape
    return blocks.transpose(1, 0, 2).reshape(tokens, group_size * width)


def rows_to_blocks(rows: jax.Array, group_size: int) -> jax.Array:
    """Whole rows, cut into the columns of each rank: (T, G * w) -> (G, T, w)."""
    tokens, width = rows.shape
    return rows.reshape(tokens, group_size, width // group_size).transpose(1, 0, 2)
