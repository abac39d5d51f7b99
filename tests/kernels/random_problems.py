"""Random attention problems for the fuzz target: any shape, layout, mask and option, a function of (seed, number) alone.

Most are tiny, so that many fit into a minute; the rest stand around the edges of the kernel's tiles, in the shapes of decoding,
or have wide heads. Memory beside a view holds NaN: what is read there shows.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.attention_cases import Problem

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 20, 23, 31, 32, 33)
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 16, 17, 19, 31, 33, 40)
EDGES = (63, 64, 65, 127, 128, 129, 131, 191, 193, 255, 256, 257)  # blocks are of 16 to 128 queries, tiles of 128 keys


@dataclass(frozen=True)
class Sample:
    """A problem, and how it is to be run.

    kind: "output", "statistics" (the output with them) or "rows" (they alone); layout: of the gradient that flows in; threads:
    of a second run, which must agree with the first bit for bit.
    """

    problem: Problem
    kind: str
    layout: str
    threads: int
    dropout_seed: int

    def describe(self) -> str:
        """One line: what a reader wants to know before running it again."""
        problem, options = self.problem, self.problem.arguments

        def shape(tensor: Tensor) -> str:
            return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}" + ("" if tensor.is_contiguous() else f"/{tensor.stride()}")

        parts = [f"{name} {shape(tensor)}" for name, tensor in vars(problem).items() if isinstance(tensor, Tensor)]
        for name, option in options.items():
            if option is not None and option is not False and not (name in ("offset", "dropout_p") and option == 0):
                parts.append(f"{name} {shape(option) if isinstance(option, Tensor) else option}")
        return f"{self.kind}, {', '.join(parts)}; gradients: {' '.join(problem.leaves()) or 'none'}, {self.threads} threads"


def sample(seed: int, number: int) -> Sample:
    """The problem of that number."""
    return _Maker(random.Random(f"{seed}/{number}")).make()


class _Maker:
    """One draw. `chance` decides, `generator` fills tensors."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.generator = torch.Generator().manual_seed(chance.getrandbits(60))
        self.dtype = chance.choices(FLOATS, (4, 2, 2, 2))[0]
        self.compute = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.lead, self.heads, self.kv_heads, self.queries, self.keys, self.width, self.value_width = self._shape()

    def _shape(self) -> tuple[tuple[int, ...], int, int, int, int, int, int]:
        pick, chance = self.chance.choice, self.chance.random()
        kv_heads, group = pick((1, 1, 2, 3)), pick((1, 1, 1, 2, 3))
        lead = pick(((), (1,), (2,), (3,), (2, 2), (1, 2)))
        queries, keys, width, value_width = pick(LENGTHS), pick(LENGTHS), pick(WIDTHS), pick(WIDTHS)
        if chance < 0.08:  # decoding
            lead, kv_heads, group = pick(((), (1,), (2,))), pick((1, 1, 2)), self.chance.randint(1, 9)
            queries, keys = self.chance.randint(1, 5), pick((5, 67, 129, 257, 300, 515, 1021, 1500))
            width, value_width = (pick((*WIDTHS, 64, 80)) for _ in range(2))
        elif chance < 0.18:  # around the edges of tiles and blocks
            lead, kv_heads, group = pick(((), (1,), (2,))), pick((1, 1, 2)), pick((1, 1, 2))
            queries, keys = (pick(EDGES) if self.chance.random() < 0.5 else pick(LENGTHS) for _ in range(2))
        elif chance < 0.26:  # wide heads
            lead, group = pick(((), (2,))), pick((1, 2))
            width, value_width = (pick((*WIDTHS, 48, 64, 80, 96, 127, 128, 129, 192, 255, 257, 300)) for _ in range(2))
        elif chance < 0.32:  # something of which there is none
            which = self.chance.randrange(6)
            lead = (0,) if which == 0 else lead
            kv_heads = 0 if which == 1 else kv_heads
            queries, keys = (0 if which == 2 else queries), (0 if which == 3 else keys)
            width, value_width = (0 if which == 4 else width), (0 if which == 5 else value_width)
        return lead, kv_heads * group, kv_heads, queries, keys, width, value_width

    def make(self) -> Sample:
        chance, pick = self.chance, self.chance.choice
        lead, factor = self.lead, self.chance.choice((0.01, 1.0, 1.0, 1.0, 1.0, 3.0, 10.0))
        kv_lead = tuple(pick((n, n, n, 1)) for n in lead)
        query = self.normal(*lead, self.heads, self.queries, self.width) * factor
        key = self.normal(*kv_lead, self.kv_heads, self.keys, self.width)
        value = self.normal(*kv_lead, self.kv_heads, self.keys, self.value_width)
        if chance.random() < 0.06 and self.width:  # a common offset, or large logits of both signs
            query[..., 0], key[..., 0] = pick((30.0, 100.0)), pick((1.0, 3.0, 100.0))
            if chance.random() < 0.5:
                key[..., 0] *= self.normal(*key.shape[:-1]).sign()
        if chance.random() < 0.05:  # keys that are equal: the lowest of them is the largest
            key = key[..., :1, :].expand(key.shape)
        mask = self.mask()
        if chance.random() < 0.12:
            places = [query, key, value] + ([mask] if mask is not None and mask.is_floating_point() else [])
            for tensor in chance.sample(places, chance.randint(1, 2) if len(places) > 1 else 1):
                self.plant(tensor)
        tensors = [self.arranged(tensor.to(self.dtype)) for tensor in (query, key, value)]
        arguments: dict[str, Any] = {
            "attn_mask": None if mask is None else self.arranged(mask),
            "scale": self.scale(),
            "softcap": pick((None,) * 7 + (0.5, 1.5, 30.0, 1e4)),
            "sinks": self.sinks() if chance.random() < 0.15 else None,
            "is_causal": chance.random() < 0.3,
            **self.positions(),
            "enable_gqa": self.heads != self.kv_heads or chance.random() < 0.2,
            "dropout_p": pick((0.0,) * 9 + (0.1, 0.5, 0.9, 1.0)),
        }
        kind = chance.choices(("output", "statistics", "rows"), (3, 6, 1))[0]
        share = 0.0 if kind == "rows" else pick((0.0, 0.5, 1.0, 1.0))
        problem = Problem(*tensors, arguments)
        for tensor in (*tensors, *arguments.values()):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and chance.random() < share:
                tensor.requires_grad_()
        layout = pick(("contiguous", "transposed", "one number"))
        return Sample(problem, kind, layout, pick((1, 1, 2, 3)), chance.getrandbits(31))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def plant(self, tensor: Tensor) -> None:
        """A NaN or an infinity in a place or two; float tensors of any layout that has memory of its own."""
        if not tensor.numel() or any(stride == 0 for stride in tensor.stride()):
            return
        for _ in range(self.chance.randint(1, 2)):
            place = tuple(self.chance.randrange(n) for n in tensor.shape)
            tensor[place] = self.chance.choice((math.nan, math.inf, -math.inf))

    def arranged(self, tensor: Tensor) -> Tensor:
        """The same numbers in another layout."""
        kind = self.chance.choice(
            ("as is", "as is", "as is", "columns", "token major", "sliced", "sparse", "repeated", "overlapping")
        )
        broken = math.nan if tensor.is_floating_point() else True
        if kind == "columns" and tensor.ndim > 1:
            return tensor.mT.contiguous().mT
        if kind == "token major" and tensor.ndim > 2:
            return tensor.transpose(-2, -3).contiguous().transpose(-2, -3)
        if kind == "sliced" and tensor.ndim:
            room = torch.full(tuple(n + self.chance.randint(1, 3) for n in tensor.shape), broken, dtype=tensor.dtype)
            view = room[tuple(slice(1, 1 + n) for n in tensor.shape)]
            return view.copy_(tensor)
        if kind == "sparse" and tensor.ndim:
            room = torch.full((*tensor.shape, self.chance.randint(2, 3)), broken, dtype=tensor.dtype)
            return room[..., 1].copy_(tensor)
        if kind == "repeated" and tensor.numel():
            for dimension in self.chance.sample(range(tensor.ndim), self.chance.randint(0, min(2, tensor.ndim))):
                tensor = tensor.narrow(dimension, 0, 1).expand(tensor.shape)
            return tensor
        if kind == "overlapping" and tensor.ndim > 1 and tensor.numel():
            rows, columns = tensor.shape[-2:]
            run = tensor.reshape(-1)[: rows + columns]
            return run.as_strided(tensor.shape, (0,) * (tensor.ndim - 2) + (1, 1)) if len(run) == rows + columns else tensor
        return tensor.contiguous()

    def mask(self) -> Tensor | None:
        kind = self.chance.choice(("none",) * 6 + ("bool",) * 3 + ("float",) * 3)
        if kind == "none":
            return None
        full = (*self.lead, self.heads, self.queries, self.keys)
        shape = tuple(self.chance.choice((n, n, n, 1)) for n in full)[self.chance.choice((0, 0, 0, 1, 2)) :]
        visible = self.visible(shape if len(shape) > 1 else (1, *shape)).reshape(shape)
        if kind == "bool":
            return visible
        dtype = self.chance.choice((self.dtype, self.dtype, *FLOATS))
        pattern = self.chance.choice(("noughts", "numbers", "numbers", "large", "slopes"))
        if pattern == "noughts":
            added = torch.zeros(shape, dtype=torch.float64)
        elif pattern == "slopes":
            added = -0.25 * torch.arange(shape[-1], dtype=torch.float64).expand(shape)
        else:
            added = self.normal(*shape) * (1.0 if pattern == "numbers" else 300.0)
        hidden = self.chance.choice((-math.inf, torch.finfo(dtype).min, -1e4))
        return added.to(dtype).masked_fill(~visible, hidden)

    def visible(self, shape: tuple[int, ...]) -> Tensor:
        pattern = self.chance.choice(("scattered", "scattered", "all", "none", "triangle", "padding", "tiles", "rows"))
        keys, queries = shape[-1], shape[-2]
        key, query = torch.arange(keys), torch.arange(queries).unsqueeze(-1)
        if pattern == "scattered":
            return self.uniform(*shape) < self.chance.choice((0.1, 0.5, 0.9))
        if pattern == "triangle":
            return (key <= query + self.chance.randint(-2, max(1, keys))).expand(shape)
        if pattern == "padding":
            lengths = (self.uniform(*shape[:-2], 1, 1) * (keys + 1)).long()
            return ((key < lengths) if self.chance.random() < 0.7 else (key >= keys - lengths)).expand(shape)
        if pattern == "tiles":  # all or nothing, in rectangles that are or are not those of the kernel
            step = self.chance.choice((16, 64, 128, 100))
            plane = self.uniform(-(-queries // step), -(-keys // step)) < 0.5
            return plane[torch.arange(queries) // step][:, torch.arange(keys) // step].expand(shape)
        if pattern == "rows":
            return (self.uniform(*shape[:-1], 1) < 0.7).expand(shape)
        return torch.full(shape, pattern == "all")

    def scale(self) -> float | Tensor | None:
        form = self.chance.choice(("none",) * 5 + ("number",) * 2 + ("scalar", "head", "query", "some"))
        if form == "none":
            return None
        if form == "number":
            return self.chance.choice((0.3, 1.0, 0.0, -0.7, 1e-3, 40.0, 1e4))
        rows = (*self.lead, self.heads, self.queries)
        shapes = {"scalar": (), "head": (self.heads,), "query": rows}
        shape = shapes[form] if form in shapes else tuple(self.chance.choice((n, 1)) for n in rows)
        scale = self.uniform(*shape) * self.chance.choice((0.3, 1.0, 3.0)) - self.chance.choice((0.0, 0.0, 0.5))
        return self.arranged(scale.to(self.chance.choice((self.compute, self.compute, self.dtype))))

    def sinks(self) -> Tensor:
        sinks = self.normal(self.heads) * self.chance.choice((1.0, 5.0, 100.0))
        if self.heads and self.chance.random() < 0.2:
            sinks[0] = -math.inf
        return self.arranged(sinks.to(self.compute))

    def positions(self) -> dict[str, Any]:
        chance, keys, queries = self.chance, self.keys, self.queries
        window, offset = None, 0
        if chance.random() < 0.3:
            sides = (None, 0, 1, 3, chance.randint(0, keys + 2), 127, 10**9, 2**70)
            window = (chance.choice(sides), chance.choice(sides))
        if chance.random() < 0.35:
            offset = chance.choice(
                (keys - queries, 1, -3, chance.randint(-queries - 2, keys + 2), 129, 10**6, -(10**6), 2**60, -(2**60))
            )
        return {"window": window, "offset": offset}
