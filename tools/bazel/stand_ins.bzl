"""Small repositories in the place of those that Bazel 4 would download.

Each offers, from Bazel's native rules, the names that Bazel's own BUILD files and ours load.
"""

# A .bzl file cannot rebind a builtin that it reads, so each wrapper goes through `native`.
_WRAPPER = """
def {name}(**kwargs):
    native.{name}(**kwargs)
"""

def _wrappers(names):
    return "\n".join([_WRAPPER.format(name = name) for name in names])

_RULES_CC = {
    "cc/BUILD": "",
    "cc/defs.bzl": _wrappers([
        "cc_binary",
        "cc_library",
        "cc_test",
        "cc_toolchain",
        "cc_toolchain_suite",
    ]),
}

_RULES_JAVA = {
    "java/BUILD": "",
    "java/defs.bzl": _wrappers(["java_import", "java_runtime", "java_toolchain"]),
}

_REMOTE_COVERAGE_TOOLS = {
    "BUILD": """
filegroup(
    name = "coverage_report_generator",
    visibility = ["//visibility:public"],
)
""",
}

_RULES_PYTHON = {
    "python/BUILD": """
alias(
    name = "toolchain_type",
    actual = "@bazel_tools//tools/python:toolchain_type",
    visibility = ["//visibility:public"],
)
""",
    "python/builtins.bzl": "builtin_py_info = PyInfo\n",
    "python/defs.bzl": """
load("@bazel_tools//tools/python:toolchain.bzl", _py_runtime_pair = "py_runtime_pair")
load(":builtins.bzl", "builtin_py_info")

PyInfo = builtin_py_info
py_runtime_pair = _py_runtime_pair
""" + _wrappers(["py_binary", "py_library", "py_runtime", "py_test"]),
}

STAND_INS = {
    "remote_coverage_tools": _REMOTE_COVERAGE_TOOLS,
    "rules_cc": _RULES_CC,
    "rules_java": _RULES_JAVA,
    "rules_python": _RULES_PYTHON,
}

def _stand_in_impl(repository_ctx):
    files = STAND_INS[repository_ctx.name]
    repository_ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % repository_ctx.name)
    for path, text in files.items():
        repository_ctx.file(path, text)

stand_in = repository_rule(
    implementation = _stand_in_impl,
    doc = "One of STAND_INS, chosen by the repository's name.",
)
