"""The README's example runs as written, and each of its commands is run by this suite or by CI."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()

# Where each command of the README is run.
RUN_BY = {
    "bash tools/quickstart.sh": ".ci/run",
    "bash tools/test.sh": ".ci/run",
    "pip install .": "tests/package_test.py",
    "python -m tools.bench_step": "tests/bench_step_test.py",
    "python -m tools.bench_pmap": "tests/pmap_test.py",
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


def test_every_command_is_run_somewhere() -> None:
    blocks = re.findall(r"(?:^    (?!#).+\n)+", re.sub(r"```.*?```", "", README, flags=re.S), re.M)
    commands = [line.strip() for block in blocks for line in block.splitlines()]
    commands += re.findall(r"`((?:bash|python|bazel|pip) [^`]+)`", README)
    assert commands
    for command in commands:
        known = [prefix for prefix in RUN_BY if command.startswith(prefix)]
        assert known, f"{command!r} is run neither by a test nor by CI: add it to RUN_BY"
        place = RUN_BY[max(known, key=len)]
        # The file that runs it names the script or module.
        script = re.split(r"[ =]", command.removeprefix("python -m "))[0 if "-m" in command else 1]
        assert script.split("/")[-1] in (ROOT / place).read_text(), f"{place} does not run {script}"
