"""Runs a command in a memory cgroup, and prints the most that it held and whether it met the limit.

    python bench/memory_limit.py 1GiB python train.py --epochs 1

The kernel counts everything, page cache included. Exits with the command's code, or with 1 if a charge met
the limit: the command then had to give up pages, or was killed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from mlora.config.sections import parse_size
from shared.harness import documented_parser

from offload.memory_group import MemoryGroup


def main() -> int:
    """Runs the command and prints a line of JSON behind its output."""
    parser = documented_parser(__doc__)
    parser.add_argument("limit", help="bytes, or a size such as 1GiB")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="with its arguments")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("command: expected one, got none")
    try:
        with MemoryGroup(parse_size(arguments.limit)) as group:
            code = group.start(arguments.command).wait()
            usage = group.usage()
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(usage)))
    return code or int(usage.failed > 0)
