"""pytest_test: a test file, run by pytest, as a Bazel test."""

load("@rules_python//python:defs.bzl", "py_test")

_MAIN = "//tools/bazel:pytest_main.py"

def pytest_test(name, srcs, deps = [], data = [], devices = 8, env = {}, **kwargs):
    """A py_test that passes its files to pytest, under tests/conftest.py and pyproject.toml.

    Sharding (shard_count), --test_filter (an expression for pytest's -k), --test_arg and test.xml
    work as with Bazel's own test rules.

    Args:
      name: name of the target.
      srcs: test files.
      deps: what the files import.
      data: what they read or start.
      devices: how many CPU devices JAX simulates.
      env: more environment variables.
      **kwargs: as for py_test: size, shard_count, tags.
    """
    py_test(
        name = name,
        srcs = srcs + [_MAIN],
        args = ["$(rootpath %s)" % src for src in srcs],
        data = data + srcs + ["//:pyproject.toml"],
        env = dict(
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=%d" % devices},
            **env
        ),
        legacy_create_init = 0,
        main = _MAIN,
        deps = deps + ["//tests:conftest"],
        **kwargs
    )
