"""How much `import attemper` takes beyond `import torch`: the median difference of pairs of fresh processes, under 0.2 s."""

import statistics
import subprocess
import sys

BAR = 0.2  # seconds
CODE = "import sys, time; began = time.perf_counter(); import {name}; print(time.perf_counter() - began); sys.modules['torch']"


def seconds_to_import(name: str) -> float:
    """Seconds that the import statement itself takes in a fresh interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", CODE.format(name=name)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(pairs: int = 7) -> int:
    """Print the medians; 0 if the bar is held, 1 if not."""
    for name in ("torch", "attemper"):  # the first import reads the files from disk and writes bytecode
        seconds_to_import(name)
    timed = [(seconds_to_import("torch"), seconds_to_import("attemper")) for _ in range(pairs)]
    torch, ours = (statistics.median(column) for column in zip(*timed, strict=True))
    extra = statistics.median(ours - torch for torch, ours in timed)
    print(f"import torch {torch:.3f} s, import attemper {ours:.3f} s (medians of {pairs} pairs)")
    print(f"difference {extra:+.3f} s, bar {BAR} s")
    return int(extra >= BAR)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
