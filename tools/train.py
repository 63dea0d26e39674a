"""Trains a click model with a sharded embedding table, and compares it with a bias baseline.

    python -m tools.train [--data=movielens|synthetic|FILE.csv] [--out=FOLDER] ...

Without a GPU it simulates eight devices on the CPU.
"""

import dataclasses
from typing import Any, TypeVar

from tools.common.command import Command
from tools.common.paths import from_caller, output_folder
from tools.recommender import click_rating
from tools.recommender.config import Experiment, SyntheticConfig, TrainConfig

COMMAND = Command("train", __doc__)
_TRAIN = TrainConfig(mesh=(1,))
_SYNTHETIC = SyntheticConfig()
# What float32 and int32 can hold.
_LARGEST, _SMALLEST, _MOST = 3.4e38, 1.2e-38, 2**31 - 1
# More would be an error of typing: their tables alone would take tens of gigabytes.
_MOST_SYNTHETIC = 10**8
T = TypeVar("T", SyntheticConfig, TrainConfig)

_DATA = COMMAND.words(
    "data",
    "movielens",
    "movielens, synthetic or a file named *.csv",
    "movielens (ML-100K, downloaded once), synthetic, or a CSV file with the columns userId, "
    "movieId, rating and timestamp.",
)
_CLICK_RATING = COMMAND.number(
    "click_rating",
    None,
    f"The least rating that counts as a click. Default: {click_rating.RULE}.",
)
_OUT = COMMAND.words(
    "out", "out", "the name of a folder", "Folder for metrics.json and training.png."
)
_CACHE = COMMAND.words(
    "cache",
    None,
    "the name of a folder",
    "Folder for the downloaded data. Default: xrex/ml-100k in $XDG_CACHE_HOME or ~/.cache.",
)
_DEVICES = COMMAND.integer(
    "devices",
    None,
    "Devices to train on. Default: all GPUs, or 8 simulated CPU devices.",
    at_least=1,
    at_most=1024,
)
_MESH = COMMAND.words(
    "mesh", None, "sizes such as 2x4", "Shape of the mesh, such as 2x4. Default: one axis."
)
_FOLD = COMMAND.integer(
    "fold",
    0,
    "0: train on all but the last tenth, which is the test. 1 to 3: validation, as if the training "
    "part were all there is (2 and 3: yet earlier). For choosing flags without a look at the test.",
    at_least=0,
    at_most=3,
)

# The flags from here on are the attributes of TrainConfig and SyntheticConfig, by name.
COMMAND.integer(
    "staleness",
    _TRAIN.staleness,
    "0: synchronous training; 1: lookups and updates travel beside the dense model.",
    at_least=0,
    at_most=1,
)
COMMAND.integer("steps", _TRAIN.steps, "Batches to train on.", at_least=1, at_most=_MOST)
COMMAND.integer("batch_size", _TRAIN.batch_size, "Examples per batch.", at_least=1)
COMMAND.integer("emb_width", _TRAIN.emb_width, "Columns of the table.", at_least=1)
COMMAND.choice("dtype", _TRAIN.dtype, ["float32", "bfloat16"], "Type of the table.")
COMMAND.number(
    "learning_rate",
    _TRAIN.learning_rate,
    "Learning rate of the table; it falls linearly to 0.",
    at_least=0,
    below=_LARGEST,
)
COMMAND.number(
    "dense_learning_rate",
    _TRAIN.dense_learning_rate,
    "Learning rate of the dense model; it falls linearly to 0.",
    at_least=0,
    below=_LARGEST,
)
COMMAND.number(
    "eps", _TRAIN.eps, "eps of the table's rowwise Adagrad.", at_least=_SMALLEST, below=_LARGEST
)
COMMAND.number(
    "half_life_steps",
    None,
    "Steps that halve the table's accumulators. Default: they do not decay.",
    at_least=_SMALLEST,
    below=_LARGEST,
)
COMMAND.number(
    "weight_decay",
    _TRAIN.weight_decay,
    "Decay of the table's rows per update.",
    at_least=0,
    below=_LARGEST,
)
COMMAND.switch(
    "lazy_decay", _TRAIN.lazy_decay, "Whether rows catch up with decay when they are touched."
)
COMMAND.integer(
    "num_unique", None, "Room for the distinct ids of a batch. Default: enough.", at_least=1
)
COMMAND.number(
    "dropout",
    _TRAIN.dropout,
    "Share of the embeddings' entries that training leaves out.",
    at_least=0,
    below=1,
)
COMMAND.number(
    "hide_users",
    _TRAIN.hide_users,
    "Share of the examples that training shows without their user.",
    at_least=0,
    below=1,
)
for _name, _whose in (
    ("user_penalty", "the users' rows"),
    ("item_penalty", "the items' rows"),
    ("trait_penalty", "all other rows"),
):
    COMMAND.number(
        _name, getattr(_TRAIN, _name), f"Ridge penalty of {_whose}.", at_least=0, below=_LARGEST
    )
COMMAND.integer("seed", 0, "Seed of everything random.", at_least=0, at_most=2**32 - 1)
COMMAND.integer(
    "examples",
    _SYNTHETIC.examples,
    "Examples of --data=synthetic.",
    at_least=2,
    at_most=_MOST_SYNTHETIC,
)
COMMAND.integer(
    "users", _SYNTHETIC.users, "Users of --data=synthetic.", at_least=1, at_most=_MOST_SYNTHETIC
)
COMMAND.integer(
    "items", _SYNTHETIC.items, "Items of --data=synthetic.", at_least=1, at_most=_MOST_SYNTHETIC
)


def main() -> None:
    """Trains as the flags say."""
    # First, so that no work is lost to a folder that cannot be written.
    out = output_folder("out", _OUT.value)
    # Late, since --help needs neither JAX nor what draws.
    from rich.console import Console

    from tools.common.devices import choose_mesh
    from tools.recommender.experiment import run

    data, cache = _DATA.value, _CACHE.value
    experiment = Experiment(
        data=str(from_caller(data)) if data.lower().endswith(".csv") else data,
        out=out,
        cache=None if cache is None else from_caller(cache),
        click_rating=_CLICK_RATING.value,
        fold=_FOLD.value,
        train=from_flags(TrainConfig, mesh=choose_mesh(_MESH.value, _DEVICES.value)),
        synthetic=from_flags(SyntheticConfig),
    )
    run(experiment, Console())


def from_flags(config: type[T], **others: Any) -> T:
    """A configuration of the flags that are named as its attributes are."""
    names = {field.name for field in dataclasses.fields(config)} - others.keys()
    values: dict[str, Any] = {
        name: COMMAND.flags[name].value for name in COMMAND.names if name in names
    }
    return config(**values, **others)


if __name__ == "__main__":
    COMMAND.run(main)
