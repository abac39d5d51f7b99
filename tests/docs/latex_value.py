"""The value of a formula in LaTeX, so that a test can hold what a page prints against what the code computes."""

import re
from collections.abc import Callable, Mapping

import numpy as np

Value = float | np.ndarray
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\S")
SPACES = re.compile(r"\\(?:[,;]|(?:left|right)(?![A-Za-z]))")
FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    r"\ln": np.log,
    r"\exp": np.exp,
    r"\log": np.log2,
    r"\sum": np.sum,
    r"\sqrt": np.sqrt,
    r"\max": lambda *of: np.max(of),
    r"\min": lambda *of: np.min(of),
    r"\argmax": np.argmax,
}
BRACKETS = {"(": ")", r"\lfloor": r"\rfloor", r"\lvert": r"\rvert", "{": "}"}


def value(formula: str, names: Mapping[str, Value]) -> Value:
    """What a formula comes to.

    Args:
        formula: a sum of products of numbers, names, fractions, powers and functions of what follows them.
        names: the letters, with their index (`z_j`, `f_0`) or accent (`\\bar z`) where they have one → numbers, or arrays [j].
    """
    formula = re.sub(r"\\(?:mathrm|operatorname)\{(\w+)\}", r"\\\1 ", SPACES.sub(" ", formula))
    reader = _Reader(TOKEN.findall(formula), names)
    found = reader.total()
    if reader.rest:
        raise ValueError(f"{formula}: {' '.join(reader.rest)} was not understood")
    return found


class _Reader:
    """Reads tokens from the left, by recursive descent."""

    def __init__(self, tokens: list[str], names: Mapping[str, Value]) -> None:
        self.rest, self.names = tokens, names

    def next(self) -> str:
        return self.rest[0] if self.rest else ""

    def total(self) -> Value:
        found = -self.product() if self.take("-") else self.product()
        while self.next() in {"+", "-"}:
            found = found + self.product() if self.take("+") else (self.take("-"), found - self.product())[1]
        return found

    def product(self) -> Value:
        found = self.power()
        while self.next() not in {"", "+", "-", ",", "}", ")", "&", *BRACKETS.values()}:
            found = found * self.power()
        return found

    def power(self) -> Value:
        found = self.one()
        return found ** self.group() if self.take("^") else found

    def group(self) -> Value:
        """What stands in braces, or else one token."""
        if not self.take("{"):
            return _Reader([self.rest.pop(0)], self.names).power()
        found = self.total()
        self.expect("}")
        return found

    def one(self) -> Value:
        token = self.rest.pop(0)
        if token in FUNCTIONS:
            if self.take("_") and self.rest.pop(0) == "j":  # the other index there is, 2, is the base of a logarithm
                return FUNCTIONS[token](self.product())
            return self.applied(token)
        if token == r"\frac":
            return self.group() / self.group()
        if token in BRACKETS:
            found = self.total()
            self.expect(BRACKETS[token])
            return np.floor(found) if token == r"\lfloor" else np.abs(found) if token == r"\lvert" else found
        if token == r"\bar":
            return self.names[rf"\bar {self.rest.pop(0)}"]
        if self.next() == "_" and f"{token}_{self.rest[1]}" in self.names:
            token = f"{token}_{self.rest[1]}"
            del self.rest[:2]
        return self.names[token] if token in self.names else float(token)

    def applied(self, function: str) -> Value:
        """A function of what is in round brackets, of a square root's group, or of the product that follows."""
        if function == r"\sqrt":
            return np.sqrt(self.group())
        if self.take("("):
            of = [self.total()]
            while self.take(","):
                of.append(self.total())
            self.expect(")")
        else:
            of = [self.product()]
        return FUNCTIONS[function](*of)

    def take(self, token: str) -> bool:
        if self.next() != token:
            return False
        self.rest.pop(0)
        return True

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise ValueError(f"expected {token} before {' '.join(self.rest)}")
