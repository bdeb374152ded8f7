"""The bytes of a rank by ZeRO's stage, measured and estimated, as an SVG picture.

    cargo test --workspace --test zero_memory -- --nocapture | python3 stage_bytes.py > stage-bytes.svg

Needs Python alone.
"""

import re
import sys

from svg import HEIGHT, LEFT, TOP, WIDTH, begin, text

COLORS = ["#1f77b4", "#bbbbbb"]


def main():
    line = r"ZeRO stage (\d) .*state: (\w+), .*: ([0-9.]+), estimated ([0-9.]+)"
    bars = []
    for stage, state, *values in re.findall(line, sys.stdin.read()):
        name = f"stage {stage}" + (", state on the host" if state == "Host" else "")
        bars.append((name, [float(value) for value in values]))
    most = 1.1 * max(max(values) for _, values in bars)
    y_of = begin(most, 1)
    print(text(LEFT + WIDTH / 2, TOP - 16, "bytes at the peak of a rank of 8, for each byte of f32 parameters"))
    for number, label in enumerate(["measured", "estimate"]):
        print(f'<g fill="{COLORS[number]}">{text(LEFT + WIDTH - 60, TOP + 16 + 18 * number, label)}</g>')
    step = WIDTH / len(bars)
    for number, (name, values) in enumerate(bars):
        left = LEFT + step * number
        for which, value in enumerate(values):
            x, width = left + step * (0.15 + 0.35 * which), 0.33 * step
            print(
                f'<rect x="{x:.1f}" y="{y_of(value):.1f}" width="{width:.1f}" '
                f'height="{TOP + HEIGHT - y_of(value):.1f}" fill="{COLORS[which]}"/>'
            )
            print(text(x + width / 2, y_of(value) - 4, f"{value:.2f}"))
        print(text(left + step / 2, TOP + HEIGHT + 20, name))
    print("</svg>")


if __name__ == "__main__":
    main()
