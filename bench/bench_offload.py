"""Measures out-of-core tuning on a CPU: files, AdamW, a streamed base, limited memory; `--help` says more."""

from offload.command import main

if __name__ == "__main__":
    raise SystemExit(main())
