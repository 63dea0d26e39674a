"""The dense part of a click model: biases, pairwise dot products and a small MLP. Pure functions.

Only user and item have a bias. All else speaks through dot products: with a few hundred users, a
bias for each of their traits would learn whom the training part happens to hold.

A factorization machine (Rendle, 2010) whose dot products also feed an MLP, as in DLRM (Naumov et
al., 2019). Graded examples are trained at every level at once: one score, and one threshold per
level (the all-threshold loss of Rennie and Srebro, 2005), which tells more of an example than
whether it was a click.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tools.recommender.clicks import PADDING, ClickData

BIASED = 2
"""How many features have a bias: the first ones, user and item."""


@dataclass(frozen=True)
class ClickModelConfig:
    """The shape of the model.

    Attributes:
      slots: how many tokens an example holds of each feature.
      emb_width: width of the table's rows.
      levels: grades of an example; see `ClickData`.
      label_level: the one to predict.
      hidden: width of the MLP's hidden layer.
      dropout: share of the embeddings' entries that training leaves out.
      seed: of what dropout leaves out.
    """

    slots: tuple[int, ...]
    emb_width: int
    levels: int = 1
    label_level: int = 0
    hidden: int = 32
    dropout: float = 0.0
    seed: int = 0

    @property
    def pairs(self) -> int:
        """Pairs of features, each with a dot product."""
        return len(self.slots) * (len(self.slots) - 1) // 2


def config_for(data: ClickData, emb_width: int, *, dropout: float, seed: int) -> ClickModelConfig:
    """The model that fits the data."""
    return ClickModelConfig(
        slots=tuple(feature.slots for feature in data.features),
        emb_width=emb_width,
        levels=data.grades.shape[1],
        label_level=data.label_level,
        dropout=dropout,
        seed=seed,
    )


class ClickModelParams(NamedTuple):
    """Parameters of the dense part, all float32.

    Attributes:
      bias_kernels: read the biases of the first two features, user and item, off their
        embeddings.  # shape=(BIASED, emb_width)
      dot_weights: of the dot products.  # shape=(pairs,)
      hidden_kernel: from the dot products.  # shape=(pairs, hidden)
      hidden_bias: shape=(hidden,)
      output_kernel: shape=(hidden,)
      thresholds: log-odds of each level where the score is 0.  # shape=(levels,)
    """

    bias_kernels: jax.Array
    dot_weights: jax.Array
    hidden_kernel: jax.Array
    hidden_bias: jax.Array
    output_kernel: jax.Array
    thresholds: jax.Array


class ClickInputs(NamedTuple):
    """What the loss needs of a batch besides the rows.

    Attributes:
      token_ids: PADDING where a slot is empty.  # shape=(batch, slots), dtype=jnp.int32
      grades: shape=(batch, levels), dtype=jnp.float32
      penalties: weights of half the squared norm of each token's row in the loss.
        # shape=(batch, slots), dtype=jnp.float32
      step: the batch's number, which decides what dropout leaves out.  # shape=(), dtype=jnp.int32
    """

    token_ids: jax.Array | np.ndarray
    grades: jax.Array | np.ndarray
    penalties: jax.Array | np.ndarray
    step: jax.Array | np.ndarray


def level_log_odds(data: ClickData) -> np.ndarray:
    """Log-odds of each level in the training part, (levels,) float32; one more of each kind."""
    reached = data.grades[: data.train_size].sum(axis=0, dtype=np.float64)
    return np.log((reached + 1) / (data.train_size - reached + 1)).astype(np.float32)


def init_params(
    key: jax.Array, config: ClickModelConfig, thresholds: np.ndarray
) -> ClickModelParams:
    """Fresh parameters; the MLP starts small beside the biases.

    Args:
      key: of what is random.
      config: the model's shape.
      thresholds: (levels,), such as `level_log_odds`: from zeros, the rows would have to make up
        for them, against their penalties.
    """
    bias, hidden, output = jax.random.split(key, 3)
    width, pairs = config.emb_width, config.pairs
    return ClickModelParams(
        bias_kernels=jax.random.normal(bias, (BIASED, width)) / np.sqrt(width),
        dot_weights=jnp.ones((pairs,)),
        hidden_kernel=jax.random.normal(hidden, (pairs, config.hidden))
        * np.sqrt(2 / max(pairs, 1)),
        hidden_bias=jnp.zeros((config.hidden,)),
        output_kernel=jax.random.normal(output, (config.hidden,)) * (0.3 / np.sqrt(config.hidden)),
        thresholds=jnp.asarray(thresholds),
    )


def init_table(key: jax.Array, vocab: int, emb_width: int) -> jax.Array:
    """Small random rows, (vocab, emb_width) float32: dot products of zeros would never train."""
    return 0.01 * jax.random.normal(key, (vocab, emb_width))


def scores(
    params: ClickModelParams,
    rows: jax.Array,
    token_ids: jax.Array,
    config: ClickModelConfig,
    *,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Each example's score; a threshold more is the log-odds of a level.

    Args:
      params: the parameters.
      rows: (batch * slots, emb_width), the tokens' embeddings; those of PADDING are zeros.
      token_ids: (batch, slots) int32.
      config: the model's shape.
      dropout_key: of what is left out; None, as for a prediction, leaves nothing out.

    Returns:
      (batch,) float32.
    """
    fields = pool_slots(rows, token_ids, config)
    if dropout_key is not None and config.dropout:
        kept = jax.random.bernoulli(dropout_key, 1 - config.dropout, fields.shape)
        fields = jnp.where(kept, fields / (1 - config.dropout), 0)
    biases = jnp.einsum("bfe,fe->b", fields[:, :BIASED], params.bias_kernels)
    left, right = np.triu_indices(len(config.slots), 1)
    dots = jnp.einsum("bfe,bge->bfg", fields, fields)[:, left, right]
    hidden = jax.nn.relu(dots @ params.hidden_kernel + params.hidden_bias[None, :])
    return biases + dots @ params.dot_weights + hidden @ params.output_kernel


