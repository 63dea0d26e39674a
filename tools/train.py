"""Trains a click model with a sharded embedding table, and compares it with a bias baseline.

    python -m tools.train [--data=movielens|synthetic|FILE.csv] [--out=FOLDER] ...

Without a GPU it simulates eight devices on the CPU. `--help` lists all flags.
"""

import sys

from absl import app, flags, logging
from rich.console import Console

from tools.common.paths import from_caller
from tools.recommender.clicks import DataError
from tools.recommender.experiment import SIMULATED_DEVICES, Experiment, UsageError, choose_mesh, run
from tools.recommender.metrics import VALIDATION_FOLDS
from tools.recommender.movielens import default_cache
from tools.recommender.synthetic import SyntheticConfig
from tools.recommender.training import TrainConfig

_DEFAULTS = TrainConfig(mesh=(1,))
_SYNTHETIC = SyntheticConfig()

_DATA = flags.DEFINE_string(
    "data",
    "movielens",
    "movielens (ML-100K, downloaded once), synthetic, or a CSV file with the columns userId, "
    "movieId, rating and timestamp.",
)
_OUT = flags.DEFINE_string("out", "out", "Folder for metrics.json and training.png.")
_CACHE = flags.DEFINE_string("cache", str(default_cache()), "Folder for the downloaded data.")
_DEVICES = flags.DEFINE_integer(
    "devices",
    None,
    f"Devices to train on. Default: all GPUs, or {SIMULATED_DEVICES} simulated CPU devices.",
    lower_bound=1,
)
_MESH = flags.DEFINE_string("mesh", None, "Shape of the mesh, such as 2x4. Default: one axis.")
_STALENESS = flags.DEFINE_integer(
    "staleness",
    _DEFAULTS.staleness,
    "0: synchronous training; 1: lookups and updates travel beside the dense model.",
    lower_bound=0,
    upper_bound=1,
)
_STEPS = flags.DEFINE_integer("steps", _DEFAULTS.steps, "Batches to train on.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", _DEFAULTS.batch, "Examples a batch.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", _DEFAULTS.width, "Columns of the table.", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", _DEFAULTS.dtype, ["float32", "bfloat16"], "Type of the table.")
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", _DEFAULTS.learning_rate, "Of the table; falls linearly to 0.", lower_bound=0
)
_DENSE_LEARNING_RATE = flags.DEFINE_float(
    "dense_learning_rate",
    _DEFAULTS.dense_learning_rate,
    "Of the dense model; falls linearly to 0.",
    lower_bound=0,
)
_EPS = flags.DEFINE_float("eps", _DEFAULTS.eps, "Of the table's rowwise Adagrad.")
_HALF_LIFE = flags.DEFINE_float(
    "half_life_steps", None, "Steps that halve the table's accumulators. Default: no decay."
)
_WEIGHT_DECAY = flags.DEFINE_float(
    "weight_decay", _DEFAULTS.weight_decay, "Of the table's rows, an update.", lower_bound=0
)
_LAZY_DECAY = flags.DEFINE_boolean(
    "lazy_decay", _DEFAULTS.lazy_decay, "Whether rows catch up with decay when they are touched."
)
_NUM_UNIQUE = flags.DEFINE_integer(
    "num_unique", None, "Room for distinct ids of a batch. Default: enough.", lower_bound=1
)
_DROPOUT = flags.DEFINE_float(
    "dropout", _DEFAULTS.dropout, "Share of the embeddings' entries that training leaves out."
)
_HIDE_USERS = flags.DEFINE_float(
    "hide_users",
    _DEFAULTS.hide_users,
    "Share of the examples that training shows without their user.",
)
_USER_PENALTY = flags.DEFINE_float(
    "user_penalty", _DEFAULTS.user_penalty, "Ridge penalty of the users' rows.", lower_bound=0
)
_ITEM_PENALTY = flags.DEFINE_float(
    "item_penalty", _DEFAULTS.item_penalty, "Ridge penalty of the items' rows.", lower_bound=0
)
_TRAIT_PENALTY = flags.DEFINE_float(
    "trait_penalty", _DEFAULTS.trait_penalty, "Ridge penalty of all other rows.", lower_bound=0
)
_SEED = flags.DEFINE_integer("seed", 0, "Of everything random.", lower_bound=0)
_FOLD = flags.DEFINE_integer(
    "fold",
    0,
    "0: train on all but the last tenth, which is the test. 1 to 3: validation, as if the training "
    "part were all there is (2 and 3: yet earlier). For choosing flags without a look at the test.",
    lower_bound=0,
    upper_bound=VALIDATION_FOLDS,
)
_EXAMPLES = flags.DEFINE_integer(
    "examples", _SYNTHETIC.examples, "Examples of --data=synthetic.", lower_bound=2
)
_USERS = flags.DEFINE_integer(
    "users", _SYNTHETIC.users, "Users of --data=synthetic.", lower_bound=1
)
_ITEMS = flags.DEFINE_integer(
    "items", _SYNTHETIC.items, "Items of --data=synthetic.", lower_bound=1
)


def main(arguments: list[str]) -> None:
    """Trains as the flags say; a mistake of the user's ends it with one message."""
    # At level INFO, which app.run sets, JAX tells which platforms it did not find.
    logging.set_verbosity(logging.WARNING)
    try:
        if len(arguments) > 1:
            raise UsageError(f"unexpected argument {arguments[1]!r}: flags are --name=value")
        run(experiment(), Console())
    except (UsageError, DataError, OSError) as error:
        sys.exit(f"train: {error}")


def experiment() -> Experiment:
    """The flags as settings."""
    mesh = choose_mesh(_MESH.value, _DEVICES.value)
    data = _DATA.value
    try:
        return Experiment(
            data=str(from_caller(data)) if data.endswith(".csv") else data,
            out=from_caller(_OUT.value),
            cache=from_caller(_CACHE.value),
            fold=_FOLD.value,
            train=train_config(mesh),
            synthetic=SyntheticConfig(
                examples=_EXAMPLES.value, users=_USERS.value, items=_ITEMS.value, seed=_SEED.value
            ),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def train_config(mesh: tuple[int, ...]) -> TrainConfig:
    """The flags as a configuration."""
    return TrainConfig(
        mesh=mesh,
        staleness=_STALENESS.value,
        steps=_STEPS.value,
        batch=_BATCH.value,
        width=_WIDTH.value,
        dtype=_DTYPE.value,
        learning_rate=_LEARNING_RATE.value,
        dense_learning_rate=_DENSE_LEARNING_RATE.value,
        eps=_EPS.value,
        half_life_steps=_HALF_LIFE.value,
        weight_decay=_WEIGHT_DECAY.value,
        lazy_decay=_LAZY_DECAY.value,
        num_unique=_NUM_UNIQUE.value,
        dropout=_DROPOUT.value,
        hide_users=_HIDE_USERS.value,
        user_penalty=_USER_PENALTY.value,
        item_penalty=_ITEM_PENALTY.value,
        trait_penalty=_TRAIT_PENALTY.value,
        seed=_SEED.value,
    )


if __name__ == "__main__":
    app.run(main)
