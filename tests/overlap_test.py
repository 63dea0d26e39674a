"""What of a backward pass waits for an exchange, and that waiting changes no bit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from tests.assertions import assert_same_bits
from xrex.training import overlap

ROWS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)
WEIGHTS = (np.eye(4, dtype=np.float32) + 0.5, np.full((4, 4), 0.25, np.float32))


def perceptron(weights: Any, rows: jax.Array) -> jax.Array:
    for matrix in weights:
        rows = jax.nn.relu(rows @ matrix)
    return jnp.sum(rows)


def two_towers(weights: Any, rows: jax.Array) -> jax.Array:
    """The rows themselves are in the gradients of the rows: holding them back holds up all."""
    return jnp.sum(rows * jax.nn.relu(rows[::-1] @ weights[0]) @ weights[1])


def of_rows_alone(weights: Any, rows: jax.Array) -> jax.Array:
    del weights
    return jnp.sum(rows * rows)


def hidden(weights: Any, rows: jax.Array) -> jax.Array:
    return jax.jit(perceptron)(weights, rows)


MODELS = (perceptron, two_towers, of_rows_alone, hidden)


def beside(model: Callable[..., Any]) -> Callable[..., Any]:
    def run(weights: Any, rows: jax.Array, arriving: Any) -> Any:
        loss, backward = jax.vjp(model, weights, rows)
        return overlap.run_beside(backward, jnp.ones_like(loss), arriving)

    return run


@pytest.mark.parametrize("model", MODELS)
def test_waiting_changes_no_bit(model: Callable[..., Any]) -> None:
    arriving = {"rows": np.arange(3, dtype=np.int32)}
    gradients, arrived = jax.jit(beside(model))(WEIGHTS, ROWS, arriving)
    right = jax.jit(jax.grad(model, argnums=(0, 1)))(WEIGHTS, ROWS)
    jax.tree.map(assert_same_bits, gradients, right)
    jax.tree.map(assert_same_bits, arrived, arriving)


def waiting(model: Callable[..., Any]) -> list[Any]:
    """For each gradient, as (weights, rows), whether it waits for what arrives."""

    def gradients(arriving: jax.Array) -> Any:
        return beside(model)(WEIGHTS, ROWS, arriving)[0]

    program = jax.make_jaxpr(gradients)(np.arange(3)).jaxpr
    late = {program.invars[0]}
    for equation in program.eqns:
        if any(v in late for v in equation.invars if not isinstance(v, Literal)):
            late.update(equation.outvars)
    flags = [variable in late for variable in program.outvars]
    return jax.tree.unflatten(jax.tree.structure((WEIGHTS, ROWS)), flags)


def test_the_first_layers_weight_gradient_waits_alone() -> None:
    """It is the last of the backward pass: all of the rest hides the exchange."""
    assert waiting(perceptron) == ((True, False), False)


def test_what_the_rows_gradient_needs_never_waits() -> None:
    weights, rows = waiting(two_towers)
    assert not rows
    assert any(weights)


def test_nothing_waits_where_nothing_can_wait_alone() -> None:
    assert waiting(of_rows_alone) == ((False, False), False)
    assert waiting(hidden) == ((False, False), False)


@pytest.mark.parametrize("arriving", [(), np.arange(3)])
def test_a_barrier_is_there_where_an_exchange_is(arriving: Any) -> None:
    program = str(jax.make_jaxpr(beside(perceptron))(WEIGHTS, ROWS, arriving))
    assert ("optimization_barrier" in program) == (len(arriving) > 0)
