"""Which programs JAX compiles, by name."""

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterator

import jax


class _Names(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"Compiling (?:jit\()?([^\s()]+)\)? with", record.getMessage())
        if found:
            self.counts[found[1]] += 1


@contextlib.contextmanager
def compilations(prefix: str = "xrex_") -> Iterator[Counter[str]]:
    """Counts the programs compiled inside, of names with the prefix."""
    names, logger = _Names(), logging.getLogger("jax")
    counts: Counter[str] = Counter()
    propagates = logger.propagate
    logger.addHandler(names)
    logger.propagate = False
    try:
        with jax.log_compiles():
            yield counts
    finally:
        logger.removeHandler(names)
        logger.propagate = propagates
        counts.update({n: c for n, c in names.counts.items() if n.startswith(prefix)})
