"""Measures the memory of data, and how soon a run over a million samples trains; `--help` says more."""

from training.data import main

if __name__ == "__main__":
    raise SystemExit(main())
