"""What the presets of the lab came to, as `attemper lab report DIR --write-docs docs/lab` left it in docs/lab."""

from pathlib import Path

from attemper.lab.presets import NAMES


def lab_results(folder: Path) -> str:
    """A section for each preset that has results: its answer as text, and the page and tables to open.

    Args:
        folder: docs/lab.
    """
    sections = []
    for name in NAMES:
        if not (folder / name).is_dir():
            continue
        answer = (folder / name / "answer.txt").read_text("utf-8").rstrip()
        text, _, made = answer.rpartition("\n\n")
        tables = [path.name for path in sorted((folder / name).glob("*.parquet"))]
        links = ", ".join(f"[{each}](lab/{name}/{each})" for each in ("page.html", *tables))
        sections.append(f"## {name}\n\n{made}\n\nThe page with its curves, and the tables: {links}.\n\n```text\n{text}\n```\n")
    return "\n".join(sections)
