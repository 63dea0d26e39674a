"""What all tests of the row kernels share: the shapes they are tried at, data for them, an oracle.

Kernels have three kinds of tests over these cases: the reference against the oracle
(`kernels_reference_test.py`), Mosaic GPU in the interpreter against the reference
(`kernels_interpret_test.py`), Mosaic GPU on a GPU (`kernels_gpu_test.py`); and
`compile_for_gpu_test.py` compiles every case for an H100. Each shape is a kernel of its own, so all
tests share one list: shapes chosen by hand, and some that Hypothesis draws. The data are drawn anew
by each test.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels import api
from pallas_kernels.gather_rows_mgpu import GatherTuning
from pallas_kernels.segment_sum_mgpu import SegmentSumTuning
from pallas_kernels.update_rows_mgpu import UpdateTuning
from tests.suite_report import profile


class Gather(NamedTuple):
    """A shape of `gather_rows`."""

    vocab: int
    width: int
    dtype: str
    n: int
    tuning: GatherTuning | None


class Update(NamedTuple):
    """A shape of `update_rows`: the rule says how many slots and scalars there are."""

    vocab: int
    width: int
    dtype: str
    u: int
    rule: str
    tuning: UpdateTuning | None


class SegmentSum(NamedTuple):
    """A shape of `segment_sum`."""

    n: int
    width: int
    dtype: str
    segments: int
    tuning: SegmentSumTuning | None


THOROUGH = profile() == "thorough"


def rows() -> st.SearchStrategy[tuple[int, str]]:
    """Width and type of rows that the kernels take: multiples of 16 bytes."""
    return st.tuples(
        st.integers(1, 20 if THOROUGH else 8), st.sampled_from([(8, "bfloat16"), (4, "float32")])
    ).map(lambda drawn: (drawn[0] * drawn[1][0], drawn[1][1]))


_GATHER_SHAPES = st.builds(
    lambda vocab, row, n, rows: Gather(vocab, *row, n, rows and GatherTuning(rows, 1)),
    st.integers(1, 60),
    rows(),
    st.integers(1, 40),
    st.sampled_from([None, 4, 12, 16]),
)
_UPDATE_SHAPES = st.builds(
    lambda vocab, row, u, rule: Update(vocab, *row, u, rule, None),
    st.integers(1, 60),
    rows(),
    st.integers(1, 40),
    st.sampled_from(["descent", "moments"]),
)
_SEGMENT_SUM_SHAPES = st.builds(
    lambda n, row, segments: SegmentSum(n, *row, segments, None),
    st.integers(1, 140),
    rows(),
    st.integers(1, 40),
)


def _drawn(shapes: st.SearchStrategy[Any]) -> tuple[Any, ...]:
    """Some shapes, the same in every process; many more under the thorough profile."""
    found = []

    @settings(
        max_examples=40 if THOROUGH else 1,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
    )
    @given(shapes)
    def collect(shape: Any) -> None:
        found.append(shape)

    collect()
    return tuple(dict.fromkeys(found))


# Rows of 16 bytes; an odd multiple of 16; several splits; whole blocks, a remainder, less than one.
GATHERS = (
    Gather(50, 8, "bfloat16", 21, GatherTuning(8, 1)),
    Gather(9, 4, "float32", 16, GatherTuning(8, 1)),
    Gather(7, 24, "bfloat16", 5, GatherTuning(8, 1)),
    Gather(33, 64, "bfloat16", 11, GatherTuning(4, 2)),
    Gather(16, 12, "float32", 9, GatherTuning(4, 1)),
    Gather(16, 128, "float32", 8, None),
    Gather(1, 32, "bfloat16", 1, None),
    *_drawn(_GATHER_SHAPES),
)
UPDATES = (
    Update(40, 8, "bfloat16", 70, "descent", UpdateTuning(64, 1)),
    Update(40, 24, "bfloat16", 9, "descent", None),
    Update(30, 64, "bfloat16", 16, "moments", UpdateTuning(8, 1)),
    Update(20, 128, "bfloat16", 9, "moments", UpdateTuning(8, 2)),
    Update(30, 32, "float32", 19, "descent", UpdateTuning(16, 1)),
    Update(30, 128, "float32", 9, "moments", None),
    Update(9, 4, "float32", 3, "descent", None),
    *_drawn(_UPDATE_SHAPES),
)
# Up to three levels of partial sums.
SEGMENT_SUMS = (
    SegmentSum(140, 32, "float32", 5, SegmentSumTuning(16, 1)),
    SegmentSum(33, 64, "bfloat16", 9, SegmentSumTuning(16, 1)),
    SegmentSum(32, 64, "bfloat16", 40, SegmentSumTuning(16, 2)),
    SegmentSum(40, 24, "bfloat16", 6, None),
    SegmentSum(20, 4, "float32", 3, None),
    SegmentSum(5, 128, "float32", 2, SegmentSumTuning(16, 1)),
    *_drawn(_SEGMENT_SUM_SHAPES),
)


class Rule(NamedTuple):
    """A function for `update_rows`, and what it is given."""

    function: api.RowFunction
    tables: int
    scalars: int


def rule(name: str, dtype: str) -> Rule:
    """Plain descent with decay; or one with two slots, as elementwise Adagrad and Adam have."""

    def descent(rows: Any, operands: Any, scalars: Any) -> tuple[jax.Array, ...]:
        kept = api.round_to(dtype, rows[0] * scalars[0])
        return (api.round_to(dtype, kept + api.round_to(dtype, scalars[1] * operands[0])),)

    def moments(rows: Any, operands: Any, scalars: Any) -> tuple[jax.Array, ...]:
        (row, mean, square), (gradient,) = rows, operands
        mean = mean * 0.5 + gradient * 0.5
        square = square + gradient * gradient
        step = jnp.where(square > 0, scalars[0] * mean / jnp.sqrt(square), jnp.zeros_like(mean))
        return api.round_to(dtype, row - step), mean, square

    return {"descent": Rule(descent, 1, 2), "moments": Rule(moments, 3, 1)}[name]


def _values(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, exact: bool
) -> np.ndarray:
    """Random values; `exact`: small integers, whose sums and products are exact in float32."""
    values = rng.integers(-8, 9, shape) if exact else rng.standard_normal(shape)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _ids(rng: np.random.Generator, limit: int, n: int) -> np.ndarray:
    """Ids of which some are outside [0, limit)."""
    outside = rng.choice([-(2**31), -1, limit, 2**31 - 1], n)
    return np.where(rng.random(n) < 0.2, outside, rng.integers(0, limit, n)).astype(np.int32)


def gather_arguments(case: Gather, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A table and ids."""
    rng = np.random.default_rng(seed)
    table = _values(rng, (case.vocab, case.width), case.dtype, exact=False)
    table[rng.integers(case.vocab)] = np.inf
    return table, _ids(rng, case.vocab, case.n)


