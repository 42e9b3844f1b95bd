"""Builds, or installs, what a machine with a GPU and no network needs; `--help` says more."""

from gpu.kit import main

if __name__ == "__main__":
    raise SystemExit(main())
