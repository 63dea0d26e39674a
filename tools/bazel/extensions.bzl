"""xrex's Python toolchain in MODULE mode."""

load(":python_environment.bzl", "python_environment")

def _xrex_python_impl(module_ctx):
    roots = [module.name for module in module_ctx.modules if module.is_root]
    python_environment(name = "xrex_python", suite = roots == ["xrex_py"])

xrex_python = module_extension(implementation = _xrex_python_impl)
