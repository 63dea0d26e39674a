"""Trains the click model with its table sharded over devices, and predicts with it."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import xrex
from tools.common.command import wrong_value
from tools.recommender import click_model
from tools.recommender.batches import padded_parts, training_batches
from tools.recommender.click_model import ClickInputs, ClickModelConfig, ClickModelParams
from tools.recommender.clicks import ClickData
from tools.recommender.config import TrainConfig


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
      handle: the table's layout.
      pipeline: the compiled steps.
      state: the idle state.
      model: the shape of the dense model.
    """

    handle: xrex.AsyncEmbContextHandle
    pipeline: xrex.Pipeline
    state: xrex.PipelineState
    model: ClickModelConfig


def make_trainer(data: ClickData, config: TrainConfig) -> Trainer:
    """Checks a run and makes its first state.

    Raises:
      ValueError: data and config do not go together; the message says which number to change.
    """
    check_sizes(data, config)
    handle = make_handle(data, config)
    model = click_model.config_for(data, config.emb_width, dropout=config.dropout, seed=config.seed)

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
    table = click_model.init_table(table_key, data.vocab, config.emb_width).astype(config.dtype)
    params = click_model.init_params(dense_key, model, click_model.level_log_odds(data))
    state = pipeline.init(table, params)
    return Trainer(handle, pipeline, state, model)


def check_sizes(data: ClickData, config: TrainConfig) -> None:
    """Raises UserError unless the devices, the batch and the table fit together."""
    devices = math.prod(config.mesh)
    if devices > data.train_size:
        raise wrong_value(
            "devices", devices, f"wanted at most the {data.train_size:,} examples to train on"
        )
    if config.batch_size > data.train_size:
        largest = data.train_size // devices * devices
        raise wrong_value(
            "batch_size",
            config.batch_size,
            f"there are {data.train_size:,} examples to train on: use {largest} or less",
        )
    for name in ("batch_size", "emb_width"):
        value = getattr(config, name)
        if value % devices:
            below = value // devices * devices
            use = f"{below} or {below + devices}" if below else str(devices)
            raise wrong_value(name, value, f"{devices} devices do not divide it: use {use}")
    tokens = config.batch_size * data.slots
    if config.num_unique is not None and config.num_unique > tokens:
        raise wrong_value(
            "num_unique", config.num_unique, f"a batch has {tokens} tokens: use {tokens} or less"
        )


def make_handle(data: ClickData, config: TrainConfig) -> xrex.AsyncEmbContextHandle:
    """The table's layout: columns and tokens over every axis of the mesh."""
    axes = tuple(f"x{i}" for i in range(len(config.mesh)))
    mesh = jax.make_mesh(
        config.mesh,
        axes,
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
        devices=jax.devices()[: math.prod(config.mesh)],
    )
    tokens_per_batch = config.batch_size * data.slots
    return xrex.make_context_handle(
        mesh,
        axes,
        data_axis=axes,
        tokens_per_batch=tokens_per_batch,
        emb_width=config.emb_width,
        # No batch has more distinct ids than tokens, or than the table has rows.
        num_unique=config.num_unique or min(tokens_per_batch, data.vocab),
        num_devices_per_node=jax.local_device_count(),
        out_of_range="zero",
    )


def feature_penalties(data: ClickData, config: TrainConfig) -> tuple[float, ...]:
    """One penalty per feature; the first two features are user and item."""
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
    final_state = trainer.state
    batches = (
        xrex.Batch(inputs.token_ids.ravel(), inputs)
        for inputs in training_batches(
            data,
            batch_size=config.batch_size,
            steps=config.steps,
            seed=config.seed,
            hide_users=config.hide_users,
            penalties=feature_penalties(data, config),
        )
    )
    reports = _Reports(report, trainer.handle.tokens_per_batch)
    previous = None
    for state, metrics in trainer.pipeline.run(trainer.state, batches):
        final_state = state
        # Waiting for the step before keeps one step in flight, and no more.
        if previous is not None:
            reports.add(previous)
        previous = metrics
    reports.add(previous)
    return TrainedModel(trainer.handle, trainer.model, final_state.dense_params, final_state.table)


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
