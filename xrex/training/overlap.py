"""Keeps an exchange beside the backward pass. It orders operations and changes no value.

XLA's scheduler works from the end of the program, and keeps one collective in flight. An exchange
that nothing in the program waits for would be placed last of all, behind the all-reduce of the
dense gradients, where little is left to hide it. So the last weight gradient is made to wait for
what arrives: then the exchange is through before that all-reduce begins, and everything before the
last weight gradient hides it.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal


def run_beside(backward: Callable[..., Any], cotangent: jax.Array, arriving: Any) -> Any:
    """Runs the backward pass of `jax.vjp(function, weights, rows)` beside an exchange.

    The last weight gradient waits for the exchange: more exactly, the last one that can wait
    without holding up anything else, which is the product of an activation, known since the forward
    pass, and a gradient. Where there is none, nothing waits: of a `lax.scan` over layers, or of a
    loss within `jax.jit`, only the whole is seen, and the whole makes the rows' gradient too.

    Args:
      backward: what `jax.vjp` returned; its function's last argument is no weight.
      cotangent: of the function's result.
      arriving: what the exchange returns; any pytree.

    Returns:
      The gradients, and `arriving`.
    """
    if not jax.tree.leaves(arriving):
        return backward(cotangent), arriving
    residuals, structure = jax.tree.flatten(backward)

    def run(residuals: list[Any], cotangent: jax.Array) -> Any:
        return jax.tree.unflatten(structure, residuals)(cotangent)

    traced, gradients = jax.make_jaxpr(run, return_shape=True)(residuals, cotangent)
    weights = len(jax.tree.leaves(gradients[:-1]))
    waiting = _last_for_weights_alone(traced.jaxpr, len(residuals), weights)
    if waiting is not None:
        residuals[waiting], arriving = jax.lax.optimization_barrier((residuals[waiting], arriving))
    return run(residuals, cotangent), arriving


def _last_for_weights_alone(program: Jaxpr, inputs: int, outputs: int) -> int | None:
    """Which of the first inputs is used last, among those that only the first outputs depend on."""
    first, others = program.outvars[:outputs], program.outvars[outputs:]
    for_others = {v for v in others if not isinstance(v, Literal)}
    for_first = {v for v in first if not isinstance(v, Literal)}
    first_use = {}
    for number, equation in reversed(list(enumerate(program.eqns))):
        variables = [v for v in equation.invars if not isinstance(v, Literal)]
        for needed in (for_others, for_first):
            if not needed.isdisjoint(equation.outvars):
                needed.update(variables)
                first_use.update(dict.fromkeys(variables, number))
    alone = for_first - for_others
    candidates = [
        (first_use[v], i)
        for i, v in enumerate(program.invars[:inputs])
        if v in alone and v in first_use
    ]
    return max(candidates)[1] if candidates else None
