"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
import warnings

import torch
from transformers.utils import logging as transformers_logging


def documented_parser(about: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help shows a module's docstring as it stands."""
    lines = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=lines)


def start_quietly(threads: int) -> None:
    """Silences warnings and Transformers' advice, and sets PyTorch's threads."""
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
