"""xrex's Python toolchain in MODULE mode."""

load(":python_environment.bzl", "python_environment")

def _xrex_python_impl(_module_ctx):
    python_environment(name = "xrex_python")

xrex_python = module_extension(implementation = _xrex_python_impl)
