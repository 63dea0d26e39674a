"""The judge of every value: lookup, update and training as the design states them, on one device.

NumPy alone (`ml_dtypes` for bfloat16), no mesh, nothing of xrex: token order is the batch's order,
a row is whole, and each float32 operation is written out once, in the order of its formula. Sums
can also be taken in float64, to tell how far float32 is from the truth.

Where a program may legally differ, and by how much, is for the test to say: the order in which
float32 sums are taken, the last bit of `exp`, a multiplication fused with an addition, and
subnormal numbers, which XLA flushes to zero in arithmetic (never in a lookup).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float32 = np.dtype(np.float32)
FLOAT32_MAX = float(np.finfo(np.float32).max)

OutOfRange = Literal["zero", "clip", "raise"]


@dataclass(frozen=True)
class IdPolicy:
    """What an id outside the table means, and which id means "no token"."""

    out_of_range: OutOfRange = "zero"
    padding_id: int | None = None


ZERO = IdPolicy()


class Resolved(NamedTuple):
    """For each id the row that is read and the row that is trained; -1 where there is none."""

    read: np.ndarray  # (tokens,) int64
    trained: np.ndarray  # (tokens,) int64


class Compressed(NamedTuple):
    """The distinct ids of a batch."""

    unique_tokens: np.ndarray  # (num_unique,) int32, ascending, `vocab` behind the last
    segment_ids: np.ndarray  # (tokens,) int32, -1 without a gradient
    dropped: int  # tokens left out for lack of room


@dataclass(frozen=True, kw_only=True)
class Adagrad:
    """Parameters of rowwise Adagrad, unchecked."""

    learning_rate: float
    eps: float = 1e-8
    half_life_steps: float | None = None
    weight_decay: float = 0.0
    lazy: bool = False


class State(NamedTuple):
    """State of rowwise Adagrad."""

    accumulator: np.ndarray  # (vocab,) float32
    last_step: np.ndarray | None  # (vocab,) int32; None unless lazy
    clock: np.ndarray  # () int32


class Result(NamedTuple):
    """How an update went."""

    norm: np.float32
    valid: bool
    dropped: int


# Ids


def resolve(ids: np.ndarray, vocab: int, policy: IdPolicy = ZERO) -> Resolved:
    """Applies the policy, one id at a time. Raises ValueError under "raise"."""
    read, trained = [], []
    for position, token in enumerate(np.asarray(ids).tolist()):
        row = token
        if policy.out_of_range == "clip" and -vocab <= token < 0:
            row = token + vocab
        inside = 0 <= row < vocab
        is_padding = policy.padding_id is not None and policy.padding_id in (token, row)
        if policy.out_of_range == "raise" and not inside and not is_padding:
            raise ValueError(f"id {token} at position {position} is outside the table")
        trained.append(row if inside and not is_padding else -1)
        nearest = min(max(row, 0), vocab - 1)
        clips = policy.out_of_range == "clip" and not is_padding
        read.append(nearest if clips else trained[-1])
    return Resolved(np.array(read, np.int64), np.array(trained, np.int64))


def lookup(table: np.ndarray, ids: np.ndarray, policy: IdPolicy = ZERO) -> np.ndarray:
    """The rows of a batch, (tokens, emb_width): the table's bits, or zeros."""
    rows = resolve(ids, table.shape[0], policy).read
    found = table[np.maximum(rows, 0)]
    return np.where((rows >= 0)[:, None], found, np.zeros((), table.dtype))


def compress(ids: np.ndarray, vocab: int, num_unique: int, policy: IdPolicy = ZERO) -> Compressed:
    """The distinct trained rows in ascending order; the largest go when there is no room."""
    trained = resolve(ids, vocab, policy).trained.tolist()
    distinct = sorted(set(trained) - {-1})
    position = {row: i for i, row in enumerate(distinct[:num_unique])}
    unique = list(position) + [vocab] * (num_unique - len(position))
    dropped = sum(row >= 0 and row not in position for row in trained)
    segments = [position.get(row, -1) for row in trained]
    return Compressed(np.array(unique, np.int32), np.array(segments, np.int32), dropped)


# Bags


def factors(combiner: str, ids: Sequence[int], weights: Sequence[float] | None) -> np.ndarray:
    """What the row of each id of one bag is multiplied by, (ids,) float32; 0 for no divisor."""
    given = [1.0] * len(ids) if weights is None else [float(w) for w in weights]
    divisor = {
        "sum": 1.0,
        "mean": sum(given),
        "sqrtn": np.sqrt(sum(w * w for w in given)),
    }[combiner]
    if weights is None:  # The divisor is a count: the factor is that count's, in float32.
        divisor = np.sqrt(np.float32(len(ids))) if combiner == "sqrtn" else np.float32(divisor)
        return np.array([np.float32(1) / divisor for _ in ids], np.float32)
    return np.array([w / divisor if divisor else 0.0 for w in given], np.float32)


