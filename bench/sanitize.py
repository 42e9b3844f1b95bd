"""Runs each GPU backend on small, odd shapes, also under compute-sanitizer; `--help` says more."""

from gpu.sanitize import main

if __name__ == "__main__":
    raise SystemExit(main())
