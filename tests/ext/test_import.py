"""`import mlora_ext` needs torch and imports nothing else that takes time."""

import subprocess
import sys


def test_it_adds_only_itself_to_torch() -> None:
    code = (
        "import sys, torch\nbefore = set(sys.modules)\nimport mlora_ext\n"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["['mlora_ext']", "False"]
