"""Where `bash tools/setup_env.sh --aot` puts the compiler for GPUs: beside Python's own packages.

JAX loads every plugin that it finds among those, and CUDA's prints an error where there is no GPU.
So only a process that compiles for GPUs looks in this folder.
"""

import sys
from pathlib import Path


def add_aot_folder() -> None:
    """Lets this process find what is in the folder. Before jax is imported."""
    folder = str(Path(sys.prefix) / "xrex_aot")
    if folder not in sys.path:
        sys.path.append(folder)
