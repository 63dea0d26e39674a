"""Command-line tools, run from the repository: `python -m tools.train`."""
