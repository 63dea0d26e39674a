"""Describes NVIDIA GPUs to XLA, so that programs compile for them on a machine without any."""

import dataclasses
import importlib.util
import os

import jax
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """A GPU model, as its data sheet has it.

    Attributes:
      name: for people and messages.
      description: what the driver calls it.
      memory_bytes: device memory.
      memory_bandwidth: bytes per second.
      bf16_flops: dense bfloat16 operations per second of the tensor cores.
      link_bandwidth: NVLink bytes per second in each direction.
    """

    name: str
    description: str
    memory_bytes: int
    memory_bandwidth: float
    bf16_flops: float
    link_bandwidth: float

    def config(self) -> str:
        """XLA's GpuTargetConfigProto in text form. Both models have the same processor."""
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132 clock_rate_ghz: 1.98 fpus_per_core: 128
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  l2_cache_size: 52428800
  memory_bandwidth: {self.memory_bandwidth:.0f} device_memory_size: {self.memory_bytes}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{self.description}"
"""


TARGETS = {
    "h100": GpuTarget("h100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3.352e12, 989e12, 450e9),
    "h200": GpuTarget("h200", "NVIDIA H200", 150_754_820_096, 4.8e12, 989e12, 450e9),
}


class CompilerMissing(RuntimeError):
    """What compiling for GPUs needs is not installed, or came too late."""


def missing() -> str | None:
    """What stands in the way of compiling for GPUs in this process, or None."""
    absent = [
        package
        for package, module in (
            ("jax-cuda13-plugin", "jax_cuda13_plugin"),
            ("jax-cuda13-pjrt", "jax_plugins.xla_cuda13"),
            ("nvidia-cuda-nvcc", "nvidia.cu13"),
        )
        if not _is_installed(module)
    ]
    if absent:
        return f"compiling for GPUs needs {', '.join(absent)}: run `bash tools/setup_env.sh --aot`"
    try:
        gpu_devices(TARGETS["h100"], 1)
    except CompilerMissing as error:
        return str(error)
    return None


def allow_without_gpu() -> None:
    """Lets JAX load the CUDA plugin without CUDA's runtime libraries. Before JAX's first use."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def gpu_devices(target: GpuTarget, gpus: int, *, hosts: int = 1) -> list[jax.Device]:
    """Devices of a described machine, to build a `jax.sharding.Mesh` of. They run nothing.

    Args:
      target: the model of all of them.
      gpus: GPUs per host.
      hosts: how many hosts there are.

    Raises:
      CompilerMissing: the CUDA plugin is not installed, or JAX was used before `allow_without_gpu`.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.name,
            target_config=target.config(),
            topology=f"1x{hosts}x{gpus}",
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise CompilerMissing(
            f"XLA cannot compile for GPUs in this process ({error}): install what "
            "`bash tools/setup_env.sh --aot` does, and set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 "
            "before JAX is used first"
        ) from error
    return list(topology.devices)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
