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


def test_fake_tensors_are_served_from_the_first_import_on() -> None:
    """Other tests import what tells torch of fake results; a process of its own has `mlora_ext` only."""
    code = """
import torch, mlora_ext as mx
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    x, w, a, b = torch.empty(3, 4), torch.empty(5, 4), torch.empty(2, 4), torch.empty(5, 2)
    layout = mx.SegmentLayout.from_lengths([3])
    y = mx.multi_lora_linear(x.requires_grad_(), w, None, [a], [b.t().contiguous().t()], [1.0], layout)
    y.sum().backward()
    assert y.shape == (3, 5) and x.grad.shape == (3, 4)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
