"""Timings and memory, each run on its own: `python -m benchmarks.NAME`. One that has a bar exits 1 when the bar is missed."""
