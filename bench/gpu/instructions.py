"""Counts the instructions of a CUDA kernel's main loop in its machine code.

The main loop walks over tiles: it waits at a barrier and loads fragments. Counted are the instructions of one
turn on the way that a usual launch takes: the shortest one that leaves out no copy, product, barrier or wide
store. Nested loops count as often as they turn: loops of matrix instructions as often as the product needs,
and Philox loops as often as a thread draws.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpu import code_cuda

_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
_WARPS, _TILE_ROWS, _TILE_COLUMNS = 8, 64, 64
_PHILOX = ("-0x2daee0ad", "-0x326172a9")
"""Its multipliers, 0xD2511F53 and 0xCD9E8D57, as the disassembler writes them."""
_NEEDED = (
    "LDGSTS",
    "HMMA",
    "LDSM",
    "BAR.SYNC",
    "STG.E.128",
    "LDG.E.128",
    "LDS.128",
    "STS.128",
    "FSEL",
    *_PHILOX,
)
_NEEDED_ONCE = {
    True: ("LDGSTS", "BAR.SYNC", "tnspA"),
    False: ("LDGSTS", "BAR.SYNC", "SYNCS.PHASECHK", "LDS", "FADD", "STAS"),
}
"""Of read_dy_once: whether of the warps that make the gradient."""
_NEEDED_COST = 1e6


@dataclass(frozen=True)
class Template:
    """Template arguments of a kernel: bf16 rows, width of a panel of ranks, and the others as numbers.

    `read_dy_once` has no others; there they say which of its bodies to count, by the width of own ranks.
    """

    kernel: str
    ranks: int
    others: tuple[int, ...] = ()


@cache
def code_of(library: Path, architecture: str) -> dict[Template, list[tuple[int, str]]]:
    """Returns address and text of each instruction, by kernel, of those for bf16.

    Raises:
        FileNotFoundError: there is no library or no `cuobjdump`.
        RuntimeError: the library holds no code for the architecture.
    """
    tool = code_cuda.cuobjdump()
    if tool is None or not library.is_file():
        raise FileNotFoundError(f"{library}, cuobjdump: expected both, one is missing")
    found: dict[Template, list[tuple[int, str]]] = {}
    for symbol, lines in code_cuda.machine_code(library, architecture).items():
        if (template := _template(symbol)) is not None:
            instructions = filter(None, map(_ADDRESS.match, lines))
            found.setdefault(template, []).extend((int(one[1], 16), one[2]) for one in instructions)
    if not found:
        raise RuntimeError(f"{library}: no kernels for {architecture}; build it with CUDA")
    return found


def _template(symbol: str) -> Template | None:
    name = re.search(r"(shrink|expand|read_dy|read_dy_once|read_x)_kernelI", symbol)
    if name is None or "BFloat16" not in symbol:
        return None
    ranks, *others = map(int, re.findall(r"L(?:i|b|NS\d_5MasksE)(\d+)E", symbol[name.end() :]))
    return Template(name[1], ranks, tuple(others))


def per_element(code: list[tuple[int, str]], template: Template, *, gradient: bool) -> float:
    """Returns instructions of a warp for each element of the rows that the main loop walks over.

    Args:
        code: of the kernel.
        template: its arguments.
        gradient: whether to count the loop that makes a gradient; `read_dy` has two.
    """
    instructions = [text for _, text in code]
    loops = list(_loops(code))
    once = template.kernel == "read_dy_once"

    def is_main(body: list[str]) -> bool:
        if any(text.startswith("EXIT") for text in body):
            return False  # code behind the kernel's end, for a warp whose threads diverged, jumps back here
        return _is_main_once(body, template.others[0]) if once else _is_main(body, gradient)

    main = [loop for loop in loops if is_main(instructions[slice(*loop)])]
    # the innermost ones; a kernel has one body for each width up to its own, the widest last
    innermost = [
        loop for loop in main if not any(loop != o and loop[0] <= o[0] and o[1] <= loop[1] for o in main)
    ]
    begin, end = max(innermost)
    nested = [loop for loop in loops if begin <= loop[0] and loop[1] <= end and loop != (begin, end)]
    outermost = [
        loop
        for loop in nested
        if not any(a <= loop[0] and loop[1] <= b and (a, b) != loop for a, b in nested)
    ]
    products = [loop for loop in outermost if _count(instructions, loop, "HMMA")]
    turns = dict.fromkeys(outermost, 1.0)
    for loop, needed in zip(products, _needed(template, gradient, len(products)), strict=True):
        turns[loop] = max(1, needed / _count(instructions, loop, "HMMA"))
    for loop in outermost:
        if loop not in products and _draws(instructions[slice(*loop)]):
            turns[loop] = 2  # two of a thread's four rows a turn
        if once and _count(instructions, loop, "FADD"):
            turns[loop] = max(1, 8 * template.others[0] / 128)  # a block's eight rows, by four warps
    if once:  # half of the warps for each sum
        way = _usual_way(code, (begin, end), turns, _NEEDED_ONCE[gradient])
        return way * (_WARPS // 2) / (_TILE_ROWS * 256)
    total = _usual_way(code, (begin, end), turns, _NEEDED)
    columns = (128 if template.ranks <= 64 else 64) if _shrinks(template, gradient) else _TILE_COLUMNS
    return total * _WARPS / (_TILE_ROWS * columns)


def _usual_way(
    code: list[tuple[int, str]],
    loop: tuple[int, int],
    turns: dict[tuple[int, int], float],
    needed: tuple[str, ...],
) -> float:
    """Returns the instructions on the shortest way through a loop that leaves out nothing that is needed."""
    place = {address: index for index, (address, _) in enumerate(code)}
    inner = {begin: (end, count) for (begin, end), count in turns.items()}
    begin, end = loop
    cost = dict.fromkeys(range(begin, end + 1), float("inf"))
    skipped = [0] * (end + 1)  # how much that is needed stands before a place
    for index in range(begin, end):
        skipped[index + 1] = skipped[index] + any(kind in code[index][1] for kind in needed)
    cost[begin] = 0.0
    index = begin
    while index < end:
        here = cost[index]
        if index in inner:
            index_after, count = inner[index]
            cost[index_after] = min(cost[index_after], here + count * (index_after - index))
            index = index_after
            continue
        text = code[index][1]
        branch = _BRANCH.search(text)
        target = place.get(int(branch[1], 16), end) if branch else None
        if target is not None and index < target <= end:
            missed = _NEEDED_COST * (skipped[target] - skipped[index + 1])
            cost[target] = min(cost[target], here + 1 + missed)
        # BRA.DIV leaves the way only where a warp's threads diverged
        if branch is None or text.startswith("@") or " P" in text.split("BRA")[1] or "BRA.DIV" in text:
            cost[index + 1] = min(cost[index + 1], here + 1)
        index += 1
    if cost[end] == float("inf"):
        raise RuntimeError("machine code: expected a way through a kernel's main loop, found none")
    return cost[end] % _NEEDED_COST


def _draws(body: list[str]) -> bool:
    return any(number in text for text in body for number in _PHILOX)


def _shrinks(template: Template, gradient: bool) -> bool:
    return template.kernel == "shrink" or (template.kernel == "read_dy" and not gradient)


def _is_main(body: list[str], gradient: bool) -> bool:
    transposed = any("LDSM" in text and "MT88" in text for text in body)
    straight = any("LDSM" in text and ".M88" in text for text in body)
    waits = any("BAR.SYNC" in text for text in body)
    return waits and (transposed if gradient else straight) and (gradient or not transposed or straight)


def _is_main_once(body: list[str], width: int) -> bool:
    return all(any(kind in text for text in body) for kind in ("BAR.SYNC", f"HGMMA.64x{width}x16"))


def _needed(template: Template, gradient: bool, loops: int) -> list[int]:
    """Returns the matrix instructions of a warp for each product of a turn that is a loop."""
    ranks = template.ranks
    layers = template.others[0] if template.kernel == "read_x" else 1
    if _shrinks(template, gradient):
        warps_n = 2 if ranks >= 64 else 1
        columns = 128 if ranks <= 64 else 64
        m, n = 64 // 16 // (8 // (2 * warps_n)), ranks // 8 // warps_n
        total = m * n * columns // 2 // 16
        return [total // max(loops, 1)] * loops
    delta = 4 * ranks // 16
    if template.kernel == "expand":
        return [delta] * loops
    warps_m = 4 if ranks >= 128 else 2 if ranks >= 32 else 1
    own = (ranks // 16 // warps_m) * (8 // (8 // warps_m)) * 4
    each = [own, delta] if loops == 2 * layers else [own]
    return (each * layers)[:loops] if len(each * layers) >= loops else each * loops


def _loops(code: list[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last place, plus one, of each loop."""
    place = {address: index for index, (address, _) in enumerate(code)}
    for index, (address, text) in enumerate(code):
        branch = _BRANCH.search(text)
        if branch and (target := int(branch[1], 16)) < address and target in place:
            yield place[target], index + 1


def _count(instructions: list[str], loop: tuple[int, int], kind: str) -> int:
    return sum(kind in text for text in instructions[slice(*loop)])
