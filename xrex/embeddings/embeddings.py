"""The tables and features of a model: what `make_pipeline` takes in place of one table."""

import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from xrex import placement
from xrex.checks import check_table
from xrex.embeddings.batch import PackedBatch, pack_batch
from xrex.embeddings.feature import Feature
from xrex.embeddings.initial import make_stack_table
from xrex.embeddings.packing import Policy
from xrex.embeddings.split import join_rows, split_rows
from xrex.embeddings.stack import Plan, group_tables, make_stack, plan_stack
from xrex.embeddings.stack_rows import (
    TablePlace,
    check_flushed,
    check_idle,
    check_values,
    slice_rows,
    take_rows,
    write_rows,
)
from xrex.embeddings.table import Table
from xrex.layout.handle import AsyncEmbContextHandle, make_context_handle
from xrex.layout.layout import LARGEST_SIZE, AnyMesh, AxisNames, is_positive_integer
from xrex.pooling import Bags, PackedIds
from xrex.table_set import TableStack


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Tables and features of a model, sharded over a mesh.

      rule = xrex.RowwiseAdagrad(learning_rate=0.1)
      embeddings = xrex.Embeddings(
          mesh,
          tables={
              "users": xrex.Table(vocab=1000, width=64, rule=rule),
              "items": xrex.Table(vocab=500, width=64, rule=rule),
          },
          features={
              "user": xrex.Feature("users"),
              "seen": xrex.Feature("items", max_ids=50, combiner="mean"),
          },
          batch_size=256,
          table_axis="x",
          data_axis="x",
      )

    Tables of equal width, dtype and kind of rule lie in one array, a stack: one exchange each way,
    whatever their number. Their rates, decay and vocabularies stay their own. Bags are pooled
    before the exchange, so that one travels as one row.

    Attributes:
      mesh: with the axes named below.
      tables: by name.
      features: by name; each names its table. Two may share one.
      batch_size: examples of a batch, over all ranks.
      table_axis: the mesh axes over which the tables' columns are sharded.
      data_axis: those over which the examples are.
      capacity: ids per rank that the bags of a stack share; by default as many as `max_ids` allows.
        With it, memory and work follow the mean length of bags and not the longest.
      num_unique: room for the distinct ids of a batch and stack; by default enough for every batch.
      out_of_range: what an id outside [0, vocab) means: "zero", a row of zeros, counted in
        `metrics.out_of_range`; or "raise".
      overflow: what becomes of ids beyond `max_ids` or `capacity`: "raise", or "cut", which leaves
        out the last ones and counts them in `metrics.cut`.
      num_devices_per_node: as of `Layout`; for planning.
      implementation: as of `make_context_handle`.

    Raises:
      ValueError: the mesh cannot hold a table (the validator's texts; a note names the table), a
        feature names no table, a table has no feature, a batch has more rows or ids of a stack than
        int32 can number, or an argument is out of its range.
    """

    mesh: AnyMesh
    tables: Mapping[str, Table]
    features: Mapping[str, Feature]
    batch_size: int
    _: KW_ONLY
    table_axis: AxisNames
    data_axis: AxisNames
    capacity: int | None = None
    num_unique: int | None = None
    out_of_range: Literal["zero", "raise"] = "zero"
    overflow: Literal["raise", "cut"] = "raise"
    num_devices_per_node: int = 8
    implementation: str = "auto"

    def __post_init__(self) -> None:
        """Checks the fields, and lays the stacks out."""
        # Copies: what the caller does to the dictionaries later changes nothing.
        object.__setattr__(self, "tables", dict(self.tables))
        object.__setattr__(self, "features", dict(self.features))
        _check_names(self.tables, self.features)
        for name, allowed in (("out_of_range", ("zero", "raise")), ("overflow", ("raise", "cut"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {allowed}")
        for name in ("capacity", "num_unique"):
            value = getattr(self, name)
            if value is not None and not is_positive_integer(value):
                raise ValueError(f"{name}={value!r} must be a positive integer or None")
        for name, table in self.tables.items():
            self._check_layout(name, table)
        object.__setattr__(self, "batch_size", int(self.batch_size))
        _ = self.stacks  # With all that is checked on the way.

    @functools.cached_property
    def handle(self) -> AsyncEmbContextHandle:
        """The layout of the first stack: the mesh and the axes of all."""
        return next(iter(self.stacks.values())).handle

    @functools.cached_property
    def plans(self) -> dict[str, Plan]:
        """What each stack is made of."""
        groups = group_tables(self.tables)
        return {
            name: plan_stack(
                name,
                {n: self.tables[n] for n in names},
                {n: f for n, f in self.features.items() if f.table in names},
                self.batch_size // self._group_size,
                self.capacity,
            )
            for name, names in groups.items()
        }

    @functools.cached_property
    def stacks(self) -> dict[str, TableStack]:
        """Each stack as a training step sees it."""
        return {name: self._make_stack(plan) for name, plan in self.plans.items()}

    def make_tables(self, given: Any) -> dict[str, jax.Array]:
        """The stacks' tables: made from a random key, or those of a saved state, checked.

        Raises:
          ValueError: a stack is missing or unknown, or has another shape.
          TypeError: a stack has another dtype; what is given is neither.
        """
        if isinstance(given, Mapping):
            return self._saved_tables(given)
        if not _is_key(given):
            error = TypeError(
                f"init takes a random key, or a saved state's table, not {type(given).__name__}"
            )
            error.add_note("Pass jax.random.key(0), and pretrained tables to set_table.")
            raise error
        return {
            name: make_stack_table(plan, self._tables_of(plan), self.stacks[name].handle, given)
            for name, plan in self.plans.items()
        }

    def table(self, state: Any, name: str) -> jax.Array:
        """A table of a state, (vocab, width), its columns sharded; a copy.

        Raises:
          KeyError: there is no such table.
          ValueError: the state has a deferred update that is not in the table yet.
        """
        place = self._find(name)
        check_flushed(state)
        return slice_rows(place.handle, state.table[place.stack], place.first, place.vocab)

    def rows(self, state: Any, name: str, ids: Any) -> jax.Array:
        """Rows of a table, (n, width), in the order of the ids.

        Raises:
          KeyError: there is no such table.
          ValueError: an id is outside the table; or as `table`.
        """
        place = self._find(name)
        check_flushed(state)
        return take_rows(place.handle, state.table[place.stack], place.row_numbers(ids))

    def set_table(self, state: Any, name: str, values: Any) -> Any:
        """The idle state with another table of that name, such as pretrained vectors.

        The old state's table is donated. The rule's state stays as it is.

        Args:
          state: an idle one.
          name: the table's.
          values: (vocab, width), of the table's dtype or one that it is rounded from.

        Raises:
          KeyError: there is no such table.
          ValueError: a wrong shape, or the state holds a batch.
        """
        return self.set_rows(state, name, np.arange(self._find(name).vocab), values)

    def set_rows(self, state: Any, name: str, ids: Any, values: Any) -> Any:
        """The idle state with other rows in one table: (n,) ids, (n, width) values.

        The old state's table is donated. The rule's state stays as it is.

        Raises:
          KeyError: there is no such table.
          ValueError: a wrong shape, an id that is outside the table or is given twice, or the state
            holds a batch.
        """
        place = self._find(name)
        check_idle(state)
        rows = place.row_numbers(ids)
        check_values(name, rows, values, place.handle.emb_width)
        sharding = placement.sharding(place.handle, placement.table_spec(place.handle), 2)
        stack = placement.put(state.table[place.stack], sharding)
        written = write_rows(place.handle, stack, rows, placement.put_copy(values, sharding))
        return state._replace(table=dict(state.table) | {place.stack: written})

    def place(self, ids: Any) -> PackedBatch:
        """A batch's features, packed and copied to the mesh."""
        if isinstance(ids, PackedBatch):
            return self._put(ids)
        packed, examples = self._pack(ids)
        if examples != self.batch_size:
            raise ValueError(
                f"the batch has {examples} examples, and the embeddings have "
                f"batch_size={self.batch_size}"
            )
        return self._put(packed)

    def place_part(self, ids: Any) -> tuple[PackedBatch, int]:
        """As `place`, of at most `batch_size` examples: the others have no ids."""
        if isinstance(ids, PackedBatch):
            return self._put(ids), self.batch_size
        packed, examples = self._pack(ids)
        return self._put(packed), examples

    def batch_shapes(self, *, weighted: bool = False) -> PackedBatch:
        """A batch's ids as shapes with shardings, for `Pipeline.lower_step`.

        Args:
          weighted: whether some id in a bag has a weight.
        """
        sharding = placement.sharding(self.handle, placement.token_spec(self.handle), 1)

        def shape(per_rank: int, dtype: Any) -> jax.ShapeDtypeStruct:
            size = (self._group_size * per_rank,)
            return jax.ShapeDtypeStruct(size, dtype, sharding=sharding)

        stacks: dict[str, Any] = {}
        for name, plan in self.plans.items():
            stacks[name] = shape(plan.ids_per_rank, jnp.int32)
            if plan.bags:
                weights = shape(plan.capacity, jnp.float32) if weighted else None
                lengths, scales = shape(plan.num_bags, jnp.int32), shape(plan.num_bags, jnp.float32)
                bags = Bags(lengths, scales, weights)  # type: ignore[arg-type]
                stacks[name] = PackedIds(stacks[name], bags)
        return PackedBatch(stacks)

    def by_stack(self, placed: Any) -> dict[str, Any]:
        """The ids of each stack.

        Raises:
          TypeError: the ids are not placed.
        """
        if not isinstance(placed, PackedBatch):
            error = TypeError(f"a batch's ids must be placed, not a {type(placed).__name__}")
            error.add_note("Pass embeddings.place(ids), or embeddings.batch_shapes().")
            raise error
        return placed.stacks

    def counts(self, placed: PackedBatch) -> dict[str, Any]:
        """What was counted while packing."""
        return {"out_of_range": np.int32(placed.out_of_range), "cut": np.int32(placed.cut)}

    def split(self, rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Each feature's rows. In a trace."""
        found: dict[str, jax.Array] = {}
        for name, plan in self.plans.items():
            found |= split_rows(self.stacks[name].handle, plan, rows[name])
        return {name: found[name] for name in self.features}

    def join(self, embedded: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Undoes `split`. In a trace."""
        return {
            name: join_rows(self.stacks[name].handle, plan, embedded)
            for name, plan in self.plans.items()
        }

    def _tables_of(self, plan: Plan) -> dict[str, Table]:
        return {name: self.tables[name] for name in plan.first_rows}

    @functools.cached_property
    def _group_size(self) -> int:
        table = next(iter(self.tables.values()))
        return self._layout_handle(table.width, self.batch_size, 1).group_size

    def _layout_handle(self, width: int, num_tokens: int, num_unique: int) -> AsyncEmbContextHandle:
        return make_context_handle(
            self.mesh,
            self.table_axis,
            data_axis=self.data_axis,
            tokens_per_batch=num_tokens,
            emb_width=width,
            num_unique=num_unique,
            num_devices_per_node=self.num_devices_per_node,
            implementation=self.implementation,
        )

    def _check_layout(self, name: str, table: Table) -> None:
        try:
            self._layout_handle(table.width, self.batch_size, 1)
        except ValueError as error:
            error.add_note(
                f"Of the table {name!r}: emb_width is its width, {table.width}, and "
                f"tokens_per_batch is batch_size, {self.batch_size!r}."
            )
            raise

    def _make_stack(self, plan: Plan) -> TableStack:
        tables = self._tables_of(plan)
        ids = self._group_size * plan.ids_per_rank
        room = min(ids, plan.vocab, self.num_unique or ids)
        width, rows = next(iter(tables.values())).width, self._group_size * plan.rows_per_rank
        try:
            handle = self._layout_handle(width, rows, room)
        except ValueError as error:
            error.add_note(
                f"Of the tables {list(tables)}, which are stacked: tokens_per_batch is how many "
                f"rows a batch gets of them, {rows}."
            )
            raise
        if ids > LARGEST_SIZE:
            raise ValueError(
                f"the tables {list(tables)} are stacked, and their features may have {ids} ids in "
                f"a batch: more than the {LARGEST_SIZE} that int32 positions can reach"
            )
        return make_stack(plan, tables, handle)

    def _pack(self, ids: Any) -> tuple[PackedBatch, int]:
        """The batch packed, filled up with examples without ids; how many are its own."""
        policy = Policy(self.out_of_range == "raise", self.overflow == "cut")
        return pack_batch(self.plans, self.tables, self.features, ids, self.batch_size, policy)

    def _put(self, packed: PackedBatch) -> PackedBatch:
        wanted = placement.sharding(self.handle, placement.token_spec(self.handle), 1)
        stacks = jax.tree.map(lambda leaf: placement.put_copy(leaf, wanted), packed.stacks)
        return PackedBatch(stacks, packed.out_of_range, packed.cut)

    def _saved_tables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if set(given) != set(self.stacks):
            raise ValueError(
                f"the saved table has the stacks {sorted(given)}, and these embeddings have "
                f"{sorted(self.stacks)}"
            )
        tables = {}
        for name, stack in self.stacks.items():
            table: Any = given[name]
            table = table if isinstance(table, jax.Array) else np.asarray(table)
            check_table(table, stack.handle.emb_width)
            dtype = self.tables[next(iter(self.plans[name].first_rows))].dtype
            if table.shape[0] != stack.vocab or table.dtype != dtype:
                raise ValueError(
                    f"the saved stack {name!r} is {table.dtype}{table.shape}, and must be "
                    f"{dtype}{(stack.vocab, stack.handle.emb_width)}"
                )
            tables[name] = placement.unless_numpys(table)
        return tables

    def _find(self, name: str) -> TablePlace:
        """Where a table lies."""
        for plan in self.plans.values():
            if name in plan.first_rows:
                handle, vocab = self.stacks[plan.name].handle, self.tables[name].vocab
                return TablePlace(name, handle, plan.name, plan.first_rows[name], vocab)
        raise KeyError(f"there is no table {name!r}; there are {list(self.tables)}")


def _check_names(tables: Mapping[str, Any], features: Mapping[str, Any]) -> None:
    for what, given, kind in (("tables", tables, Table), ("features", features, Feature)):
        if not given:
            raise ValueError(f"{what} must have one entry at least")
        for name, value in given.items():
            if not isinstance(name, str) or not isinstance(value, kind):
                raise ValueError(
                    f"{what}[{name!r}] must be an xrex.{kind.__name__} by its name, not {value!r}"
                )
    for name, feature in features.items():
        if feature.table not in tables:
            raise ValueError(
                f"feature {name!r} names the table {feature.table!r}; there are {list(tables)}"
            )
    used = {feature.table for feature in features.values()}
    for name in tables:
        if name not in used:
            raise ValueError(f"table {name!r} has no feature: nothing would read or train it")


def _is_key(given: Any) -> bool:
    if not isinstance(given, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
        return given.ndim == 0
    return given.dtype == np.uint32 and given.ndim == 1
