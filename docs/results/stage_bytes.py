"""The bytes of a rank by ZeRO's stage, measured and estimated, as an SVG picture.

    cargo test --workspace --test zero_memory -- --nocapture | python3 stage_bytes.py > stage-bytes.svg

Needs Python alone.
"""

import re
import sys

COLORS = ["#1f77b4", "#bbbbbb"]
WIDTH, HEIGHT, LEFT, TOP = 720, 300, 60, 40


def text(x, y, content, anchor="middle"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


def main():
    line = r"ZeRO stage (\d) .*state: (\w+), .*: ([0-9.]+), estimated ([0-9.]+)"
    bars = []
    for stage, state, *values in re.findall(line, sys.stdin.read()):
        name = f"stage {stage}" + (", state on the host" if state == "Host" else "")
        bars.append((name, [float(value) for value in values]))
    most = 1.1 * max(max(values) for _, values in bars)
    y_of = lambda value: TOP + HEIGHT * (1 - value / most)
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 40}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
    )
    print(text(LEFT + WIDTH / 2, TOP - 16, "bytes at the peak of a rank of 8, for each byte of f32 parameters"))
    for number, label in enumerate(["measured", "estimate"]):
        print(f'<g fill="{COLORS[number]}">{text(LEFT + WIDTH - 60, TOP + 16 + 18 * number, label)}</g>')
    for value in range(int(most) + 1):
        print(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}" stroke="#ddd"/>')
        print(text(LEFT - 8, y_of(value) + 4, value, "end"))
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
