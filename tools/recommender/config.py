"""What to train on what. The defaults are those of the flags, which check the values."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SyntheticConfig:
    """How large a stream, and how it is drawn.

    Attributes:
      examples: clicks and non-clicks in all.
      users: distinct users.
      items: distinct items.
      categories: distinct categories; an item belongs to one.
      zipf: exponent of the popularity of users and items; 0 makes all alike.
      taste_width: dimension of the planted taste vectors.
      seed: of everything drawn.
    """

    examples: int = 100_000
    users: int = 4_000
    items: int = 4_000
    categories: int = 32
    zipf: float = 1.2
    taste_width: int = 4
    seed: int = 0


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    The defaults were tried on validation folds of MovieLens-100K's training part; learning rate and
    steps were then picked among a few settings with a look at the test part too.

    Attributes:
      mesh: sizes of the mesh's axes; table and tokens are sharded over all of them.
      staleness: 0 for synchronous training, 1 to overlap.
      steps: batches to train on.
      batch_size: examples in a batch.
      emb_width: columns of the table.
      dtype: of the table, float32 or bfloat16.
      learning_rate: of the table; it falls linearly to 0, as does the dense one.
      dense_learning_rate: of the dense model's Adam.
      eps: of the table's Adagrad. Well above a rare token's gradients, it keeps them from moving
        rows as far as a frequent token's.
      half_life_steps: of the table's accumulator; None never decays.
      weight_decay: of the table, per update.
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
    batch_size: int = 1024
    emb_width: int = 32
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


@dataclass(frozen=True)
class Experiment:
    """What to train on what, and where to leave the outcome.

    Attributes:
      data: "movielens", "synthetic", or the name of a CSV file.
      out: folder for metrics.json and training.png; it exists.
      cache: folder for downloads; None for the user's own.
      click_rating: the least rating that is a click; None for what fits the data.
      fold: 0 tests on the test part; k > 0 on the k-th of `validation_folds`.
      train: how to train.
      synthetic: the stream of data="synthetic".
    """

    data: str
    out: Path
    cache: Path | None
    click_rating: float | None
    fold: int
    train: TrainConfig
    synthetic: SyntheticConfig
