"""A Python toolchain from an interpreter of this machine, with the packages installed for it.

Finding the interpreter never fails. Whether it has what is needed is checked by an action that
everything run by the toolchain depends on: an action's failure is one message, where a repository
rule's would be three with a stack, and it is tried again by the next command.
"""

_BUILD = """\
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

# Lists the installed distributions: what runs on the toolchain runs again when one changes.
genrule(
    name = "check",
    srcs = [
        "installed.txt",
        "probe_python.py",
        "requirements.txt",
    ],
    outs = ["packages.txt"],
    cmd = "$(location check.sh) > $@",
    # Without a sandbox, whose own message would follow.
    local = True,
    message = "Checking Python",
    tools = ["check.sh"],
)

py_runtime(
    name = "runtime",
    files = ["packages.txt"],
    interpreter = "python",
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
"""

# An interpreter inside of the build may depend on the check's output; one at a path may not.
_PYTHON = """\
#!/bin/sh
exec {interpreter} "$@"
"""

_CHECK = """\
#!/bin/sh
here=${{0%/*}}
if command -v {interpreter} >/dev/null; then
  # -I: the caller's PYTHONPATH and own site-packages are not there in a sandbox either.
  {interpreter} -I "$here/probe_python.py" {needed} && exit
  # The probe has named what is missing, unless it could not run.
  [ $? = 3 ] || echo {interpreter} 'does not run as Python 3.11 or newer.' >&2
else
  echo 'xrex found no Python:' {interpreter} 'is not there.' >&2
fi
echo 'Run:' {remedy} >&2
exit 1
"""

# The distributions that xrex imports.
_XREX_NEEDS = ["absl-py", "jax", "jaxlib", "numpy"]

# What the tools and the suite import besides.
_SUITE_NEEDS = ["chex", "hypothesis", "matplotlib", "optax", "pytest", "rich", "scipy"]

def _root(ctx):
    """The folder of the workspace that is being built."""
    if hasattr(ctx, "workspace_root"):
        return ctx.workspace_root
    return ctx.path(Label("@//:WORKSPACE")).dirname

def _watch(ctx, file):
    """Runs the rule again when the file changes or goes."""
    prefix = str(_root(ctx)) + "/"
    if hasattr(ctx, "watch"):
        ctx.watch(file)
    elif file.exists and str(file).startswith(prefix):
        # Asking for a file by its label makes Bazel watch it; files elsewhere have none.
        ctx.path(Label("@//:" + str(file)[len(prefix):]))

def _watch_packages(ctx, venv):
    """Runs the rule again when a package of the virtual environment changes or goes."""
    lib = venv.get_child("lib")
    for python in lib.readdir() if lib.exists else []:
        packages = python.get_child("site-packages")
        for folder in packages.readdir() if packages.exists else []:
            if folder.basename.endswith(".dist-info"):
                _watch(ctx, folder.get_child("METADATA"))

def _find_interpreter(ctx):
    """(interpreter, whether it is the virtual environment's).

    That of $XREX_VENV, else of .venv where there is one, else $XREX_PYTHON, else python3 on PATH.
    """
    environ = ctx.os.environ
    folder = environ.get("XREX_VENV") or ".venv"
    venv = ctx.path(folder if folder.startswith("/") else "%s/%s" % (_root(ctx), folder))
    in_venv = venv.get_child("bin").get_child("python")
    if in_venv.exists:
        _watch(ctx, venv.get_child("pyvenv.cfg"))
        _watch_packages(ctx, venv)
    if in_venv.exists or environ.get("XREX_VENV"):
        return in_venv, True
    wanted = environ.get("XREX_PYTHON") or "python3"
    return ctx.path(wanted) if wanted.startswith("/") else ctx.which(wanted) or wanted, False

def _quoted(text):
    """A word of a shell's command line."""
    return "'%s'" % str(text).replace("'", "'\\''")

def _remedy(ctx, interpreter):
    """The command that makes an environment with all that is needed."""
    if not ctx.attr.suite:
        return "%s -m pip install %s  (or set XREX_PYTHON to another Python, 3.11 or newer)" % (
            interpreter,
            " ".join(_XREX_NEEDS),
        )
    venv = ctx.os.environ.get("XREX_VENV")
    return ("XREX_VENV=%s " % venv if venv else "") + "bash tools/setup_env.sh"

def _installed(ctx, interpreter):
    """The interpreter's distributions: the check runs again when they have changed."""
    if not ctx.path(interpreter).exists:
        return ""
    return ctx.execute([interpreter, "-I", ctx.path(ctx.attr._probe)]).stdout

def _python_environment_impl(ctx):
    interpreter, in_venv = _find_interpreter(ctx)
    if ctx.attr.suite and in_venv:
        # What tools/setup_env.sh installs; another interpreter may have other versions.
        needed = "--pinned \"$here/requirements.txt\""
    else:
        needed = " ".join(_XREX_NEEDS + (_SUITE_NEEDS if ctx.attr.suite else []))
    ctx.symlink(ctx.attr._probe, "probe_python.py")
    ctx.symlink(ctx.attr._requirements, "requirements.txt")
    ctx.file("installed.txt", _installed(ctx, interpreter))
    ctx.file("python", _PYTHON.format(interpreter = _quoted(interpreter)), executable = True)
    ctx.file("check.sh", executable = True, content = _CHECK.format(
        interpreter = _quoted(interpreter),
        remedy = _quoted(_remedy(ctx, interpreter)),
        needed = needed,
    ))
    ctx.file("BUILD", _BUILD.format(interpreter = interpreter))

python_environment = repository_rule(
    implementation = _python_environment_impl,
    attrs = {
        "suite": attr.bool(doc = "Whether the interpreter must run xrex's tools and suite too."),
        "watched": attr.label_list(
            doc = "Files that need not be there yet: the rule runs again when one appears.",
            allow_files = True,
        ),
        "_probe": attr.label(default = "//tools/bazel:probe_python.py"),
        "_requirements": attr.label(default = "//:requirements.txt"),
    },
    configure = True,
    doc = "Finds an interpreter, and wraps it as a toolchain that checks what it has installed.",
    environ = ["PATH", "XREX_PYTHON", "XREX_VENV"],
    local = True,
)
