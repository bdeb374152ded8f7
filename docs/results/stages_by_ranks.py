"""What a rank holds and sends and how long its update takes, by ZeRO's stage and number of ranks, as an SVG picture of three panels.

    cargo test --workspace --test estimate stages_of -- --nocapture | python3 stages_by_ranks.py > stages-by-ranks.svg

Needs Python alone.
"""

import re
import sys

from svg import COLORS, HEIGHT, TOP, polyline, text

WIDTH, GAP = 240, 80
PANELS = [
    ("bytes at the peak, GiB", 2**30),
    ("bytes sent in an update, GiB", 2**30),
    ("time of an update, s", 1e3),
]


def panel(number, title, rows):
    """Draws the values of each stage over the ranks, which are `ranks, stage, value`."""
    left = GAP + number * (WIDTH + GAP)
    all_ranks = sorted({ranks for ranks, _, _ in rows})
    step = WIDTH / (len(all_ranks) - 1)
    most = 1.1 * max(value for *_, value in rows)
    y_of = lambda value: TOP + HEIGHT * (1 - value / most)
    print(text(left + WIDTH / 2, TOP - 16, title))
    for quarter in range(5):
        value = most * quarter / 4
        print(f'<path d="M{left} {y_of(value):.1f}h{WIDTH}" stroke="#ddd"/>')
        print(text(left - 8, y_of(value) + 4, f"{value:.3g}", "end"))
    for nth, ranks in enumerate(all_ranks):
        print(text(left + nth * step, TOP + HEIGHT + 20, ranks))
    for stage, color in enumerate(COLORS):
        values = sorted((ranks, value) for ranks, its, value in rows if its == stage)
        points = [f"{left + nth * step:.1f},{y_of(value):.1f}" for nth, (_, value) in enumerate(values)]
        print(polyline(" ".join(points), color))


def main():
    line = r"stage (\d), (\d+) ranks: (\d+) bytes at the peak, (\d+) sent, (\d+) ms"
    rows = [[int(number) for number in row] for row in re.findall(line, sys.stdin.read())]
    width = 3 * (WIDTH + GAP) + GAP / 2
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {TOP + HEIGHT + 70}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
    )
    for number, (title, unit) in enumerate(PANELS):
        panel(number, title, [(ranks, stage, values[number] / unit) for stage, ranks, *values in rows])
    print(text(width / 2, TOP + HEIGHT + 40, "ranks"))
    for stage, color in enumerate(COLORS):
        x = width / 2 - 150 + 100 * stage
        print(f'<g fill="{color}">{text(x, TOP + HEIGHT + 60, f"stage {stage}")}</g>')
    print("</svg>")


if __name__ == "__main__":
    main()