def update_arguments(case: Update, seed: int, *, exact: bool | None = None) -> tuple[Any, ...]:
    """(tables, ids, operands, scalars): the ids inside the table are distinct.

    Exact unless every product is rounded before it is added: compilers may fuse the two.
    """
    if exact is None:
        exact = (case.rule, case.dtype) != ("descent", "bfloat16")
    rng = np.random.default_rng(seed)
    inside = rng.permutation(max(case.vocab, case.u))[: case.u]
    ids = np.where(rng.random(case.u) < 0.2, -1, inside).astype(np.int32)
    shape = (case.vocab, case.width)
    needed = rule(case.rule, case.dtype)
    slots = tuple(np.abs(_values(rng, shape, "float32", exact)) for _ in range(needed.tables - 1))
    operands = (_values(rng, (case.u, case.width), "float32", exact),)
    scalars = tuple(_values(rng, (case.u,), "float32", exact) for _ in range(needed.scalars))
    return (_values(rng, shape, case.dtype, exact), *slots), ids, operands, scalars


def segment_sum_arguments(
    case: SegmentSum, seed: int, *, exact: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Values and segment ids, at times with one segment that holds most tokens."""
    rng = np.random.default_rng(seed)
    ids = _ids(rng, case.segments, case.n)
    if rng.random() < 0.5:
        ids = np.where(rng.random(case.n) < 0.9, case.segments - 1, ids).astype(np.int32)
    return _values(rng, (case.n, case.width), case.dtype, exact), ids


def underflowing_sums(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, (n, 64), of segments 0 to 5, their ids, and the right square sums."""
    tiny, told = 1e-25, -1.0
    rows = [
        (0, tiny, np.s_[:], told),
        (1, -tiny, np.s_[63:], told),
        (2, tiny, np.s_[:1], 0),  # Taken away again:
        (2, -tiny, np.s_[:1], 0),
        (4, 2.0, np.s_[:], 256),
        (4, tiny, np.s_[5:], 256),
        (5, 2.0**-60, np.s_[:1], 2.0**-120),
    ]
    values = np.zeros((len(rows), 64), np.float32)
    square_sums = np.zeros(6, np.float32)
    for i, (segment, value, columns, square_sum) in enumerate(rows):
        values[i, columns] = value
        square_sums[segment] = square_sum
    ids = np.array([row[0] for row in rows], np.int32)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype), ids, square_sums


