"""Runs a command in a memory cgroup and prints the most memory that it held; `--help` says more."""

from offload.limited import main

if __name__ == "__main__":
    raise SystemExit(main())
