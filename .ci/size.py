"""Print how thick a checkout is: lines, files, classes, layers, words of docs, and what one call passes.

Usage: python .ci/size.py [CHECKOUT ...]

Each checkout needs its compiled library; the interpreter that runs this script serves all of them. The call
is a `forward_backward` of one stage with 4 adapters on a Llama of 6 blocks (42 linear layers) after two
others: files, functions and calls are those of the two packages, frames their depth. Passes are how often the
first mixed call of a drop-in model runs its base.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

PARTS = ("python/mlora", "mlora_ext", "tests", "bench")
MEASURED = """
import json, sys, tempfile, threading
from pathlib import Path
import torch
from peft import LoraConfig
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import T5Config, T5ForConditionalGeneration
import mlora_ext
from mlora import Engine, OptimConfig, Sample

ROOT = Path(sys.argv[1])
OURS = tuple(str(ROOT / part) + "/" for part in ("python/mlora", "mlora_ext"))
torch.manual_seed(0)
LLAMA = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
calls, functions, deepest, counting = 0, set(), 0, False

def count(frame, event, arg):
    global calls, deepest
    if not counting or event != "call" or not frame.f_code.co_filename.startswith(OURS):
        return
    calls += 1
    functions.add(frame.f_code)
    depth = 0
    while frame is not None:
        depth += frame.f_code.co_filename.startswith(OURS)
        frame = frame.f_back
    deepest = max(deepest, depth)

def passes(model, configs, **call):
    model, seen = mlora_ext.convert_model(model, configs), []
    layer = next(m for m in model.modules() if isinstance(m, mlora_ext.MultiLoRALinear))
    layer.register_forward_hook(lambda *_: seen.append(1))
    model(**call, adapter_names=["a", "b", "__base__"])
    return len(seen)

def configs(*targets, **more):
    return {name: LoraConfig(r=2, target_modules=list(targets), **more) for name in ("a", "b")}

ids = torch.randint(1, 60, (3, 7))
small = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
first = {
    "Llama": passes(LlamaForCausalLM(LLAMA), configs=configs("q_proj"), input_ids=ids),
    "BERT": passes(BertModel(BertConfig(**small)), configs=configs("query"), input_ids=ids),
    "GPT-2": passes(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
                    configs=configs("c_attn", fan_in_fan_out=True), input_ids=ids),
    "T5": passes(T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_ff=48, d_kv=8, num_layers=2,
                 num_heads=4, decoder_start_token_id=0)), configs=configs("q"), input_ids=ids, labels=ids),
}
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(LLAMA).save_pretrained(folder)
    threading.setprofile(count)
    sys.setprofile(count)
    with Engine(folder) as engine:
        batch = {}
        for name in "abcd":
            lora = LoraConfig(r=4, target_modules="all-linear")
            engine.create_adapter(name, lora, OptimConfig(learning_rate=1e-3, total_steps=9))
            batch[name] = [Sample(tuple(range(1, 9)), tuple(range(1, 9)))]
        for turn in range(3):
            counting = turn == 2
            engine.forward_backward(batch, ends=list(batch))
            counting = False
            for name in batch:
                engine.optim_step(name)
files = {code.co_filename for code in functions}
print(json.dumps({"call": [len(files), len(functions), calls, deepest], "passes": first}))
"""


def lines_of(folder: Path) -> tuple[int, int, int]:
    """Returns the number of lines, files and classes of a folder's Python files."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    classes = sum(isinstance(node, ast.ClassDef) for text in texts for node in ast.walk(ast.parse(text)))
    return sum(len(text.splitlines()) for text in texts), len(texts), classes


def words_of_docs(checkout: Path) -> int:
    """Returns the words of what users and developers read, without the generated reference."""
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
    pages = [
        *(checkout / name for name in names if (checkout / name).is_file()),
        *(checkout / "docs").rglob("*.md"),
    ]
    return sum(
        len(page.read_text(encoding="utf-8").split()) for page in pages if "reference" not in page.parts
    )


def main() -> int:
    """Prints the sizes of each checkout; returns the exit code."""
    for name in sys.argv[1:] or ["."]:
        checkout = Path(name).resolve()
        print(checkout.name)
        for part in PARTS:
            print("  {:13} {:6} lines {:4} files {:4} classes".format(part, *lines_of(checkout / part)))
        print(f"  docs          {words_of_docs(checkout):6} words")
        path = os.pathsep.join([str(checkout / "python"), str(checkout)])
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, str(checkout)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            return 1
        found = json.loads(done.stdout.splitlines()[-1])
        print("  one call      {} files, {} functions, {} calls, {} frames".format(*found["call"]))
        print("  passes        " + ", ".join(f"{model} {count}" for model, count in found["passes"].items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
