"""A Python toolchain from an interpreter of this machine, with the packages installed for it."""

_BUILD = """\
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

py_runtime(
    name = "runtime",
    interpreter_path = "{interpreter}",
    python_version = "PY3",
    stub_shebang = "#!{interpreter}",
)

py_runtime_pair(
    name = "runtimes",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtimes",
    toolchain_type = "@rules_python//python:toolchain_type",
)

# The installed distributions: what depends on this is run again when one of them changes.
filegroup(
    name = "packages",
    srcs = ["packages.txt"],
)
"""

_SETUP = "bash tools/setup_env.sh"

# What xrex imports: from a distribution's name to its module.
_XREX_NEEDS = {
    "absl-py": "absl",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "numpy": "numpy",
}

# What the tools and the suite import besides.
_SUITE_NEEDS = {
    "chex": "chex",
    "hypothesis": "hypothesis",
    "matplotlib": "matplotlib",
    "optax": "optax",
    "pytest": "pytest",
    "rich": "rich",
    "scipy": "scipy",
}

def _root(ctx):
    """The folder of the workspace that is being built."""
    if hasattr(ctx, "workspace_root"):
        return ctx.workspace_root
    return ctx.path(Label("@//:WORKSPACE")).dirname

def _watch(ctx, folder, names):
    """Runs the rule again when one of the files changes."""
    for name in names:
        file = _root(ctx).get_child(folder).get_child(name)
        if hasattr(ctx, "watch"):
            ctx.watch(file)
        elif file.exists:
            # Asking for a file by its label makes Bazel watch it.
            ctx.path(Label("@//:%s/%s" % (folder, name)))

def _find_interpreter(ctx):
    """The virtual environment's interpreter, else $XREX_PYTHON, else python3 on PATH."""
    environ = ctx.os.environ
    folder = environ.get("XREX_VENV", ".venv")
    venv = ctx.path(folder) if folder.startswith("/") else _root(ctx).get_child(folder)
    in_venv = venv.get_child("bin").get_child("python")
    if in_venv.exists:
        if not folder.startswith("/"):
            # tools/setup_env.sh writes both.
            _watch(ctx, folder, ["pyvenv.cfg", "requirements.stamp"])
        return str(in_venv)
    wanted = environ.get("XREX_PYTHON") or "python3"
    found = ctx.path(wanted) if wanted.startswith("/") else ctx.which(wanted)
    if found == None or not found.exists:
        fail("\n\nxrex found no Python: there is no %s, and no '%s' on PATH.\nRun: %s\n" % (
            in_venv,
            wanted,
            _SETUP if ctx.attr.suite else "set XREX_PYTHON to an interpreter, 3.11 or newer",
        ))
    return str(found)

def _python_environment_impl(ctx):
    needed = dict(_XREX_NEEDS, **(_SUITE_NEEDS if ctx.attr.suite else {}))
    interpreter = _find_interpreter(ctx)

    # -I: the caller's PYTHONPATH and own site-packages are not there in a sandbox either.
    probe = [interpreter, "-I", ctx.path(ctx.attr._probe)]
    result = ctx.execute(probe + ["%s=%s" % item for item in needed.items()])
    if result.return_code == 3:
        missing = result.stdout.split("\n")[1:]
        fail("\n\n%s (%s) lacks: %s.\nRun: %s\n" % (
            interpreter,
            result.stdout.split("\n")[0],
            ", ".join([name for name in missing if name]),
            _SETUP if ctx.attr.suite else "%s -m pip install %s" % (
                interpreter,
                " ".join(missing).strip(),
            ),
        ))
    if result.return_code != 0:
        fail("\n\n%s does not run:\n%s\n" % (interpreter, result.stderr))
    ctx.file("packages.txt", result.stdout)
    ctx.file("BUILD", _BUILD.format(interpreter = interpreter))

python_environment = repository_rule(
    implementation = _python_environment_impl,
    attrs = {
        "suite": attr.bool(doc = "Whether the interpreter must run xrex's tools and suite too."),
        "_probe": attr.label(default = "//tools/bazel:probe_python.py"),
    },
    configure = True,
    doc = "Finds an interpreter, checks what it has installed, and wraps it as a toolchain.",
    environ = ["PATH", "XREX_PYTHON", "XREX_VENV"],
    local = True,
)
