"""The training losses of runs of the gpt example as curves, as an SVG picture.

    for amp in off bf16 f16; do cargo run --release --example gpt -- --amp $amp --steps 200 --eval-every 100 --output run-$amp; done
    python3 losses.py f32=run-off bf16=run-bf16 f16=run-f16 > losses.svg

Each point is the mean of 10 batches. Needs Python alone.
"""

import glob
import re
import sys

from svg import COLORS, HEIGHT, LEFT, TOP, WIDTH, begin, polyline, text

MEAN = 10


def losses(directory):
    """The means of the run's batches, in order."""
    epochs = glob.glob(f"{directory}/train/epoch-*/Loss.log")
    values = []
    for log in sorted(epochs, key=lambda path: int(re.search(r"epoch-(\d+)", path)[1])):
        with open(log) as file:
            values += [float(line.split(",")[0]) for line in file]
    return [sum(values[at : at + MEAN]) / MEAN for at in range(0, len(values) - MEAN + 1, MEAN)]


def main():
    curves = {name: losses(directory) for name, directory in (argument.split("=", 1) for argument in sys.argv[1:])}
    most = max(max(curve) for curve in curves.values()) * 1.05
    longest = max(len(curve) for curve in curves.values())
    x_of = lambda at: LEFT + WIDTH * (at + 1) / longest
    y_of = begin(most, 1)
    for number, (name, curve) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        points = " ".join(f"{x_of(at):.1f},{y_of(loss):.1f}" for at, loss in enumerate(curve))
        print(polyline(points, color))
        print(f'<g fill="{color}">{text(LEFT + 130 + 180 * number, TOP - 16, f"{name}: {curve[-1]:.3f} at the end")}</g>')
    print(text(LEFT + WIDTH / 2, TOP + HEIGHT + 28, f"updates, of {longest * MEAN}; nats a byte") + "</svg>")


if __name__ == "__main__":
    main()
