"""What Vega draws on a page: charts that Altair writes, compiled to Vega here, not in the browser. The page puts data in.

Colours are named here and nowhere else, once for each theme. The ramps rise or fall in lightness all along, so that they read
without telling hues apart.
"""

import functools
from typing import TYPE_CHECKING, Any

from attemper.report.page.shell import Script

if TYPE_CHECKING:
    import altair as alt

RAMPS = {
    "light": ("#f3ece0", "#f2d0a0", "#e49b63", "#c25b4e", "#832b4f", "#3b1140"),
    "dark": ("#27232c", "#5d2b57", "#9a3553", "#d0604b", "#eea76a", "#fae6bd"),
}
_INKS = {
    "light": {"ink": "#1d1b20", "muted": "#625f69", "rule": "#dedbd5", "surface": "#ffffff", "bar": "#8a4a63"},
    "dark": {"ink": "#ece9ee", "muted": "#a5a1ac", "rule": "#3a3740", "surface": "#1c1b20", "bar": "#d98a7c"},
}
# A few lines side by side; they differ in lightness and are dashed differently too.
_LINES = {
    "light": ("#8a2b52", "#b5651d", "#2f5f98", "#1d1b20"),
    "dark": ("#e9a3c3", "#eea76a", "#93bdf2", "#ece9ee"),
}
LABEL_WIDTH = 150  # pixels that a layer's name may take beside the map
_FONT = "ui-sans-serif, system-ui, sans-serif"


