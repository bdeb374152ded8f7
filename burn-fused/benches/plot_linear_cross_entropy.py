"""The curves of the `linear_cross_entropy` bench over the number of classes, peak bytes and time, as an SVG picture.

    python3 plot_linear_cross_entropy.py results.csv > results.svg

`results.csv` has the columns rows, width, classes, setting, milliseconds and peak_mib. Needs Python alone.
"""

import csv
import sys
from math import ceil, floor, log10

COLORS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#7f7f7f"]
WIDTH, HEIGHT, LEFT, TOP = 330, 260, 60, 30


def text(x, y, content, anchor="middle"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


def panel(offset, title, curves):
    """Both axes logarithmic. `curves` has points (classes, value) by setting."""
    points = [point for curve in curves.values() for point in curve]
    classes = sorted({x for x, _ in points})
    low, high = floor(log10(min(y for _, y in points))), ceil(log10(max(y for _, y in points)))
    x_of = lambda x: offset + LEFT + WIDTH * log10(x / classes[0]) / log10(classes[-1] / classes[0])
    y_of = lambda y: TOP + HEIGHT * (high - log10(y)) / (high - low)
    yield text(offset + LEFT + WIDTH / 2, TOP - 12, title)
    for power in range(low, high + 1):
        y = y_of(10**power)
        yield f'<path d="M{offset + LEFT} {y:.1f}h{WIDTH}" stroke="#ddd"/>'
        yield text(offset + LEFT - 6, y + 4, f"{10**power:,}", "end")
    for x in classes:
        yield text(x_of(x), TOP + HEIGHT + 18, f"{x:,}")
    yield text(offset + LEFT + WIDTH / 2, TOP + HEIGHT + 36, "classes")
    for color, curve in zip(COLORS, curves.values()):
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in sorted(curve))
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'


def main():
    with open(sys.argv[1]) as file:
        results = list(csv.DictReader(file))
    names = list(dict.fromkeys(result["setting"] for result in results))
    curves = lambda value: {
        name: [(int(r["classes"]), value(r)) for r in results if r["setting"] == name] for name in names
    }
    parts = [
        *panel(0, "peak MiB", curves(lambda r: float(r["peak_mib"]))),
        *panel(LEFT + WIDTH + 30, "seconds", curves(lambda r: float(r["milliseconds"]) / 1e3)),
    ]
    for at, (color, name) in enumerate(zip(COLORS, names)):
        x, y = LEFT + 250 * (at % 3), TOP + HEIGHT + 64 + 20 * (at // 3)
        parts.append(f'<path d="M{x} {y - 4}h24" stroke="{color}" stroke-width="2"/>{text(x + 30, y, name, "start")}')
    width, height = 2 * (LEFT + WIDTH + 30), TOP + HEIGHT + 74 + 20 * ((len(names) - 1) // 3)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    print(head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", sep="\n")


if __name__ == "__main__":
    main()
