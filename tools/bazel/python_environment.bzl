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

# What xrex itself imports: from a distribution's name to its module.
_XREX_NEEDS = {
    "absl-py": "absl",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "numpy": "numpy",
}

def _root(ctx):
    """The folder of the workspace that is being built."""
    if hasattr(ctx, "workspace_root"):
        return ctx.workspace_root
    return ctx.path(Label("@//:WORKSPACE")).dirname

def _find_interpreter(ctx):
    """The virtual environment's interpreter, else $XREX_PYTHON, else python3 on PATH."""
    environ = ctx.os.environ
    folder = environ.get("XREX_VENV", ".venv")
    in_venv = (ctx.path(folder) if folder.startswith("/") else _root(ctx).get_child(folder))
    in_venv = in_venv.get_child("bin").get_child("python")
    if in_venv.exists:
        if folder == ".venv":
            # Asking for a file by its label makes Bazel watch it.
            for name in ["pyvenv.cfg", "requirements.stamp"]:
                if _root(ctx).get_child(folder).get_child(name).exists:
                    ctx.path(Label("@//:%s/%s" % (folder, name)))
        return str(in_venv)
    wanted = environ.get("XREX_PYTHON") or "python3"
    found = ctx.path(wanted) if wanted.startswith("/") else ctx.which(wanted)
    if found == None or not found.exists:
        fail("\n\nxrex found no Python: there is no %s, and no '%s' on PATH.\nRun: %s\n" % (
            in_venv,
            wanted,
            ctx.attr.remedy or "set XREX_PYTHON to an interpreter, 3.11 or newer",
        ))
    return str(found)

def _python_environment_impl(ctx):
    needed = ctx.attr.distributions or _XREX_NEEDS
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
            ctx.attr.remedy or "%s -m pip install %s" % (interpreter, " ".join(missing).strip()),
        ))
    if result.return_code != 0:
        fail("\n\n%s does not run:\n%s\n" % (interpreter, result.stderr))
    ctx.file("packages.txt", result.stdout)
    ctx.file("BUILD", _BUILD.format(interpreter = interpreter))

python_environment = repository_rule(
    implementation = _python_environment_impl,
    attrs = {
        "distributions": attr.string_dict(
            doc = "What the interpreter must have: from a distribution's name to its module.",
        ),
        "remedy": attr.string(doc = "The command that installs what is missing."),
        "_probe": attr.label(default = "//tools/bazel:probe_python.py"),
    },
    configure = True,
    doc = "Finds an interpreter, checks that it has the distributions, and wraps it as a toolchain.",
    environ = ["PATH", "XREX_PYTHON", "XREX_VENV"],
    local = True,
)
