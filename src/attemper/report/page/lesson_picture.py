"""A lesson's picture as Vega: a few lines that differ in colour and in dashes, with the words of the lesson's language."""

from typing import Any

from attemper.report.lessons import Picture
from attemper.report.page.charts import compile_chart

# Behind the page's own fonts, those that write Chinese on the usual systems.
_FONT = "ui-sans-serif, system-ui, 'PingFang SC', 'Microsoft YaHei', 'Noto Sans CJK SC', sans-serif"


def lesson_picture(picture: Picture) -> dict[str, Any]:
    """The chart, that expects the data "points" (x, y, line)."""
    import altair as alt

    def axis(title: str, logarithmic: bool) -> dict[str, Any]:
        drawn = alt.Axis(
            title=title, format=".4~g", tickCount=6, grid=False, titleFont=_FONT, titlePadding=8, labelOverlap=True, minExtent=30
        )
        scale = alt.Scale(type="log", nice=False) if logarithmic else alt.Scale(zero=False, nice=True)
        return {"axis": drawn, "scale": scale}

    names = list(picture.lines)
    legend = alt.Legend(
        title=None, orient="top", direction="vertical", labelLimit=0, labelFont=_FONT, labelFontSize=12, symbolSize=300, columns=1
    )
    scale = alt.Scale(domain=names)
    chart = (
        alt.Chart(alt.NamedData("points"))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("x:Q", **axis(picture.x, picture.x_log)),
            y=alt.Y("y:Q", **axis(picture.y, picture.y_log)),
            color=alt.Color("line:N", scale=scale, legend=legend),
            strokeDash=alt.StrokeDash("line:N", scale=scale, legend=legend),
        )
        .properties(width=560, height=230)
    )
    return {"signals": []} | compile_chart(chart)  # the page looks for signals to set, of which this chart has none
