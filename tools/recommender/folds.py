"""The parts of a data set that a run uses: training, test, and earlier folds of training."""

import numpy as np

from tools.common.command import UserError
from tools.recommender.clicks import ClickData

VALIDATION_FOLDS = 3


def validation_folds(data: ClickData) -> list[ClickData]:
    """Rolling splits of the training part, the latest first.

    The first fold's test part is the training part's last tenth; the next fold ends where it
    begins, and so on.
    """
    folds, end = [], data.train_size
    for _ in range(VALIDATION_FOLDS):
        folds.append(data.before(end))
        end = folds[-1].train_size
    return folds


def usable_folds(data: ClickData) -> list[ClickData]:
    """The validation folds that have clicks and non-clicks in both parts: an AUC needs them."""
    return [fold for fold in validation_folds(data) if not _problems(fold)]


def choose_fold(data: ClickData, fold: int) -> ClickData:
    """The data of a run, whose training and test part both have clicks and non-clicks.

    Args:
      data: all of it.
      fold: 0 tests on the data's test part; k > 0 on that of the k-th of `validation_folds`.

    Raises:
      UserError: a part is empty, or all of its labels are the same.
    """
    chosen = validation_folds(data)[fold - 1] if fold else data
    problems = _problems(chosen)
    if problems:
        raise UserError(f"{data.name}: {problems[0]}; {_remedy(data, fold)}")
    return chosen


def _problems(data: ClickData) -> list[str]:
    found = []
    size, examples = data.train_size, len(data.labels)
    for part, start, end in (("training", 0, size), ("test", size, examples)):
        labels = data.labels[start:end]
        where = f"the {part} part (examples {start + 1:,} to {end:,} of {examples:,}, by time)"
        if start == end:
            found.append(f"the {part} part is empty: the data has too few examples")
        elif np.all(labels == labels[0]):
            kind = "clicks" if labels[0] else "non-clicks"
            found.append(f"{where} has {kind} only, and both kinds are needed")
    return found


def _remedy(data: ClickData, fold: int) -> str:
    other_fold = " or --fold" if fold else ""
    if data.click_rating is None:
        return f"choose another --examples, --seed{other_fold}"
    return (
        f"a click is a rating of at least {data.click_rating:g}: choose another "
        f"--click_rating{other_fold}, or give more, or more varied, examples"
    )
