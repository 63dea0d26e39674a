"""Another workspace's program: looks two rows up over two simulated devices."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np

import xrex

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
handle = xrex.make_context_handle(
    mesh,
    "batch",
    data_axis="batch",
    tokens_per_batch=2,
    emb_width=4,
    num_unique=2,
    num_devices_per_node=2,
)
table = jnp.arange(32, dtype=jnp.float32).reshape(8, 4)
pin = xrex.lookup_start(handle, np.array([5, 2]), table)
print(xrex.lookup_done(handle, pin).tolist())
