"""Charts that stand still: drawn as SVG when the page is written, once for each theme, so that they need no script."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attemper.report.page.charts import RAMPS, theme_config
from attemper.report.sweeps import Chart, HeatMap

if TYPE_CHECKING:
    import altair as alt
    from markupsafe import Markup

# Eight hues that are told apart by people who do not see red or green as others do.
_HUES = {
    "light": ("#1b1b1f", "#0072b2", "#d55e00", "#008a64", "#a6468a", "#8f6a00", "#4b6cd6", "#7a7a7a"),
    "dark": ("#f2f0f4", "#56b4e9", "#f0894a", "#3fc79a", "#e59ccb", "#e0c14a", "#9db2ff", "#9a98a0"),
}
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])
_WIDTH, _HEIGHT = 560, 260
_CELL = 46
_SHORT = 40  # letters of a name that fits into half of the width


def drawn(chart: Chart | HeatMap) -> dict[str, Markup]:
    """The chart as the inside of a figure, for the light and for the dark page."""
    import vl_convert
    from markupsafe import Markup

    made = {}
    for theme in RAMPS:
        spec = (_curves(chart, theme) if isinstance(chart, Chart) else _map(chart, theme)).to_dict()
        config = theme_config(theme) | {"aria": False, "view": {"stroke": None}}
        svg = vl_convert.vegalite_to_svg(spec | {"config": config})
        # Vega escapes the text that it writes into a drawing; what it draws has no script and no style of its own.
        made[theme] = Markup(svg)
    return made


def _curves(chart: Chart, theme: str) -> alt.TopLevelMixin:
    import altair as alt

    names = [series.name for series in chart.series]
    colors = [_HUES[theme][place % len(_HUES[theme])] for place in range(len(names))]
    rows: list[dict[str, Any]] = []
    for series, hue in zip(chart.series, colors, strict=True):
        for place, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
            low = series.low[place] if series.low else math.nan
            high = series.high[place] if series.high else math.nan
            rows.append({"x": x, "y": _number(y), "low": _number(low), "high": _number(high), "series": series.name, "hue": hue})
    data = alt.Data(values=rows)

    def axis(title: str, log: bool, **options: Any) -> dict[str, Any]:
        scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=False, nice=True)
        return {"scale": scale, "axis": alt.Axis(title=title, format=".6~g", tickCount=6, labelOverlap="greedy", **options)}

    x = alt.X("x:Q", **axis(chart.x, chart.log_x, grid=False))
    y = alt.Y("y:Q", **axis(chart.y, chart.log_y, titleAngle=0, titleAlign="left", titleAnchor="end", titleY=-14, titleX=0))
    # Below the curves, so that the drawing stays as wide as its column of the page and its words as large as they are.
    columns = 2 if max(map(len, names), default=0) <= _SHORT else 1
    legend = alt.Legend(
        title=None,
        orient="bottom",
        columns=columns,
        labelLimit=(_WIDTH - 80) // columns,
        symbolType="stroke",
        symbolStrokeWidth=2.5,
        symbolSize=700,
    )
    hues = alt.Scale(domain=names, range=colors)
    # Another dash each time that the hues begin anew: 32 curves before two look alike.
    dashes = [_DASHES[(place + place // len(_HUES[theme])) % len(_DASHES)] for place in range(len(names))]
    color = alt.Color("series:N", scale=hues, sort=names, legend=legend)
    dash = alt.StrokeDash("series:N", scale=alt.Scale(domain=names, range=dashes), legend=legend)
    base = alt.Chart(data)
    band = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_area(opacity=0.16)
    return alt.layer(
        # By the hue itself: a scale of the bands would make the legend theirs, and one without a legend takes it away.
        band.encode(x=x, y=alt.Y("low:Q"), y2="high:Q", fill=alt.Fill("hue:N", scale=None), detail="series:N"),
        base.mark_line(strokeWidth=2, point=len(rows) <= 12 * max(1, len(names))).encode(x=x, y=y, color=color, strokeDash=dash),
    ).properties(width=_WIDTH, height=_HEIGHT)


def _map(chart: HeatMap, theme: str) -> alt.TopLevelMixin:
    import altair as alt

    rows = [
        {"row": row, "column": column, "value": _number(value), "words": "" if math.isnan(value) else f"{value:.3g}"}
        for row, values in zip(chart.rows, chart.values, strict=True)
        for column, value in zip(chart.columns, values, strict=True)
    ]
    known = [row["value"] for row in rows if row["value"] is not None]
    middle = (min(known) + max(known)) / 2 if known else 0.0
    x = alt.X(
        "column:N", sort=list(chart.columns), axis=alt.Axis(title=None, orient="top", labelAngle=0, ticks=False, domain=False)
    )
    y = alt.Y("row:N", sort=list(chart.rows), axis=alt.Axis(title=None, ticks=False, domain=False, labelLimit=220))
    ramp = alt.Scale(range=list(RAMPS[theme]))
    legend = alt.Legend(title=chart.unit, orient="bottom", direction="horizontal", gradientLength=220, gradientThickness=8)
    base = alt.Chart(alt.Data(values=rows))
    above = {"light": "#ffffff", "dark": "#1d1b20"}[theme]
    below = {"light": "#1d1b20", "dark": "#ffffff"}[theme]
    ink = alt.condition(f"datum.value > {middle}", alt.value(above), alt.value(below))
    return alt.layer(
        base.mark_rect().encode(x=x, y=y, color=alt.Color("value:Q", scale=ramp, legend=legend)),
        base.mark_text(fontSize=11).encode(x=x, y=y, text="words:N", color=ink),
    ).properties(width=alt.Step(_CELL + 14), height=alt.Step(_CELL // 2 + 4))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
