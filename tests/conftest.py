"""What every test runs under: eight simulated devices, strict promotion, warnings as errors."""

import gc
import os

# Before jax is imported; appended, so that flags of the caller's own stay.
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

# Lets the CUDA plugin compile on machines without CUDA's libraries; nothing where there is none.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

from tools.gpu.aot_folder import add_aot_folder

add_aot_folder()  # for the tests that compile for GPUs

import jax

# Without a GPU the compiler's plugin is for compiling alone: no test may wait for its devices.
if not os.path.exists("/dev/nvidiactl") and "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
    jax.devices()  # Eight from here on, whatever a test asks for.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

from tests.quick_compiles import (  # noqa: F401 (a hook and fixtures, found by their names)
    optimized,
    pytest_sessionstart,
    users_buffers,
)
from tests.suite_report import (  # noqa: F401 (hooks and a fixture, found by their names)
    pytest_configure,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    tally,
)

# What is imported by now stays: collections need not go through it again and again.
gc.freeze()
gc.set_threshold(20_000, 20, 50)
