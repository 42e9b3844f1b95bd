"""Draw the README's figure from `bench/results/`, as SVG, light and dark.

Usage: python docs/images/make_together.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "bench" / "results"
OURS, SECOND, PEFT = (
    "#2f81c4",
    "#e69f00",
    "#8c959f",
)  # Okabe and Ito's orange; blue that reads on white and black


def draw(out: Path, ink: str, grid: str) -> None:
    """Writes one file: tokens/s, step time by adapters, memory."""
    train = json.loads((RESULTS / "bench_train.json").read_text())
    growth = json.loads((RESULTS / "growth-cpu.json").read_text())["ms"]["adapters"]
    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "text.color": ink,
            "axes.labelcolor": ink,
            "xtick.color": ink,
            "ytick.color": ink,
            "svg.fonttype": "path",
            "svg.hashsalt": "mlora",
        }
    )
    figure, axes = plt.subplots(1, 3, figsize=(10.4, 3.3), width_ratios=[1.5, 1.15, 0.95])
    left, middle, right = axes

    for shift, name, color, label in (
        (-0.2, "bench_train.json", OURS, "A: AMD EPYC"),
        (0.2, "bench_train-xeon-amx.json", SECOND, "D: Intel Xeon"),
    ):
        lines = [x for x in json.loads((RESULTS / name).read_text())["speed"] if x["dropout"] == 0]
        for place, line in enumerate(lines):
            left.bar(place + shift, line["ratio"], 0.38, color=color, label=None if place else label)
            left.text(
                place + shift,
                line["ratio"] + 0.05,
                f"{line['ratio']:.2f}\N{MULTIPLICATION SIGN}",
                ha="center",
                size=9,
                weight="bold",
            )
    left.axhline(1, color=ink, ls="--", lw=1.2, label="PEFT, one after the other")
    left.set_xticks(range(len(lines)), [f"{x['sequences'] * x['length']:,}" for x in lines])
    left.set(xlabel="tokens per adapter and step", ylabel="tokens/s, relative to PEFT", ylim=(0, 3.9))
    left.set_title("4 adapters in one run:\n1.2 to 2.5 times as fast", loc="left", weight="bold", size=11)
    left.legend(frameon=False, loc="upper right", fontsize=9)

    counts = [int(name.split()[0]) for name in growth if name != "frozen"]
    seconds = [growth[f"{count} adapters"]["step"] / 1000 for count in counts]
    middle.plot(range(len(counts)), seconds, "o-", color=OURS)
    frozen = growth["frozen"]["step"] / 1000
    middle.axhline(frozen, color=PEFT, ls="--")
    middle.text(len(counts) - 1, frozen - 0.06, "no adapters", color=ink, ha="right", va="top", size=9)
    for place, value in enumerate(seconds):
        middle.text(place, value + 0.12, f"{value:.2f}", ha="center", size=9)
    middle.set_xticks(range(len(counts)), counts)
    middle.set(
        xlabel="adapters that share 4,096 tokens",
        ylabel="s per step",
        ylim=(0, 3.1),
        xlim=(-0.4, len(counts) - 0.6),
    )
    middle.set_title("64 adapters: the step\nof one", loc="left", weight="bold", size=11)

    peaks = [train["memory"][name]["step_peak_bytes"] / 2**20 for name in ("one", "together")]
    right.bar([0, 1], peaks, 0.55, color=[PEFT, OURS])
    for place, value in enumerate(peaks):
        right.text(place, value + 5, f"{value:.1f}", ha="center", weight="bold")
    right.set_xticks([0, 1], ["1 adapter", "4 adapters"])
    right.set(xlabel="same tokens in all", ylabel="MiB of live tensors, peak", ylim=(0, 230))
    right.set_title("Memory: that of\none adapter", loc="left", weight="bold", size=11)

    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(grid)
        panel.tick_params(color=grid)
        panel.set_facecolor("none")
    figure.tight_layout(w_pad=2.2)
    figure.savefig(out, transparent=True, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(HERE / "together-light.svg", "#1f2328", "#8c959f")
    draw(HERE / "together-dark.svg", "#f0f6fc", "#6e7681")
