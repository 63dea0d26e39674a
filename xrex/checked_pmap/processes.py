"""From the arrays of one process to those of all, and back.

Arrays that a caller of `xrex.pmap` sees are **local**: they hold this process's entries along the
mapped axis. The compiled program sees **global** ones, with the entries of all processes, in the
order of the mesh's devices.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def to_global(leaves: Sequence[Any], mesh: Mesh, specs: Sequence[PartitionSpec]) -> list[Any]:
    """Returns global arrays that hold the local `leaves` of every process of `mesh`.

    A leaf that is already laid out over this process's devices keeps its buffers. Python numbers
    stay as they are, and stay weakly typed; so do arrays being traced, on a mesh of one process.
    Nothing is said between processes.

    Raises:
      NotImplementedError: a leaf is being traced and the mesh is of several processes.
      ValueError: a leaf is a global array already.
    """
    converted = []
    for leaf, spec in zip(leaves, specs, strict=True):
        traced = isinstance(leaf, jax.core.Tracer)
        if traced and mesh.size != mesh.local_mesh.size:
            error = NotImplementedError(
                "pmap over several processes cannot run under jit, grad or vmap: the arrays being "
                "traced are of one process only."
            )
            error.add_note(
                "Apply the transformation inside, e.g. pmap(jax.grad(f)) for jax.grad(pmap(f)), or "
                "use jax.shard_map with global arrays."
            )
            raise error
        if not traced and isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                "pmap takes each process's own arrays, but got an array of shape "
                f"{leaf.shape} that spans processes. Use jax.shard_map for global arrays."
            )
        if not traced and hasattr(leaf, "dtype"):
            leaf = multihost_utils.host_local_array_to_global_array(leaf, mesh, spec)
        converted.append(leaf)
    return converted


def to_global_shapes(
    leaves: Sequence[Any], mesh: Mesh, specs: Sequence[PartitionSpec]
) -> list[jax.ShapeDtypeStruct]:
    """Returns the global shapes, dtypes and shardings of what `to_global` would make."""
    shapes = []
    for leaf, spec in zip(leaves, specs, strict=True):
        aval = jax.eval_shape(lambda x: x, leaf)
        shape = list(aval.shape)
        for axis, name in enumerate(spec):
            if name is not None:
                shape[axis] = shape[axis] * mesh.size // mesh.local_mesh.size
        sharding = NamedSharding(mesh, spec)
        shapes.append(
            jax.ShapeDtypeStruct(
                tuple(shape), aval.dtype, sharding=sharding, weak_type=aval.weak_type
            )
        )
    return shapes


def to_local(outputs: Any, mesh: Mesh, specs: Any) -> Any:
    """Returns this process's part of global `outputs`; `specs` is a tree prefix of them."""
    return multihost_utils.global_array_to_host_local_array(outputs, mesh, specs)
