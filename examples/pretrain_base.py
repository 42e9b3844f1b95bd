"""Pre-train the quickstart's base model: a byte-level Llama on the synthetic text of `corpus.py`.

    python examples/pretrain_base.py --output examples/tiny-base

writes a folder that `AutoModelForCausalLM` and `AutoTokenizer` load. Some 12 minutes on two cores.
"""

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from corpus import documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
END_ID, PAD_ID = 256, 257
VALIDATION_SEED = 1


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token ids are the bytes of the UTF-8 text.

    It is a byte-level BPE without merges. Ids 0 to 255 are the byte values, 256 ends a document and 257 pads.

    Returns:
        The tokenizer; `save_pretrained` writes what `AutoTokenizer` loads.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = itertools.count(256)
    alphabet = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def rows(seed: int, length: int) -> Iterator[list[int]]:
    """Token ids of whole documents, one after the other, until a row is full.

    Args:
        seed: Seed of the documents.
        length: Tokens in a row. A row starts with a new document; its last one is cut.

    Yields:
        `length` token ids.
    """
    row: list[int] = []
    for document in documents(seed):
        row += [*document.encode(), END_ID]
        if len(row) >= length:
            yield row[:length]
            row = []


def batches(seed: int, batch_size: int, length: int) -> Iterator[torch.Tensor]:
    """Batches of rows.

    Args:
        seed: Seed of the documents.
        batch_size: Rows in a batch.
        length: Tokens in a row.

    Yields:
        Token ids `[batch_size, length]`, int64.
    """
    stream = rows(seed, length)
    while True:
        yield torch.tensor(list(itertools.islice(stream, batch_size)))


def new_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A randomly initialised Llama in fp32."""
    config = LlamaConfig(
        vocab_size=PAD_ID + 1,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean next-byte cross-entropy in nats, computed under bf16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=ids, labels=ids).loss


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, args: argparse.Namespace) -> float:
    """Mean loss over eight batches of documents from a seed of their own."""
    held_out = itertools.islice(batches(VALIDATION_SEED, args.batch_size, args.length), 8)
    return sum(float(loss_of(model, ids)) for ids in held_out) / 8


def learning_rate_factor(step: int, steps: int, warmup: int = 50) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def pretrain(args: argparse.Namespace) -> LlamaForCausalLM:
    """Train a new model with AdamW and print its progress.

    Args:
        args: The command line's options.

    Returns:
        The trained model, in fp32.
    """
    torch.manual_seed(args.seed)
    model = new_model(args)
    print(f"{model.num_parameters():,} parameters", flush=True)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98), fused=True)
    factor = partial(learning_rate_factor, steps=args.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    start = time.monotonic()
    training = batches(args.seed + 2, args.batch_size, args.length)
    for step, ids in enumerate(itertools.islice(training, args.steps), 1):
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}  loss {loss.item():.4f}  {time.monotonic() - start:.0f} s", flush=True)
        if step % 500 == 0:
            save(model, args.output)
    return model


def save(model: LlamaForCausalLM, output: Path) -> None:
    """Write the model and its tokenizer; weights are stored in bf16 and load as fp32.

    Args:
        model: The model in fp32; it is not changed.
        output: The folder.
    """
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(output, state_dict=weights)
    byte_level_tokenizer().save_pretrained(output)


def options() -> argparse.ArgumentParser:
    """The command line; its defaults made the committed model."""
    parser = argparse.ArgumentParser(description="Pre-train the quickstart's base model.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    """Parse the command line, train, save, and compare the stored model with the trained one."""
    args = options().parse_args()
    model = pretrain(args)
    save(model, args.output)
    stored = LlamaForCausalLM.from_pretrained(args.output)
    print(
        f"validation loss {validation_loss(model, args):.4f}, as stored {validation_loss(stored, args):.4f}"
    )


if __name__ == "__main__":
    main()
