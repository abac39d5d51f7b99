"""What Vega draws on a page, as Vega-Lite written by Altair; the data is put in by the page's script.

Colours are named here and nowhere else, once for each theme. The ramps rise or fall in lightness all along, so that they read
without telling hues apart.
"""

import functools
from typing import Any

from attemper.report.page.shell import Script

RAMPS = {
    "light": ("#f3ece0", "#f2d0a0", "#e49b63", "#c25b4e", "#832b4f", "#3b1140"),
    "dark": ("#2a2630", "#54214c", "#98324f", "#d0604b", "#eea76a", "#fae6bd"),
}
_INKS = {
    "light": {"ink": "#1d1b20", "muted": "#625f69", "rule": "#dedbd5", "surface": "#ffffff", "bar": "#8a4a63"},
    "dark": {"ink": "#ece9ee", "muted": "#a5a1ac", "rule": "#3a3740", "surface": "#1c1b20", "bar": "#d98a7c"},
}
LABEL_WIDTH = 150  # pixels that a layer's name may take beside the map
_MAP_PARAMETERS = {"labels": [], "layers": 1, "heads": 1, "step": 16}
_FONT = "ui-sans-serif, system-ui, sans-serif"


@functools.cache
def vega_script() -> Script:
    """Vega, Vega-Lite and Vega-Embed as one script, from the wheel of vl-convert-python. Takes some seconds."""
    import vl_convert

    return Script(vl_convert.javascript_bundle())


def themes() -> dict[str, dict[str, Any]]:
    """Vega's configuration for the light and the dark page."""
    return {name: _theme(RAMPS[name], **_INKS[name]) for name in RAMPS}


@functools.cache
def heat_map() -> dict[str, Any]:
    """A map of heads, a row for each layer and a column for each head, that expects four sets of data.

    "cells" (layer, head, value), "blanks" (layer, head) of heads without a value, "marks" (layer, head or −1, severity) and
    "selected" (layer, head). Parameters: `labels`, the layers' names; `layers` and `heads`, how many; `step`, the size of a cell in
    pixels. The page sets the colours' scale and title, which differ from figure to figure.
    """
    import altair as alt

    def band(field: str, axis: alt.Axis) -> dict[str, Any]:
        # Gaps between cells only where a cell can spare a pixel.
        gap = alt.expr("step < 9 ? 0 : 1 / step")
        scale = alt.Scale(domain=alt.expr(f"sequence({field}s)"), paddingInner=gap, paddingOuter=0)
        return {"field": field, "type": "ordinal", "sort": None, "axis": axis, "scale": scale}

    plain = {"labelOverlap": True, "labelSeparation": 4, "ticks": False, "domain": False, "titlePadding": 8}
    x = alt.X(**band("head", alt.Axis(orient="top", title="head", labelAngle=0, labelPadding=6, **plain)))
    y = alt.Y(
        **band("layer", alt.Axis(title=None, labelExpr="labels[datum.value]", labelLimit=LABEL_WIDTH, labelPadding=16, **plain))
    )
    color = alt.Color(
        "value:Q",
        scale=alt.Scale(clamp=True),
        legend=alt.Legend(orient="bottom", direction="horizontal", gradientLength=220, gradientThickness=8, tickCount=5),
    )
    severity = alt.Scale(domain=["error", "warning", "info"], range=["diamond", "circle", "circle"])
    shape = alt.Shape("severity:N", legend=None, scale=severity)
    marks = alt.Chart(alt.NamedData("marks"))
    size = alt.expr("pow(clamp(step * (datum.severity == 'info' ? 0.24 : 0.42), 2.5, 9), 2)")
    on_head = marks.transform_filter("datum.head >= 0").mark_point(style="finding", size=size)
    on_layer = marks.transform_filter("datum.head < 0").mark_point(style="finding", size=36, clip=False)
    chart = (
        alt.layer(
            alt.Chart(alt.NamedData("blanks")).mark_rect(style="blank").encode(x=x, y=y),
            alt.Chart(alt.NamedData("cells")).mark_rect().encode(x=x, y=y, color=color),
            on_head.encode(x=x, y=y, shape=shape),
            on_layer.encode(x=alt.value(-8), y=y, shape=shape),
            alt.Chart(alt.NamedData("selected")).mark_rect(style="selected").encode(x=x, y=y),
        )
        .add_params(*(alt.param(name=name, value=value) for name, value in _MAP_PARAMETERS.items()))
        .properties(width=alt.Step(16), height=alt.Step(16))
    )
    return chart.to_dict()


@functools.cache
def histogram(kind: str) -> dict[str, Any]:
    """Bars over bins of any width, that expects the data "bins" (low, high, height); the page sets the width.

    Args:
        kind: "share" (0 to 1), "linear" or "log", as the axis is.
    """
    import altair as alt

    scales = {"share": alt.Scale(domain=[0, 1]), "linear": alt.Scale(nice=False, zero=False), "log": alt.Scale(type="log", nice=False)}
    axis = alt.Axis(title=None, grid=False, tickCount=6, format="~g", labelOverlap="greedy", labelSeparation=6, labelFlush=False)
    bins = alt.Chart(alt.NamedData("bins")).mark_rect(style="bins")
    # Heights are no figures that a reader needs: areas are shares.
    return (
        bins.encode(
            x=alt.X("low:Q", scale=scales[kind], axis=axis),
            x2="high:Q",
            y=alt.Y("height:Q", axis=None, scale=alt.Scale(nice=False)),
            y2=alt.Y2(datum=0),
        )
        .properties(height=64)
        .to_dict()
    )


def _theme(ramp: tuple[str, ...], ink: str, muted: str, rule: str, surface: str, bar: str) -> dict[str, Any]:
    return {
        "background": None,
        "font": _FONT,
        "padding": 2,
        "aria": False,  # a canvas says nothing, and describing every cell takes half a second
        "view": {"stroke": None},
        "range": {"heatmap": list(ramp), "ramp": list(ramp)},
        "axis": {
            "labelColor": muted, "titleColor": muted, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11,
            "gridColor": rule, "domainColor": rule, "tickColor": rule,
        },
        "legend": {"labelColor": muted, "titleColor": muted, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11},
        "style": {
            "blank": {"fill": None, "stroke": rule, "strokeWidth": 1},
            "finding": {"filled": True, "fill": "#ffffff", "stroke": "#1d1b20", "strokeWidth": 1.2, "opacity": 1},
            "selected": {"fill": None, "fillOpacity": 0, "stroke": ink, "strokeWidth": 2.5},
            "bins": {"fill": bar, "stroke": surface, "strokeWidth": 0.5},
        },
    }  # fmt: skip
