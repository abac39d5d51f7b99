"""A report as commands of GitHub's workflows, which shows them as annotations: one for each code and severity, as it shows ten.

A command is one line; what could end it, or begin another, is escaped as GitHub's own toolkit does.
"""

from collections.abc import Mapping

from attemper.report import layout
from attemper.report.names import safe
from attemper.report.records import Outcome, Severity

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def github_lines(report: Outcome, rule_names: Mapping[str, str], *, artifact: str | None = None) -> str:
    """One command a line, then the closing line of the text report.

    Args:
        rule_names: a few words for each code. artifact: relative path of the file that stands for the model, if there is one.
    """
    lines = []
    for group in layout.groups(report):
        title = f"{group.code} {rule_names.get(group.code, '')}".strip()
        places = [f"{place}: {message}" for place, message in group.messages]
        if group.more:
            places.append(f"and {group.more} more")
        lines.append(_command(_COMMANDS[group.severity], title, "\n".join([*places, f"remedy: {group.remedy}"]), artifact))
    lines += [_command("warning", title, words, artifact) for title, missed in layout.missed(report) for words in missed]
    if not report.looked_at:
        lines.append(_command("error", "nothing to check", "no attention call was seen", artifact))
    return "\n".join([*lines, layout.closing(report)]) + "\n"


def _command(name: str, title: str, message: str, artifact: str | None) -> str:
    file = f"file={_property(safe(artifact))}," if artifact else ""
    return f"::{name} {file}title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
