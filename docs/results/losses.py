"""The training losses of runs of the gpt example as curves, as an SVG picture.

    for amp in off bf16 f16; do cargo run --release --example gpt -- --amp $amp --steps 200 --eval-every 100 --output run-$amp; done
    python3 losses.py f32=run-off bf16=run-bf16 f16=run-f16 > losses.svg

Each point is the mean of 10 batches. Needs Python alone.
"""

import glob
import re
import sys

COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd"]
WIDTH, HEIGHT, LEFT, TOP = 720, 300, 60, 40
MEAN = 10


def losses(directory):
    """The means of the run's batches, in order."""
    epochs = glob.glob(f"{directory}/train/epoch-*/Loss.log")
    values = []
    for log in sorted(epochs, key=lambda path: int(re.search(r"epoch-(\d+)", path)[1])):
        with open(log) as file:
            values += [float(line.split(",")[0]) for line in file]
    return [sum(values[at : at + MEAN]) / MEAN for at in range(0, len(values) - MEAN + 1, MEAN)]


def text(x, y, content, anchor="middle"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


def main():
    curves = {name: losses(directory) for name, directory in (argument.split("=", 1) for argument in sys.argv[1:])}
    most = max(max(curve) for curve in curves.values()) * 1.05
    longest = max(len(curve) for curve in curves.values())
    x_of = lambda at: LEFT + WIDTH * (at + 1) / longest
    y_of = lambda loss: TOP + HEIGHT * (1 - loss / most)
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 40}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
    )
    for loss in range(int(most) + 1):
        print(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y_of(loss):.1f}" y2="{y_of(loss):.1f}" stroke="#ddd"/>')
        print(text(LEFT - 8, y_of(loss) + 4, loss, "end"))
    for number, (name, curve) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        points = " ".join(f"{x_of(at):.1f},{y_of(loss):.1f}" for at, loss in enumerate(curve))
        print(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        print(f'<g fill="{color}">{text(LEFT + 130 + 180 * number, TOP - 16, f"{name}: {curve[-1]:.3f} at the end")}</g>')
    print(text(LEFT + WIDTH / 2, TOP + HEIGHT + 28, f"updates, of {longest * MEAN}; nats a byte") + "</svg>")


if __name__ == "__main__":
    main()
