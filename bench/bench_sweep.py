"""Measures a sweep of 16 trials against PEFT training them one after the other; `--help` says more."""

from training.sweep import main

if __name__ == "__main__":
    raise SystemExit(main())
