"""Measures the host time of layers with 1 to 64 adapters; `--help` says more."""

from linear.host import main

if __name__ == "__main__":
    raise SystemExit(main())
