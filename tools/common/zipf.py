"""Ids as recommenders see them: a few are frequent, most are rare."""

import numpy as np


def zipf_ids(rng: np.random.Generator, draws: int, size: int, exponent: float) -> np.ndarray:
    """Draws numbers below `size`, the k-th most frequent with odds of k**-exponent."""
    cumulative = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
    ranks = np.searchsorted(cumulative, rng.random(draws) * cumulative[-1], side="right")
    # So that a frequent id says nothing of its number.
    return rng.permutation(size)[np.minimum(ranks, size - 1)]
