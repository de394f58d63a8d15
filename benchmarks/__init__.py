"""What the README's figures come from; `python -m benchmarks.NAME --help` for each."""