def pool(rows: np.ndarray, factors: np.ndarray, accumulate: Any = np.float32) -> np.ndarray:
    """One bag, (emb_width,): rows times factors, added one after the other, rounded once."""
    total = np.zeros(rows.shape[1], accumulate)
    for row, factor in zip(rows, factors, strict=True):
        total = total + row.astype(accumulate) * accumulate(factor)
    return total.astype(rows.dtype)


def spread(gradient: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Each id's gradient, (ids, emb_width) float32, of that of the bag."""
    return gradient.astype(np.float32)[None] * factors[:, None]


# Update


def round_to(dtype: Any, x: np.ndarray) -> np.ndarray:
    """Rounds to what a table of the dtype can hold; the result is float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x).astype(dtype).astype(np.float32)


def segment_sums(
    grads: np.ndarray, segment_ids: np.ndarray, num_segments: int, accumulate: Any = np.float32
) -> np.ndarray:
    """Adds the rows of each segment, one token after the other in the batch's order.

    Not rounded: (num_segments, emb_width) of `accumulate`'s type. Segments outside are left out.
    """
    sums = np.zeros((num_segments, grads.shape[1]), accumulate)
    inside = (segment_ids >= 0) & (segment_ids < num_segments)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add.at(sums, segment_ids[inside], grads[inside].astype(accumulate))
    return sums


def init(rule: Adagrad, vocab: int) -> State:
    """The state before the first update."""
    return State(
        accumulator=np.zeros((vocab,), np.float32),
        last_step=np.zeros((vocab,), np.int32) if rule.lazy else None,
        clock=np.zeros((), np.int32),
    )


def update(
    rule: Adagrad,
    table: np.ndarray,
    state: State,
    unique_tokens: np.ndarray,
    grads: np.ndarray,
    segment_ids: np.ndarray,
    pending: bool = True,
    *,
    accumulate: Any = np.float32,
) -> tuple[np.ndarray, State, Result]:
    """One update of rowwise Adagrad. The arguments stay as they are.

    Args:
      rule: the parameters.
      table: (vocab, emb_width) bfloat16 or float32.
      state: the state.
      unique_tokens: (num_unique,) rows; those outside the table are dropped.
      grads: (tokens, emb_width) bfloat16 or float32.
      segment_ids: (tokens,) positions in `unique_tokens`; -1 without a gradient.
      pending: whether the update is real.
      accumulate: the type in which gradients and squares are added.
    """
    vocab, emb_width = table.shape
    num_unique = len(unique_tokens)
    in_table = (unique_tokens >= 0) & (unique_tokens < vocab)
    sums = segment_sums(grads, segment_ids, num_unique, accumulate)
    gradients = round_to(table.dtype, sums)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.where(in_table[:, None], gradients.astype(accumulate) ** 2, 0)
        square_sums = squares.sum(axis=1).astype(np.float32)
        norm = np.sqrt(square_sums.sum(dtype=np.float32))
    valid = bool(np.isfinite(norm) and np.isfinite(rule.learning_rate) and pending)
    has_row = np.append(in_table, False)
    segments = np.where((segment_ids >= 0) & (segment_ids < num_unique), segment_ids, num_unique)
    result = Result(norm, valid, int(np.sum(~has_row[segments])))
    if not valid:
        return table, state, result

    table = table.copy()
    accumulator = state.accumulator.copy()
    last_step = None if state.last_step is None else state.last_step.copy()
    for u, row in enumerate(unique_tokens.tolist()):
        # Not by the square sum, which underflows for small gradients.
        if not in_table[u] or not np.any(gradients[u]):
            continue
        elapsed = 1 if last_step is None else max(0, int(state.clock) - int(last_step[row]))
        table[row], accumulator[row] = _new_row(
            rule, table[row], accumulator[row], gradients[u], square_sums[u], elapsed, emb_width
        )
        if last_step is not None:
            last_step[row] = state.clock
    return table, State(accumulator, last_step, np.int32(state.clock + 1)), result


def _new_row(
    rule: Adagrad,
    row: np.ndarray,
    accumulator: np.float32,
    gradient: np.ndarray,
    square_sum: np.float32,
    elapsed: int,
    emb_width: int,
) -> tuple[np.ndarray, np.float32]:
    """The row and its accumulator, each operation in float32; decays are exact, then rounded."""
    dtype = row.dtype
    half_life = np.inf if rule.half_life_steps is None else rule.half_life_steps
    decay = np.float32(np.exp(-elapsed * np.log(2.0) / half_life))
    kept = np.float32(np.exp(-elapsed * rule.weight_decay))
    with np.errstate(over="ignore"):
        gained = np.float32(square_sum / np.float32(emb_width))
        accumulator = saturate(np.float32, np.float32(accumulator * decay) + gained)
        root = np.sqrt(accumulator) + np.float32(rule.eps)
        step = saturate(np.float32, -(np.float32(rule.learning_rate) / root))
        kept_row = round_to(dtype, row.astype(np.float32) * kept)
        change = round_to(dtype, saturate(dtype, step * gradient))
        return saturate(dtype, round_to(dtype, kept_row + change)).astype(dtype), accumulator


def saturate(dtype: Any, x: np.ndarray) -> np.ndarray:
    """Keeps float32 values at the largest finite one of the dtype."""
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    return np.minimum(np.maximum(x, -largest), largest)


def bounded(grads: np.ndarray, segment_ids: np.ndarray) -> bool:
    """Whether the sums that an update takes of the tokens' gradients are far from overflowing.

    The norm of all sums is at most the sum of all absolute values. In float64, so that the bound is
    exact; a step in float32 may differ within a thousandth of it.
    """
    trained = grads[segment_ids >= 0].astype(np.float64)
    with np.errstate(over="ignore"):
        return bool(4 * np.sum(np.abs(trained)) ** 2 <= FLOAT32_MAX)


# Training


class Gradients(NamedTuple):
    """What one step of a dense model returns to `train`."""

    rows: np.ndarray  # (tokens, emb_width): each token's gradient
    carry: Any  # the dense model's parameters and whatever else goes on to the next step
    pending: bool = True  # False cancels the batch's table update, as a bad dense gradient does


class Trained(NamedTuple):
    """The end of `train`, every update applied."""

    table: np.ndarray
    state: State
    carry: Any
    embeddings: list[np.ndarray]  # one per step, as the model saw them
    results: list[Result]  # one per step


StepFunction = Callable[[int, np.ndarray, Any], Gradients]


def train(
    rule: Adagrad,
    table: np.ndarray,
    state: State,
    batches: Sequence[np.ndarray],
    step: StepFunction,
    carry: Any = None,
    *,
    staleness: int = 0,
    num_unique: int | None = None,
    policy: IdPolicy = ZERO,
) -> Trained:
    """Trains on batches of ids, one after the other.

    Batch k is looked up in a table that holds the updates of the batches up to k - 1 - staleness:
    0 is synchronous training, 1 what an overlapped step does. At the end the updates that are still
    owed are applied in order.

    Args:
      rule: the parameters.
      table: (vocab, emb_width).
      state: the state.
      batches: one array of ids per step.
      step: the dense model: `step(k, embeddings, carry)`, called in order of k.
      carry: what the first step gets.
      staleness: by how many updates more than one a lookup lags behind.
      num_unique: the capacity; as many as there are tokens by default.
      policy: what ids outside the table mean.
    """
    owed: deque[tuple[np.ndarray, Gradients]] = deque()
    embeddings, results = [], []

    def settle(most: int) -> None:
        nonlocal table, state
        while len(owed) > most:
            ids, gradients = owed.popleft()
            unique, segments, _ = compress(ids, table.shape[0], num_unique or len(ids), policy)
            # One decision for table and dense model: the model's, and that of the sums' bound.
            pending = gradients.pending and bounded(gradients.rows, segments)
            table, state, result = update(
                rule, table, state, unique, gradients.rows, segments, pending
            )
            results.append(result)

    for k, ids in enumerate(batches):
        settle(staleness)
        embeddings.append(lookup(table, ids, policy))
        gradients = step(k, embeddings[-1], carry)
        carry = gradients.carry
        owed.append((ids, gradients))
    settle(0)
    return Trained(table, state, carry, embeddings, results)


def train_sequential(*args: Any, **kwargs: Any) -> Trained:
    """`train` with each update applied before the next lookup."""
    return train(*args, **kwargs, staleness=0)


def train_stale(*args: Any, **kwargs: Any) -> Trained:
    """`train` with batch k looked up before the update of batch k - 1 is applied."""
    return train(*args, **kwargs, staleness=1)