@functools.cache
def vega_script() -> Script:
    """Vega, Vega-Lite and Vega-Embed as one script, from the wheel of vl-convert-python. Takes some seconds."""
    import vl_convert

    return Script(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def themes() -> dict[str, dict[str, Any]]:
    """For the light and the dark page: Vega's `config`, and `inks`, the values of the signals that hold the charts' colours."""
    return {name: {"config": theme_config(name), "inks": _INKS[name]} for name in RAMPS}


@functools.cache
def heat_map() -> dict[str, Any]:
    """A map of heads, a row for each layer and a column for each head, that expects four sets of data.

    "cells" (layer, head, value), "blanks" (layer, head) of heads without a value, "marks" (layer, head or −1, severity) and
    "selected" (layer, head). The page sets signals: `labels`, the layers' names; `layers` and `heads`, how many; `step`, `x_step`
    and `y_step`, the size of a cell in pixels. It also sets the scale "color" and the legend's title, which differ from figure to
    figure.
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
        scale=alt.Scale(clamp=True, interpolate="lab"),
        legend=alt.Legend(orient="bottom", direction="horizontal", gradientLength=220, gradientThickness=8, tickCount=5),
    )
    severity = alt.Scale(domain=["error", "warning", "info"], range=["diamond", "circle", "circle"])
    shape = alt.Shape("severity:N", legend=None, scale=severity)
    marks = alt.Chart(alt.NamedData("marks"))
    # Pale with a dark rim: it stands out from every colour of either ramp.
    rim = {"filled": True, "fill": "#ffffff", "stroke": "#1d1b20", "strokeWidth": 1.2, "opacity": 1}
    # Where cells are small, what is grave may cover its neighbours rather than be overlooked.
    least = "datum.severity == 'error' ? 6 : datum.severity == 'warning' ? 3 : 2"
    size = alt.expr(f"pow(clamp(step * (datum.severity == 'info' ? 0.24 : 0.42), {least}, 9), 2)")
    on_head = marks.transform_filter("datum.head >= 0").mark_point(size=size, **rim)
    on_layer = marks.transform_filter("datum.head < 0").mark_point(size=45, clip=False, **rim)
    chart = (
        alt.layer(
            alt.Chart(alt.NamedData("blanks")).mark_rect(fill=None, stroke=alt.expr("rule"), strokeWidth=1).encode(x=x, y=y),
            alt.Chart(alt.NamedData("cells")).mark_rect(invalid=None).encode(x=x, y=y, color=color),
            on_head.encode(x=x, y=y, shape=shape),
            on_layer.encode(x=alt.value(-8), y=y, shape=shape),
            alt.Chart(alt.NamedData("selected")).mark_rect(fill=None, stroke=alt.expr("ink"), strokeWidth=2.5).encode(x=x, y=y),
        )
        .add_params(*_signals(labels=[], layers=1, heads=1, step=16, **_INKS["light"]))
        .properties(width=alt.Step(16), height=alt.Step(16))
    )
    compiled = compile_chart(chart)
    for mark in compiled["marks"]:
        if mark["type"] == "rect":  # an expression for each of 12 800 cells otherwise, with the same result
            mark["encode"]["update"] |= {"width": {"scale": "x", "band": 1}, "height": {"scale": "y", "band": 1}}
    return compiled


@functools.cache
def histogram(kind: str) -> dict[str, Any]:
    """Bars over bins of any width, that expects the data "bins" (low, high, height); the page sets the signal
    `width`.

    Args:
        kind: "share" (0 to 1), "linear" or "log", as the axis is.
    """
    import altair as alt

    scales = {
        "share": alt.Scale(domain=[0, 1]),
        "linear": alt.Scale(nice=False, zero=False),
        "log": alt.Scale(type="log", nice=False),
    }
    axis = alt.Axis(title=None, grid=False, tickCount=6, format="~g", labelOverlap="greedy", labelSeparation=6, labelFlush=False)
    bins = alt.Chart(alt.NamedData("bins")).mark_rect(fill=alt.expr("bar"), stroke=alt.expr("surface"), strokeWidth=0.5)
    # Heights are no figures that a reader needs: areas are shares.
    chart = (
        bins.encode(
            x=alt.X("low:Q", scale=scales[kind], axis=axis),
            x2="high:Q",
            y=alt.Y("height:Q", axis=None, scale=alt.Scale(nice=False)),
            y2=alt.Y2(datum=0),
        )
        .add_params(*_signals(**_INKS["light"]))
        .properties(width=240, height=64)
    )
    return compile_chart(chart)


@functools.cache
def curves(kind: str) -> dict[str, Any]:
    """Lines over steps, that expects four sets of data.

    "points" (x, y, series; y null where a line breaks), "chosen" (the same, of the line that stands out), "rules" (y, words) and
    "marks" (x, y, severity). The page sets the signals `width`, `height` and `count`, how many series there are: the first is
    pale, the last strong. It also sets the domains of the scales "x" and "y" ("share" has its own).

    Args:
        kind: "share" (0 to 1), "linear" or "log", as the vertical axis is.
    """
    import altair as alt

    scales = {
        "share": alt.Scale(domain=[0, 1]),
        "linear": alt.Scale(nice=True, zero=False),
        "log": alt.Scale(type="log", nice=False),
    }
    x = alt.X("x:Q", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(title="step", format="d", tickCount=8, grid=False))
    # Without a precision of its own the axis takes one from its ticks, and writes 50, 100 and 1.5e+2.
    y = alt.Y("y:Q", scale=scales[kind], axis=alt.Axis(title=None, format=".6~g", tickCount=5, minExtent=44, grid=kind != "log"))
    # The ramp begins at the paper's own colour, which no line should have.
    ramp = alt.Scale(type="linear", range="heatmap", domain=alt.expr("[-0.8 * count, max(count - 1, 0.2)]"), interpolate="lab")
    lines = alt.Chart(alt.NamedData("points")).mark_line(strokeWidth=1.3, clip=True)
    chosen = alt.Chart(alt.NamedData("chosen")).mark_line(strokeWidth=2.6, stroke=alt.expr("ink"), clip=True)
    rules = alt.Chart(alt.NamedData("rules"))
    words = rules.mark_text(align="left", baseline="bottom", dx=4, dy=-2, fontSize=11, fill=alt.expr("muted"))
    severity = alt.Scale(domain=["error", "warning", "info"], range=["diamond", "circle", "circle"])
    rim = {"filled": True, "fill": "#ffffff", "stroke": "#1d1b20", "strokeWidth": 1.4, "opacity": 1}
    chart = (
        alt.layer(
            lines.encode(x=x, y=y, color=alt.Color("series:Q", scale=ramp, legend=None), detail="series:N"),
            chosen.encode(x=x, y=y),
            rules.mark_rule(strokeDash=[5, 4], stroke=alt.expr("muted")).encode(y=y),
            words.encode(x=alt.value(0), y=y, text="words:N"),
            alt.Chart(alt.NamedData("marks"))
            .mark_point(size=64, **rim)
            .encode(x=x, y=y, shape=alt.Shape("severity:N", legend=None, scale=severity)),
        )
        .add_params(*_signals(count=1, **_INKS["light"]))
        .properties(width=600, height=260)
    )
    return compile_chart(chart)


def _signals(**values: Any) -> "list[alt.Parameter]":
    import altair as alt

    return [alt.param(name=name, value=value) for name, value in values.items()]


def compile_chart(chart: "alt.TopLevelMixin") -> dict[str, Any]:
    """The chart as Vega, without a look of its own."""
    import vl_convert

    # Altair's own look would stand in the chart; the page's theme decides. A canvas speaks to no screen reader, and Vega would
    # take half a second to describe every cell.
    written = chart.to_dict() | {"config": {"aria": False, "view": {"stroke": None}}}
    compiled = vl_convert.vegalite_to_vega(written)
    return {name: value for name, value in compiled.items() if name not in ("$schema", "background", "padding")}


def theme_config(theme: str) -> dict[str, Any]:
    """Vega's `config` for the light or the dark page."""
    return _config(RAMPS[theme], _INKS[theme], _LINES[theme])


def _config(ramp: tuple[str, ...], inks: dict[str, str], inks_of_lines: tuple[str, ...]) -> dict[str, Any]:
    muted, rule = inks["muted"], inks["rule"]
    small = {"labelColor": muted, "titleColor": muted, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11}
    fonts = {"labelFont": _FONT, "titleFont": _FONT}
    return {
        "background": None,
        "padding": 2,
        "range": {"heatmap": list(ramp), "category": list(inks_of_lines)},
        "axis": small | fonts | {"gridColor": rule, "domainColor": rule, "tickColor": rule},
        "legend": small | fonts,
    }