def pool_slots(rows: jax.Array, token_ids: jax.Array, config: ClickModelConfig) -> jax.Array:
    """The mean embedding of each feature's tokens, padding left out: (batch, features, emb_width).

    A feature of which an example has no token is zeros.
    """
    rows = rows.astype(jnp.float32).reshape(*token_ids.shape, config.emb_width)
    real = (token_ids != PADDING).astype(jnp.float32)
    fields = []
    start = 0
    for slots in config.slots:
        part = slice(start, start + slots)
        count = jnp.maximum(real[:, part].sum(axis=1, keepdims=True), 1)
        fields.append(rows[:, part].sum(axis=1) / count)
        start += slots
    return jnp.stack(fields, axis=1)


def loss(
    params: ClickModelParams, rows: jax.Array, inputs: ClickInputs, config: ClickModelConfig
) -> jax.Array:
    """The log loss, summed over levels, plus the rows' penalties; averaged over examples."""
    key = jax.random.fold_in(jax.random.key(config.seed), inputs.step)
    token_ids, grades = jnp.asarray(inputs.token_ids), jnp.asarray(inputs.grades)
    score = scores(params, rows, token_ids, config, dropout_key=key)
    log_odds = score[:, None] + params.thresholds[None, :]
    log_losses = jnp.sum(jnp.logaddexp(log_odds, 0) - grades * log_odds, axis=1)
    square_norms = jnp.sum(rows.astype(jnp.float32) ** 2, axis=1).reshape(token_ids.shape)
    return jnp.mean(log_losses + 0.5 * jnp.sum(inputs.penalties * square_norms, axis=1))


def click_log_odds(
    params: ClickModelParams, rows: jax.Array, token_ids: jax.Array, config: ClickModelConfig
) -> jax.Array:
    """The log-odds of a click, (batch,) float32, for a prediction."""
    return scores(params, rows, token_ids, config) + params.thresholds[config.label_level]
