"""Measures what the scheduler takes of a step, and how well it predicts memory; `--help` says more."""

from scheduler.command import main

if __name__ == "__main__":
    raise SystemExit(main())
