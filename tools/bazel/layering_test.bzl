"""layering_test: no file of a forbidden folder is among what a target needs."""

load("@rules_python//python:defs.bzl", "PyInfo")

def _layering_test_impl(ctx):
    reached = {}
    for dep in ctx.attr.deps:
        for source in dep[PyInfo].transitive_sources.to_list():
            for folder in ctx.attr.forbidden:
                if source.short_path.startswith(folder + "/"):
                    reached["%s needs %s" % (dep.label, source.short_path)] = None
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    complaints = ["echo '%s, against the layering'" % line for line in sorted(reached)]
    lines = ["#!/bin/sh"] + complaints + ["exit %d" % (1 if reached else 0), ""]
    ctx.actions.write(script, "\n".join(lines), is_executable = True)
    return [DefaultInfo(executable = script)]

layering_test = rule(
    implementation = _layering_test_impl,
    attrs = {
        "deps": attr.label_list(
            doc = "Targets whose sources, with all that they need, are looked at.",
            providers = [PyInfo],
        ),
        "forbidden": attr.string_list(doc = "Folders of the workspace, without a final slash."),
    },
    doc = "Fails when a dependency, at any distance, has a source file in a forbidden folder.",
    test = True,
)
