"""The public names of attemper.nn: documented, each with all that it takes."""

import inspect
import re

import pytest

from attemper import nn
from tests.running import ROOT


@pytest.mark.parametrize("name", nn.__all__)
def test_a_name_says_what_it_takes_and_is_in_the_document(name: str) -> None:
    thing = getattr(nn, name)
    doc = inspect.getdoc(thing) or ""
    assert thing.__doc__, f"attemper.nn.{name} inherits its docstring"
    assert "Source: " in doc
    takes = list(inspect.signature(thing).parameters)
    if name not in ("LinearRope", "NTKRope", "Llama3Rope"):  # their formulas name what they take
        missing = [parameter for parameter in takes if not re.search(rf"\b{parameter}(, \w+)*:", doc)]
        missing = [parameter for parameter in missing if not re.search(rf"^ +(\w+, )*{parameter}(, \w+)*:", doc, re.MULTILINE)]
        assert not missing, f"the docstring of attemper.nn.{name} leaves out {missing}"
    assert re.search(rf"\b{name}\b", (ROOT / "docs" / "nn.md").read_text("utf-8")), f"docs/nn.md does not name {name}"
