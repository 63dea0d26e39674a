"""A seeded click stream of any size: Zipf-distributed users and items with planted preferences."""

import numpy as np

from tools.common.zipf import zipf_ids
from tools.recommender.clicks import ClickData, Feature, split_at
from tools.recommender.config import SyntheticConfig


def synthetic_clicks(config: SyntheticConfig) -> ClickData:
    """Draws the stream. The same config gives the same bits.

    A click's log-odds are the user's bias, the item's bias, and the dot product of the user's taste
    with the item's traits, which lie near their category's: so the category helps where an item is
    rare. The vocabulary keeps users and items that are never drawn: its size is the config's.
    """
    rng = np.random.default_rng(config.seed)
    users = zipf_ids(rng, config.examples, config.users, config.zipf)
    items = zipf_ids(rng, config.examples, config.items, config.zipf)
    category_of = rng.integers(config.categories, size=config.items)

    width = config.taste_width
    tastes = rng.standard_normal((config.users, width), np.float32)
    traits = rng.standard_normal((config.categories, width), np.float32)[category_of]
    traits += 0.5 * rng.standard_normal((config.items, width), np.float32)
    user_bias = 0.5 * rng.standard_normal(config.users, np.float32)
    item_bias = rng.standard_normal(config.items, np.float32)

    affinity = np.sum(tastes[users] * traits[items], axis=1) / np.sqrt(width)
    log_odds = user_bias[users] + item_bias[items] + affinity
    clicked = rng.random(config.examples) < 1 / (1 + np.exp(-log_odds))

    sizes = {"user": config.users, "item": config.items, "category": config.categories}
    features, offset = [], 0
    for name, size in sizes.items():
        features.append(Feature(name, offset, size, slots=1))
        offset += size
    values = np.stack([users, items, category_of[items]], axis=1)
    offsets = np.asarray([feature.offset for feature in features])
    return ClickData(
        name="synthetic",
        features=tuple(features),
        token_ids=(values + offsets).astype(np.int32),
        grades=clicked.astype(np.float32)[:, None],
        label_level=0,
        train_size=split_at(config.examples),
    )
