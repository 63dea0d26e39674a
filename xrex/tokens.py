"""Token ids: what an id outside the table means, and the batch's distinct ids."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from xrex import exchange, placement
from xrex.checks import as_int32, check_shape, check_vocab, host_values, raise_first
from xrex.layout.handle import AsyncEmbContextHandle


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class UniqueTokens:
    """The distinct ids of a batch, and the table that they were found for.

    An array for NumPy and `jax.numpy`. It remembers `vocab`, so that `update_start` can refuse a
    table of another size, traced or not.

    Attributes:
      ids: each distinct id once, ascending; `vocab` behind the last.
        # shape=(num_unique,), dtype=jnp.int32, replicated
      vocab: rows of the table; static.
    """

    ids: jax.Array
    vocab: int = field(metadata={"static": True})

    def __getattr__(self, name: str) -> Any:
        """Whatever else an array has, such as `shape` and `tolist`."""
        if name.startswith("__") or name == "ids":  # Of an object that is only being made.
            raise AttributeError(name)
        return getattr(self.ids, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The ids, for NumPy."""
        return np.array(self.ids, dtype=dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        """The ids, for `jax.numpy`."""
        return self.ids

    def __getitem__(self, index: Any) -> jax.Array:
        """Some of the ids."""
        return self.ids[index]

    def __eq__(self, other: object) -> Any:
        """Where the ids equal others, as of an array."""
        return self.ids == _ids_of(other)

    def __ne__(self, other: object) -> Any:
        """Where the ids differ from others."""
        return self.ids != _ids_of(other)

    def __lt__(self, other: Any) -> jax.Array:
        """Where the ids are below others."""
        return self.ids < _ids_of(other)

    def __le__(self, other: Any) -> jax.Array:
        """Where the ids are at most others."""
        return self.ids <= _ids_of(other)

    def __gt__(self, other: Any) -> jax.Array:
        """Where the ids are above others."""
        return self.ids > _ids_of(other)

    def __ge__(self, other: Any) -> jax.Array:
        """Where the ids are at least others."""
        return self.ids >= _ids_of(other)

    def __len__(self) -> int:
        """The capacity."""
        return len(self.ids)

    def __iter__(self) -> Iterator[jax.Array]:
        """The ids, one after the other."""
        return iter(self.ids)


def _ids_of(other: Any) -> Any:
    return other.ids if isinstance(other, UniqueTokens) else other


class CompressedTokens(NamedTuple):
    """The distinct ids of a batch, and where each token's id stands among them.

    Attributes:
      unique_tokens: each distinct id once, ascending; `vocab` behind the last. When there are more
        than `num_unique`, the largest are left out.
        # shape=(num_unique,), dtype=jnp.int32, replicated
      segment_ids: the position of a token's id in `unique_tokens`, or -1 for a token that gets no
        gradient.  # shape=(tokens_per_batch,), dtype=jnp.int32, sharded over the data axis
      dropped: how many tokens with an id inside the table found no room in `num_unique`.
        # shape=(), dtype=jnp.int32, replicated
    """

    unique_tokens: UniqueTokens
    segment_ids: jax.Array
    dropped: jax.Array


class ResolvedIds(NamedTuple):
    """Row numbers that ids stand for; -1 where there is none.

    Attributes:
      read: the row that a lookup reads; -1 means zeros.  # same shape as the ids, dtype=jnp.int32
      trained: the row that gets the gradient.  # same shape as the ids, dtype=jnp.int32
    """

    read: jax.Array
    trained: jax.Array


def resolve_ids(handle: AsyncEmbContextHandle, ids: jax.Array, vocab: int) -> ResolvedIds:
    """Applies the handle's policy for ids outside the table, the same for lookup and update.

    With vocab=8 and out_of_range="clip", ids [3, -1, 9, -20] read rows [3, 7, 7, 0] and train
    rows [3, 7, -1, -1]; with "zero" they read and train rows [3, -1, -1, -1].
    """
    clips = handle.out_of_range == "clip"
    rows = jnp.where((ids < 0) & (ids >= -vocab), ids + vocab, ids) if clips else ids
    is_token = jnp.ones(ids.shape, bool)
    if handle.padding_id is not None:
        is_token = (ids != handle.padding_id) & (rows != handle.padding_id)
    trained = jnp.where(is_token & (rows >= 0) & (rows < vocab), rows, -1)
    read = jnp.where(is_token, jnp.clip(rows, 0, vocab - 1), -1) if clips else trained
    return ResolvedIds(read, trained)


def compress_token_ids(
    handle: AsyncEmbContextHandle, token_ids: jax.typing.ArrayLike, vocab: int
) -> CompressedTokens:
    """Finds the distinct ids of a batch, for `update_start`. Global arrays.

    With vocab=8, num_unique=3 and ids [5, 2, 5, 9]: unique_tokens [2, 5, 8], segment_ids
    [1, 0, 1, -1], dropped 0. The order depends on the ids alone. When there are more distinct ids
    than `num_unique`, the largest are left out.

    Args:
      handle: the layout.
      token_ids: (tokens_per_batch,) int32, or a host array of any integer type whose values fit.
      vocab: rows of the table.

    Raises:
      ValueError: a wrong shape, an id that does not fit in int32, or, with out_of_range="raise",
        one outside the table.
      TypeError: ids that are not integers.
    """
    check_vocab(vocab)
    ids = check_token_ids(handle, token_ids, vocab)
    return _compress(handle, vocab, ids)


def compress_token_ids_per_shard(
    handle: AsyncEmbContextHandle, token_ids: jax.Array, vocab: int
) -> CompressedTokens:
    """`compress_token_ids` for one shard, inside `shard_map`.

    Args:
      handle: the layout.
      token_ids: (tokens_per_rank,) int32, this rank's.
      vocab: rows of the table.

    Returns:
      `unique_tokens` and `dropped` of the whole batch, `segment_ids` (tokens_per_rank,) of this
      rank's tokens.
    """
    check_vocab(vocab)
    token_ids = as_int32("token_ids", token_ids)
    all_ids = gather_token_ids_per_shard(handle, token_ids, vocab)
    return compress_gathered(handle, token_ids, all_ids, vocab)


def gather_token_ids_per_shard(
    handle: AsyncEmbContextHandle, token_ids: jax.Array, vocab: int
) -> jax.Array:
    """Every rank's ids, (G * T,), in rank order; checked under "raise", which needs `checkify`."""
    check_shape("token_ids", token_ids, (handle.tokens_per_rank,))
    all_ids = exchange.gather_tokens(handle, as_int32("token_ids", token_ids))
    if handle.out_of_range == "raise":
        _check_traced_range(handle, all_ids, vocab)
    return all_ids


def compress_gathered(
    handle: AsyncEmbContextHandle, token_ids: jax.Array, all_ids: jax.Array, vocab: int
) -> CompressedTokens:
    """The distinct ids among `all_ids` (G * T,), and the segments of this rank's `token_ids`."""
    num_unique = handle.num_unique

    def sort_keys(ids: jax.Array) -> jax.Array:
        trained = resolve_ids(handle, ids, vocab).trained
        return jnp.where(trained >= 0, trained, vocab)

    # Only keys are sorted: sorting positions along with them costs several times as much.
    ordered = jnp.sort(sort_keys(all_ids))
    is_first = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    is_first &= ordered < vocab
    position = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    unique = jnp.full((num_unique,), vocab, jnp.int32)
    unique = unique.at[jnp.where(is_first, position, num_unique)].set(ordered, mode="drop")

    keys = sort_keys(token_ids)
    segments = jnp.searchsorted(unique, keys).astype(jnp.int32)
    found = (keys < vocab) & (unique.at[segments].get(mode="clip") == keys)
    dropped = jnp.zeros((), jnp.int32)
    if num_unique < min(len(all_ids), vocab):
        dropped = jnp.sum((ordered < vocab) & (position >= num_unique), dtype=jnp.int32)
    segments = jnp.where(found, segments, -1)
    return CompressedTokens(UniqueTokens(unique, int(vocab)), segments, dropped)


def compressed_specs(handle: AsyncEmbContextHandle) -> Any:
    """The specs of `CompressedTokens`, as one."""
    return CompressedTokens(
        unique_tokens=placement.REPLICATED,  # type: ignore[arg-type]
        segment_ids=placement.token_spec(handle),  # type: ignore[arg-type]
        dropped=placement.REPLICATED,  # type: ignore[arg-type]
    )


@jax.jit(static_argnums=(0, 1))
def _compress(handle: AsyncEmbContextHandle, vocab: int, ids: jax.Array) -> CompressedTokens:
    def body(ids: jax.Array) -> CompressedTokens:
        return compress_gathered(handle, ids, exchange.gather_tokens(handle, ids), vocab)

    spec = placement.token_spec(handle)
    with jax.named_scope("xrex.compress_token_ids"):
        ids = placement.place(handle, ids, spec)
        return placement.shard_map(handle, body, (spec,), compressed_specs(handle))(ids)


def check_token_ids(
    handle: AsyncEmbContextHandle, token_ids: jax.typing.ArrayLike, vocab: int
) -> jax.Array:
    """The ids as a global int32 array, checked as far as they are known.

    Values are read of arrays whose type is wider than int32 and, under the policy "raise", of all;
    never of traced ones.

    Raises:
      ValueError: a wrong shape, a value that does not fit in int32 or, under "raise", one outside
        the table.
      TypeError: not integers, or a traced array of a type wider than int32.
    """
    ids = as_int32("token_ids", token_ids)
    check_shape("token_ids", ids, (handle.tokens_per_batch,))
    if handle.out_of_range == "raise":
        if isinstance(ids, jax.core.Tracer):
            _check_traced_range(handle, ids, vocab)
        else:
            values = host_values("token_ids", ids)
            outside = _is_outside(handle, values, vocab)
            raise_first("token_ids", values, outside, f"is outside the table of {vocab} rows")
    if isinstance(ids, jax.core.Tracer):
        return ids
    return placement.put_copy(ids, placement.sharding(handle, placement.token_spec(handle), 1))


def _is_outside(handle: AsyncEmbContextHandle, ids: Any, vocab: int) -> Any:
    """Whether ids are outside the table and not padding; NumPy and traced arrays alike."""
    outside = (ids < 0) | (ids >= vocab)
    return outside if handle.padding_id is None else outside & (ids != handle.padding_id)


def _check_traced_range(handle: AsyncEmbContextHandle, ids: jax.Array, vocab: int) -> None:
    outside = _is_outside(handle, ids, vocab)
    position = jnp.argmax(outside)
    checkify.check(
        ~jnp.any(outside),
        f"async_emb token_ids: id {{id}} at position {{position}} "
        f"is outside the table of {vocab} rows",
        id=ids[position],
        position=position,
    )
