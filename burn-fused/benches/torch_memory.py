"""Resident memory, as the scripts beside this one count it."""

import re

# Large blocks go back to the system when they are freed, or resident memory would only grow.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def status(key):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", file.read())[1])
