"""Measures what adapters on experts cost beside attention-only ones; `--help` says more."""

from experts.command import main

if __name__ == "__main__":
    raise SystemExit(main())
