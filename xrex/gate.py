"""Order without a value: `gated` holds an array back until another one, the gate, is computed."""

import jax
import jax.numpy as jnp

from pallas_kernels import api as kernels
from xrex.layout.handle import AsyncEmbContextHandle


def gated(handle: AsyncEmbContextHandle, x: jax.Array, gate: jax.Array | None) -> jax.Array:
    """The same array, bit for bit, not available before the gate is."""
    if gate is None:
        return x
    x, gate = jax.lax.optimization_barrier((x, jax.lax.stop_gradient(gate)))
    # XLA drops barriers before it decides what must be copied: on CPUs, and in programs for a
    # single GPU. With several GPUs it keeps them, and `_tied` would add a collective.
    default = _tied if handle.group_size == 1 else _untied
    return jax.lax.platform_dependent(x, gate, cpu=_tied, default=default)


def _untied(x: jax.Array, gate: jax.Array) -> jax.Array:
    del gate
    return x


def _tied(x: jax.Array, gate: jax.Array) -> jax.Array:
    """The same array, by arithmetic that needs the gate."""
    value = jnp.max(gate.astype(jnp.uint32), initial=0)
    # No square leaves a remainder of 2, and XLA does not know that.
    never = value * value % 4 == 2
    bits = kernels.as_bits(x)
    return kernels.from_bits(jnp.where(never, jnp.zeros_like(bits), bits), x.dtype)
