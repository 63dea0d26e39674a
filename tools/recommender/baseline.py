"""The baseline that a model has to beat: logistic regression on a user's and an item's bias."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize  # type: ignore[import-untyped]
from scipy.special import expit  # type: ignore[import-untyped]

from tools.recommender.clicks import PADDING, ClickData
from tools.recommender.metrics import auc

USER_PENALTIES = (1.0, 3.0, 10.0, 30.0)
ITEM_PENALTIES = (0.3, 1.0, 3.0)
MIDDLE_PENALTIES = (10.0, 1.0)


class BiasModel(NamedTuple):
    """Log-odds of a click as an intercept, the user's bias and the item's.

    Attributes:
      intercept: the log-odds where both are unknown.
      biases: one per token of the shared vocabulary, and a zero behind them for PADDING.
        # shape=(vocab + 1,), dtype=np.float64
    """

    intercept: float
    biases: np.ndarray

    def scores(self, token_ids: np.ndarray) -> np.ndarray:
        """Log-odds, (examples,), of examples whose first two tokens are user and item."""
        return self.intercept + self.biases[token_ids[:, :2]].sum(axis=1)


def fit_biases(data: ClickData, user_penalty: float, item_penalty: float) -> BiasModel:
    """Logistic regression on the training part, with a ridge penalty per side.

    Minimises the sum of the log losses plus half the penalised squares: the most likely biases
    when they are normal with variance 1 / penalty.
    """
    tokens = data.token_ids[: data.train_size, :2]
    labels = data.labels[: data.train_size].astype(np.float64)
    user, item = data.features[:2]
    penalty = np.zeros(item.offset + item.size)
    penalty[user.offset : user.offset + user.size] = user_penalty
    penalty[item.offset : item.offset + item.size] = item_penalty

    # Steps as long as each bias' own curvature allows: the fit takes a tenth of the iterations.
    count = np.bincount(tokens.ravel(), minlength=len(penalty))
    scale = np.concatenate([[2 / np.sqrt(len(labels))], 1 / np.sqrt(count / 4 + penalty)])

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        intercept, biases = scale[0] * x[0], scale[1:] * x[1:]
        log_odds = intercept + biases[tokens[:, 0]] + biases[tokens[:, 1]]
        loss = np.logaddexp(0, log_odds) - labels * log_odds
        residual = expit(log_odds) - labels
        slopes = penalty * biases
        for column in (0, 1):
            slopes += np.bincount(tokens[:, column], residual, len(penalty))
        value = loss.sum() + 0.5 * np.sum(penalty * biases**2)
        return value, scale * np.concatenate([[residual.sum()], slopes])

    x = scale * minimize(objective, np.zeros(len(scale)), jac=True, method="L-BFGS-B").x
    biases = np.zeros(data.vocab + 1)
    biases[: len(penalty)] = x[1:]
    biases[PADDING] = 0
    return BiasModel(float(x[0]), biases)


def fit_baseline(data: ClickData, folds: Sequence[ClickData]) -> BiasModel:
    """The best bias model that the training part alone can find.

    Its penalties are those of the highest mean AUC over the folds; the fit with them is on the
    whole training part.

    Args:
      data: of which the training part is used.
      folds: of the training part, such as `usable_folds`; the penalties in the middle are taken
        where there is none.
    """
    if folds:
        penalties = max(
            itertools.product(USER_PENALTIES, ITEM_PENALTIES),
            key=lambda pair: np.mean([bias_auc(fold, *pair) for fold in folds]),
        )
    else:
        penalties = MIDDLE_PENALTIES
    return fit_biases(data, *penalties)


def bias_auc(data: ClickData, user_penalty: float, item_penalty: float) -> float:
    """Test AUC of the bias model with the given penalties."""
    model = fit_biases(data, user_penalty, item_penalty)
    return auc(data.labels[data.train_size :], model.scores(data.token_ids[data.train_size :]))
