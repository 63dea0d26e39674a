"""The README's example runs as written, and each of its commands is run by this suite or by CI."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()

# Where each command of the README is run; the file must name what stands behind the comma.
RUN_BY = {
    "bash tools/quickstart.sh": (".ci/run", "tools/quickstart.sh"),
    "bash tools/test.sh": (".ci/run", "tools/test.sh"),
    "bash tools/setup_env.sh --aot": (".ci/run", "tools/setup_env.sh --aot"),
    "bash tools/setup_env.sh --bazel": ("tools/bazel_test.sh", "tools/setup_env.sh --bazel"),
    "bazel test": ("tools/bazel_test.sh", "bazel test"),
    "bazel run //tools:train": (".ci/run", "bazel run"),
    "bash tools/gpu_check.sh": ("tests/gpu_check_test.py", "gpu_check.sh"),
    "pip install": ("tests/package_test.py", "pip"),
    "python -m tools.bench_pmap": ("tests/pmap_test.py", "bench_pmap"),
    "python -m tools.bench_step": ("tests/bench_step_test.py", "tools.bench_step"),
    "python -m tools.check_mesh": ("tests/check_mesh_test.py", "check_mesh"),
    "python -m tools.check_suite": ("tests/check_suite_test.py", "check_suite"),
    "python -m tools.compile_for_gpu": ("tests/compile_for_gpu_test.py", "compile_for_gpu"),
}


def test_the_example_runs_as_written(tmp_path: Path) -> None:
    (example,) = re.findall(r"<!-- example: begin -->\n```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    run = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)$", run.stdout, re.MULTILINE)]
    assert len(losses) == 20
    assert losses[-1] < 0.1 * losses[0]


def _prose() -> str:
    """The README without its example, and without its list of errors, which holds flags alone."""
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    return re.sub(r"<!-- errors: begin -->.*<!-- errors: end -->", "", text, flags=re.DOTALL)


def test_every_command_is_run_somewhere() -> None:
    blocks = re.findall(r"(?:^    (?!#).+\n)+", _prose(), re.M)
    commands = [line.strip() for block in blocks for line in block.splitlines()]
    commands += re.findall(r"`((?:bash|python|bazel|pip) [^`]+)`", README)
    assert commands
    for command in commands:
        known = [prefix for prefix in RUN_BY if command.startswith(prefix)]
        assert known, f"{command!r} is run neither by a test nor by CI: add it to RUN_BY"
        place, name = RUN_BY[known[0]]
        assert name in (ROOT / place).read_text(), f"{place} does not run {command!r}"
