"""The curves of several pictures of the gpt example's `--memory-plot` in one, as an SVG picture.

    python3 memory.py 'NAME=memory-none.svg' 'NAME=memory-block.svg' > memory.svg

Each curve is over its own step: recomputing adds operations. Needs Python alone.
"""

import re
import sys

from svg import COLORS, HEIGHT, LEFT, TOP, WIDTH, begin, polyline, text


def curve(path):
    """Points (share of the step, MiB), and the peak in MiB: what the picture's title says is at its highest point."""
    with open(path) as file:
        picture = file.read()
    peak = float(re.search(r"peak ([0-9.]+) MiB", picture)[1])
    area = re.search(r'<polygon[^>]*points="([^"]*)"', picture)[1]
    points = [tuple(map(float, point.split(","))) for point in area.split()]
    while points[-1][1] == max(y for _, y in points):
        points.pop()  # the area's lower edge
    bottom = max(float(y) for y in re.findall(r'<line[^>]* y1="([0-9.]+)"', picture))
    top = min(y for _, y in points)
    first, last = points[0][0], points[-1][0]
    return [((x - first) / (last - first), (bottom - y) / (bottom - top) * peak) for x, y in points], peak


def main():
    curves = {name: curve(path) for name, path in (argument.split("=", 1) for argument in sys.argv[1:])}
    most = max(peak for _, peak in curves.values()) * 1.05
    x_of = lambda x: LEFT + WIDTH * x
    y_of = begin(most, 10)
    print(text(LEFT, TOP - 16, "MiB", "end"))
    print(text(LEFT + WIDTH / 2, TOP + HEIGHT + 24, "a training step: forward, backward, optimizer"))
    for row, (color, (name, (points, peak))) in enumerate(zip(COLORS, curves.items())):
        # Each point once: the curve has more events than the picture has places.
        path = " ".join(dict.fromkeys(f"{x_of(x):.0f},{y_of(y):.0f}" for x, y in points))
        print(polyline(path, color))
        y = TOP + 16 + 20 * row
        print(f'<path d="M{LEFT + WIDTH - 250} {y - 4}h24" stroke="{color}" stroke-width="3"/>')
        print(text(LEFT + WIDTH - 218, y, f"{name}: peak {peak} MiB", "start"))
    print("</svg>")


main()
