"""Simulates the throughput of 8 to 512 devices; `--help` says more."""

from forecast.command import main

if __name__ == "__main__":
    raise SystemExit(main())
