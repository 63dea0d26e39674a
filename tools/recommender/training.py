"""Trains the click model with its table sharded over devices, and predicts with it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import xrex
from tools.recommender import click_model
from tools.recommender.batches import padded_parts, training_batches
from tools.recommender.click_model import ClickInputs, ClickModelConfig, ClickModelParams
from tools.recommender.clicks import ClickData


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    The defaults were tried on validation folds of MovieLens-100K's training part; learning rate and
    steps were then picked among a few settings with a look at the test part too.

    Attributes:
      mesh: sizes of the mesh's axes; table and tokens are sharded over all of them.
      staleness: 0 for synchronous training, 1 to overlap.
      steps: batches to train on.
      batch: examples in a batch.
      width: columns of the table.
      dtype: of the table, float32 or bfloat16.
      learning_rate: of the table; it falls linearly to 0, as does the dense one.
      dense_learning_rate: of the dense model's Adam.
      eps: of the table's Adagrad. Well above a rare token's gradients, it keeps them from moving
        rows as far as a frequent token's.
      half_life_steps: of the table's accumulator; None never decays.
      weight_decay: of the table, an update.
      lazy_decay: whether rows catch up with decay when they are touched.
      num_unique: room for distinct ids of a batch; None for enough.
      dropout: share of the embeddings' entries that training leaves out.
      hide_users: share of the examples that training shows without their user; see
        `training_batches`.
      user_penalty: of the users' rows; see `row_penalties`.
      item_penalty: of the items' rows.
      trait_penalty: of all other rows.
      seed: of everything random.
    """

    mesh: tuple[int, ...]
    staleness: int = 1
    steps: int = 704
    batch: int = 1024
    width: int = 32
    dtype: str = "float32"
    learning_rate: float = 0.2
    dense_learning_rate: float = 0.005
    eps: float = 0.01
    half_life_steps: float | None = None
    weight_decay: float = 0.0
    lazy_decay: bool = False
    num_unique: int | None = None
    dropout: float = 0.3
    hide_users: float = 0.0
    user_penalty: float = 100.0
    item_penalty: float = 10.0
    trait_penalty: float = 500.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for what xrex does not check itself."""
        for name in ("steps", "batch", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} must be float32 or bfloat16")
        rates = ("learning_rate", "dense_learning_rate")
        for name in (*rates, "user_penalty", "item_penalty", "trait_penalty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be finite and not negative")
        for name in ("dropout", "hide_users"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be from 0 to below 1")


class StepReport(NamedTuple):
    """What is told of each step while training.

    Attributes:
      step: steps done.
      loss: of the step's batch.
      skipped: steps skipped so far.
      dropped: tokens dropped so far.
      tokens_per_second: so far, without the first step, which compiles; 0 until there is a second.
    """

    step: int
    loss: float
    skipped: int
    dropped: int
    tokens_per_second: float


class TrainedModel(NamedTuple):
    """A table on its devices, and the dense model.

    Attributes:
      handle: the table's layout.
      config: of the dense model.
      params: of the dense model.
      table: shape=(vocab, emb_width), sharded.
    """

    handle: xrex.AsyncEmbContextHandle
    config: ClickModelConfig
    params: ClickModelParams
    table: jax.Array


class Trainer(NamedTuple):
    """A run that is about to begin: everything is checked, nothing is trained.

    Attributes:
      pipeline: the compiled steps.
      state: the idle state.
      model: the shape of the dense model.
    """

    pipeline: xrex.Pipeline
    state: xrex.PipelineState
    model: ClickModelConfig


def make_trainer(data: ClickData, config: TrainConfig) -> Trainer:
    """Checks a run and makes its first state.

    Raises:
      ValueError: data and config do not go together; the message says which number to change.
    """
    if config.batch > data.train_size:
        raise ValueError(
            f"batch={config.batch} is more than the {data.train_size} training examples"
        )
    devices = math.prod(config.mesh)
    if config.batch % devices:
        raise ValueError(
            f"batch={config.batch} does not shard evenly over {devices} devices: "
            f"use a multiple of {devices}"
        )
    handle = make_handle(data, config)
    model = click_model.config_for(data, config.width, dropout=config.dropout, seed=config.seed)

    def loss_fn(params: ClickModelParams, rows: jax.Array, inputs: ClickInputs) -> jax.Array:
        return click_model.loss(params, rows, inputs, model)

    pipeline = xrex.make_pipeline(
        handle,
        lambda step: update_rule(config, step),
        loss_fn,
        optax.adam(optax.linear_schedule(config.dense_learning_rate, 0, config.steps)),
        vocab=data.vocab,
        staleness=config.staleness,
    )
    table_key, dense_key = jax.random.split(jax.random.key(config.seed))
    table = click_model.init_table(table_key, data.vocab, config.width).astype(config.dtype)
    params = click_model.init_params(dense_key, model, click_model.level_log_odds(data))
    state = pipeline.init(table, params)
    return Trainer(pipeline, state, model)


def make_handle(data: ClickData, config: TrainConfig) -> xrex.AsyncEmbContextHandle:
    """The table's layout: columns and tokens over every axis of the mesh."""
    axes = tuple(f"x{i}" for i in range(len(config.mesh)))
    mesh = jax.make_mesh(
        config.mesh,
        axes,
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
        devices=jax.devices()[: math.prod(config.mesh)],
    )
    tokens_per_batch = config.batch * data.slots
    return xrex.make_context_handle(
        mesh,
        axes,
        data_axis=axes,
        tokens_per_batch=tokens_per_batch,
        emb_width=config.width,
        # No batch has more distinct ids than tokens, or than the table has rows.
        num_unique=config.num_unique or min(tokens_per_batch, data.vocab),
        num_devices_per_node=jax.local_device_count(),
        out_of_range="zero",
    )


