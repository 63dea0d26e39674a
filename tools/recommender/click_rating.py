"""What counts as a click: the ratings from a certain one on."""

import numpy as np

RULE = (
    "4 where the highest rating is from 4 to 5; 1 where all ratings are 0 or 1; "
    "else 0.8 of the highest rating"
)
"""`default_click_rating` in words."""

MAX_LEVELS = 10


def default_click_rating(ratings: np.ndarray) -> float:
    """The least rating that is a click, as `RULE` says.

    For example, it is 4 for ratings from 0.5 to 5, and 8 for ratings from 1 to 10.
    """
    highest = float(ratings.max())
    if 4 <= highest <= 5:
        return 4.0
    if highest == 1 and np.all((ratings == 0) | (ratings == 1)):
        return 1.0
    # Not highest * 0.8, which is above 5.6 for 7.
    return highest * 4 / 5


def levels_of(ratings: np.ndarray, click_rating: float) -> np.ndarray:
    """What ratings are compared with, the click's rating among it.

    Every distinct rating but the least, where they are few: an example is trained at each level.

    Args:
      ratings: (examples,) of the training part.
      click_rating: the least rating that is a click.

    Returns:
      (levels,) in rising order.
    """
    levels = np.union1d(np.unique(ratings)[1:], [click_rating])
    return levels if len(levels) <= MAX_LEVELS else np.asarray([click_rating])
