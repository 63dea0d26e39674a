"""The repositories that xrex needs in WORKSPACE mode, none of them downloaded."""

load(":python_environment.bzl", "python_environment")
load(":stand_ins.bzl", "STAND_INS", "stand_in")

def xrex_repositories(suite = False):
    """Declares what building xrex needs, offline.

    A repository that the calling workspace has declared already is left alone. Afterwards call
    register_toolchains("@xrex_python//:toolchain").

    Args:
      suite: whether the interpreter must have what xrex's own tools and tests import, too.
    """
    names = ["rules_python"]

    # Bazel 4 would download these for its own Python and test rules. Newer ones need them in
    # versions of their own. Debian's build of 4.2.3 has an empty version.
    if not native.bazel_version or native.bazel_version.startswith("4."):
        names += [name for name in STAND_INS if name not in names]
    for name in names:
        if not native.existing_rule(name):
            stand_in(name = name)
    if not native.existing_rule("xrex_python"):
        python_environment(
            name = "xrex_python",
            suite = suite,
            watched = ["@//:.venv/pyvenv.cfg"],
        )
