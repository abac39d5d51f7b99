"""The picture on the README's first screen: every head of the two example models, which differ in the factor on q·k.

    python examples/heads.py            # the figures
    python examples/heads.py --write    # and the picture, in docs, for light and dark pages

Each head is a point, at its largest logit and its gain, as `attemper.check` measures them on the models' own inputs. A line joins
the head of one model and the same head of the other. Drawing needs the extra: pip install 'attemper[html]'.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import attemper
from attemper.report.page.charts import RAMPS, theme_config

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODELS = {"attemper.examples:scaled": "q·k / √d", "attemper.examples:unscaled": "q·k, not scaled"}
HUES = {"light": ("#0072b2", "#b5451d"), "dark": ("#56b4e9", "#f0894a")}  # told apart without red and green, and by shape


class Head(NamedTuple):
    """A head of one of the models: where it is, its largest logit, its mean gain, its share of saturated rows."""

    model: str
    layer: int
    head: int
    largest: float
    gain: float
    saturated: float


def measure() -> list[Head]:
    """Every head of both models."""
    heads = []
    for model, words in MODELS.items():
        for layer, row in enumerate(attemper.check(model).rows):
            columns = zip(row.stats.max.tolist(), row.stats.mean_gain.tolist(), row.stats.saturated_share.tolist(), strict=True)
            heads += [Head(words, layer, head, *figures) for head, figures in enumerate(columns)]
    return heads


def draw(heads: list[Head], theme: str) -> str:
    """The picture as SVG.

    Args:
        theme: "light" or "dark", the page that it is for.
    """
    import altair as alt
    import vl_convert

    rows = [head._asdict() | {"pair": f"{head.layer}.{head.head}"} for head in heads]
    x = alt.X("largest:Q", title="largest logit", scale=alt.Scale(type="log", domain=[6, 120], nice=False))
    y = alt.Y("gain:Q", title="gradient gain of the softmax", scale=alt.Scale(domain=[0, 1]))
    names = list(MODELS.values())
    color = alt.Color("model:N", scale=alt.Scale(domain=names, range=list(HUES[theme])), legend=None)
    shape = alt.Shape("model:N", scale=alt.Scale(domain=names, range=["circle", "triangle-up"]), legend=None)
    base = alt.Chart(alt.Data(values=rows))
    ink = theme_config(theme)["axis"]["labelColor"]
    joined = base.mark_line(strokeWidth=1, opacity=0.35, color=ink).encode(x=x, y=y, detail="pair:N")
    points = base.mark_point(filled=True, size=90, opacity=1).encode(x=x, y=y, color=color, shape=shape)
    words = [
        {"model": name, "largest": x, "gain": y, "words": name}
        for name, x, y in zip(names, (10.5, 62.0), (0.88, 0.32), strict=True)
    ]
    label = alt.Chart(alt.Data(values=words)).mark_text(fontSize=13, fontWeight="bold", align="left")
    chart = alt.layer(joined, points, label.encode(x=x, y=y, text="words:N", color=color)).properties(width=560, height=230)
    axis = {"tickCount": 5, "grid": False, "labelFontSize": 12, "titleFontSize": 12}
    config = theme_config(theme)
    config |= {"aria": False, "view": {"stroke": None}, "axis": config["axis"] | axis}
    return vl_convert.vegalite_to_svg(chart.to_dict() | {"config": config})


def main(arguments: list[str] | None = None) -> int:
    """Print the figures, and write the picture if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/heads-light.svg and docs/heads-dark.svg")
    options = parser.parse_args(arguments)
    heads = measure()
    for each in heads:
        figures = f"largest logit {each.largest:4.1f}, gain {each.gain:.2f}, saturated {each.saturated:4.0%}"
        print(f"{each.model:16} layer {each.layer} head {each.head}: {figures}")
    if options.write:
        for theme in RAMPS:
            (DOCS / f"heads-{theme}.svg").write_text(draw(heads, theme), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