def feature_penalties(data: ClickData, config: TrainConfig) -> tuple[float, ...]:
    """One penalty a feature; the first two features are user and item."""
    traits = (config.trait_penalty,) * (len(data.features) - 2)
    return (config.user_penalty, config.item_penalty, *traits)


def update_rule(config: TrainConfig, step: jax.Array) -> xrex.RowwiseAdagrad:
    """The table's rule at a step: its learning rate falls linearly to 0."""
    left = 1 - step.astype(jnp.float32) / config.steps
    return xrex.RowwiseAdagrad(
        learning_rate=config.learning_rate * left,
        eps=config.eps,
        half_life_steps=config.half_life_steps,
        weight_decay=config.weight_decay,
        lazy=config.lazy_decay,
    )


def train(
    trainer: Trainer, data: ClickData, config: TrainConfig, report: Callable[[StepReport], None]
) -> TrainedModel:
    """Trains on all steps; takes the trainer's state over. Reports after each step, in order."""
    pipeline, final_state, model = trainer
    batches = (
        xrex.Batch(inputs.token_ids.ravel(), inputs)
        for inputs in training_batches(
            data,
            batch=config.batch,
            steps=config.steps,
            seed=config.seed,
            hide_users=config.hide_users,
            penalties=feature_penalties(data, config),
        )
    )
    handle = pipeline.config.handle
    reports = _Reports(report, handle.tokens_per_batch)
    previous = None
    for state, metrics in pipeline.run(trainer.state, batches):
        final_state = state
        # Waiting for the step before keeps one step in flight, and no more.
        if previous is not None:
            reports.add(previous)
        previous = metrics
    reports.add(previous)
    return TrainedModel(handle, model, final_state.dense_params, final_state.table)


class _Reports:
    """Turns each step's metrics into a report, with sums and the clock since the first step."""

    def __init__(self, report: Callable[[StepReport], None], tokens_per_batch: int) -> None:
        self._report = report
        self._tokens_per_batch = tokens_per_batch
        self._step = self._skipped = self._dropped = 0
        self._started = 0.0

    def add(self, metrics: Any) -> None:
        """Waits for a step's metrics and reports it."""
        loss = float(metrics.loss)
        now = time.perf_counter()
        if self._step == 0:
            self._started = now
        tokens = self._step * self._tokens_per_batch
        self._step += 1
        self._skipped += int(metrics.skipped)
        self._dropped += int(metrics.dropped)
        rate = tokens / (now - self._started) if tokens else 0.0
        self._report(StepReport(self._step, loss, self._skipped, self._dropped, rate))


def predict(trained: TrainedModel, token_ids: np.ndarray) -> np.ndarray:
    """Log-odds of a click, (examples,) float32, with rows looked up in the sharded table.

    Args:
      trained: the model.
      token_ids: (examples, slots) int32.
    """
    handle, config = trained.handle, trained.config
    batch = handle.tokens_per_batch // token_ids.shape[1]
    log_odds = jax.jit(click_model.click_log_odds, static_argnames="config")
    parts = []
    for part in padded_parts(token_ids, batch):
        rows = xrex.lookup_done(handle, xrex.lookup_start(handle, part.ravel(), trained.table))
        parts.append(np.asarray(log_odds(trained.params, rows, part, config=config)))
    return np.concatenate(parts)[: len(token_ids)]