SEEDS = st.integers(0, 2**32 - 1)


def gather_oracle(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Row by row."""
    zeros = np.zeros_like(table[0])
    return np.stack([table[i] if 0 <= i < len(table) else zeros for i in ids])


def descent_oracle(tables: Any, ids: Any, operands: Any, scalars: Any) -> np.ndarray:
    """The rule "descent", row by row."""
    table = tables[0].copy()
    for i, row in enumerate(ids):
        if 0 <= row < len(table):
            kept = (table[row].astype(np.float32) * scalars[0][i]).astype(table.dtype)
            change = (operands[0][i] * scalars[1][i]).astype(table.dtype)
            total = kept.astype(np.float32) + change.astype(np.float32)
            table[row] = total.astype(table.dtype)
    return table


def segment_sum_oracle(values: np.ndarray, ids: np.ndarray, segments: int, rows: int) -> np.ndarray:
    """Sums in the order that `pallas_kernels.segment_sum_mgpu` promises, in chunks of `rows`."""
    inside = np.flatnonzero((ids >= 0) & (ids < segments))
    order = inside[np.argsort(ids[inside], kind="stable")]
    sums = np.zeros((segments, values.shape[1]), np.float32)
    level = [(int(ids[i]), values[i].astype(np.float32)) for i in order]
    while level:
        if len(level) <= rows:
            for segment, total in _chunk_sums(level):
                sums[segment] = total
            break
        partials: list[tuple[int, np.ndarray] | None] = []
        for first in range(0, len(level), rows):
            before = level[first - 1] if first else None
            chunk = level[first : first + rows]
            behind = level[first + rows] if first + rows < len(level) else None
            head = tail = None
            for segment, total in _chunk_sums(chunk):
                if before is not None and segment == before[0]:
                    head = (segment, total)
                elif behind is not None and segment == behind[0]:
                    tail = (segment, total)
                elif segment >= 0:
                    sums[segment] = total
            if tail is None and head is not None and behind is not None and head[0] == behind[0]:
                tail = (head[0], np.zeros_like(head[1]))
            partials += [head, tail]
        nobody = np.zeros(values.shape[1], np.float32)
        level = [(-1, nobody) if partial is None else partial for partial in partials]
    return sums


def _chunk_sums(chunk: list[tuple[int, np.ndarray]]) -> list[tuple[int, np.ndarray]]:
    """Each run of a chunk, added from +0 on, one row after the other."""
    runs: list[tuple[int, np.ndarray]] = []
    for segment, row in chunk:
        if not runs or runs[-1][0] != segment:
            runs.append((segment, np.zeros_like(row)))
        runs[-1] = (segment, runs[-1][1] + row)
    return [run for run in runs if run[0] >= 0]


def bits(x: Any) -> np.ndarray:
    """An array's bits, so that NaNs and signed zeros compare."""
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def name(case: Any) -> str:
    """A test's id."""
    return "-".join(str(field) for field in case[:-1])


def as_jax(tree: Any) -> Any:
    """NumPy arrays on the default device."""
    return jax.tree.map(jnp.asarray, tree)
