"""The frame of the pictures that the scripts beside this one draw, and what stands in it."""

COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd"]
WIDTH, HEIGHT, LEFT, TOP = 720, 300, 60, 40


def text(x, y, content, anchor="middle"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


def polyline(points, color):
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'


def begin(most, step):
    """Prints the frame with a line every `step` up to `most`, and returns the height of a value."""
    y_of = lambda value: TOP + HEIGHT * (1 - value / most)
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 40}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
    )
    for value in range(0, int(most) + 1, step):
        print(f'<path d="M{LEFT} {y_of(value):.1f}h{WIDTH}" stroke="#ddd"/>')
        print(text(LEFT - 8, y_of(value) + 4, value, "end"))
    return y_of
