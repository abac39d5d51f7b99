"""How much `import attemper` takes beyond `import torch`: both timed in one fresh process, the median of several, under 0.2 s.

Two processes, one for each, would compare two imports of torch, which differ by more than attemper takes.
"""

import statistics
import subprocess
import sys

BAR = 0.2  # seconds
CODE = """
import time
began = time.perf_counter()
import torch
middle = time.perf_counter()
import attemper
print(middle - began, time.perf_counter() - middle)
"""


def seconds_to_import() -> tuple[float, float]:
    """Seconds for torch and, after it, for attemper, in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], check=True, capture_output=True, text=True)
    torch, ours = map(float, done.stdout.split())
    return torch, ours


def main(processes: int = 7) -> int:
    """Print the medians; 0 if the bar is held, 1 if not."""
    seconds_to_import()  # the first one reads the files from disk and writes bytecode
    torch, ours = (statistics.median(column) for column in zip(*(seconds_to_import() for _ in range(processes)), strict=True))
    print(f"import torch {torch:.3f} s, then import attemper {ours:.3f} s (medians of {processes} processes; bar {BAR} s)")
    return int(ours >= BAR)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
