"""Arguments that cannot be used: each is named, with what was given and what was expected."""

import math
from typing import Any

import pytest
import torch

import attemper
from attemper import attention
from attemper.errors import ArgumentError, UnsupportedError
from attemper.ops import row_stats

Q, K, V = torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 11, 7), torch.zeros(2, 3, 11, 13)
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("query", {"query": [1.0]}, r"query: got list; expected a torch\.Tensor"),
    ("query dimensions", {"query": Q[0, 0]}, r"query: got shape \(5, 7\); expected \[\.\.\., heads, tokens, width\]"),
    ("query dtype", {"query": Q.long()}, r"query: got torch\.int64; expected float32, float64, bfloat16 or float16"),
    ("query complex", {"query": Q.cfloat()}, r"query: got torch\.complex64"),
    ("query sparse", {"query": Q.to_sparse()}, r"query: got layout torch\.sparse_coo; expected a dense tensor"),
    ("key dtype", {"key": K.half()}, r"key: got torch\.float16; expected torch\.float32, the dtype of query"),
    ("key device", {"key": K.to("meta")}, "key: got a tensor on meta; expected one on cpu"),
    ("key dimensions", {"key": K[0]}, r"key: got shape \(3, 11, 7\); expected 4 dimensions"),
    ("key width", {"key": K[..., :5]}, r"key: got width 5 \(shape \(2, 3, 11, 5\)\); expected width 7"),
    ("value keys", {"value": V[:, :, :4]}, r"value: got shape \(2, 3, 4, 13\); expected \[\.\.\., 3, 11, width\]"),
    ("value heads", {"value": V[:, :1]}, r"value: got shape \(2, 1, 11, 13\)"),
    ("value missing", {"value": None}, r"value: got NoneType; expected a torch\.Tensor"),
    ("heads", {"key": K[:, :1], "value": V[:, :1]}, "key: got 1 heads; expected 3, as many as query has, or enable_gqa=True"),
    (
        "groups",
        {"key": K[:, :2], "value": V[:, :2], "enable_gqa": True},
        "key: got 2 heads; expected a divisor of query's 3 heads",
    ),
    (
        "batch",
        {"key": K.repeat(4, 1, 1, 1)[:3], "value": V.repeat(4, 1, 1, 1)[:3]},
        r"query \(2,\) and key \(3,\) and value \(3,\)",
    ),
    ("mask kind", {"attn_mask": 1.0}, r"attn_mask: got float; expected a bool or float torch\.Tensor"),
    ("mask dtype", {"attn_mask": torch.ones(5, 11, dtype=torch.int64)}, r"attn_mask: got torch\.int64; expected bool"),
    (
        "mask shape",
        {"attn_mask": torch.ones(5, 10, dtype=torch.bool)},
        r"attn_mask: got shape \(5, 10\); expected one that broadcasts to \[\.\.\., heads, queries, keys\] = \(2, 3, 5, 11\)",
    ),
    ("mask larger", {"attn_mask": torch.ones(1, 2, 3, 5, 11)}, r"attn_mask: got shape \(1, 2, 3, 5, 11\)"),
    ("dropout", {"dropout_p": 1.5}, r"dropout_p: got 1\.5; expected a probability in \[0, 1\]"),
    ("dropout nan", {"dropout_p": math.nan}, "dropout_p: got nan"),
    ("causal", {"is_causal": 1}, "is_causal: got 1; expected True or False"),
    ("scale kind", {"scale": "0.1"}, r"scale: got '0\.1'; expected a finite number, a tensor, or None"),
    ("scale nan", {"scale": math.nan}, "scale: got nan"),
    ("scale bool", {"scale": True}, "scale: got True"),
    (
        "scale heads",
        {"scale": torch.ones(5)},
        r"scale: got a 1-D tensor of shape \(5,\); expected \(3,\): one factor for each head",
    ),
    (
        "scale shape",
        {"scale": torch.ones(3, 4)},
        r"scale: got shape \(3, 4\); expected one that broadcasts to \[\.\.\., heads, queries\]",
    ),
    (
        "scale dtype",
        {"scale": torch.ones((), dtype=torch.int64)},
        r"scale: got a tensor of torch\.int64; expected a floating-point tensor",
    ),
    ("softcap", {"softcap": 0.0}, r"softcap: got 0\.0; expected a finite number above 0"),
    (
        "softcap beyond float32",
        {"softcap": 1e39},
        r"softcap: got 1e\+39; expected a finite number above 0, .*; in torch\.float32",
    ),
    ("softcap below float32", {"softcap": 1e-46}, r"softcap: got 1e-46; .*; in torch\.float32"),
    ("scale beyond float32", {"scale": -1e39}, r"scale: got -1e\+39; expected a finite number, .*; in torch\.float32"),
    ("scale beyond floats", {"scale": 10**400}, "scale: got 10000"),
    ("softcap kind", {"softcap": "50"}, "softcap: got '50'"),
    ("sinks kind", {"sinks": 0.5}, r"sinks: got float; expected a float torch\.Tensor"),
    (
        "sinks shape",
        {"sinks": torch.zeros(4)},
        r"sinks: got torch\.float32 of shape \(4,\); expected a float tensor of shape \(3,\)",
    ),
    (
        "mask sparse",
        {"attn_mask": torch.ones(5, 11).to_sparse()},
        r"attn_mask: got layout torch\.sparse_coo; expected a dense tensor",
    ),
    ("scale sparse", {"scale": torch.ones(3).to_sparse()}, r"scale: got layout torch\.sparse_coo"),
    ("window", {"window": 5}, r"window: got 5; expected \(left, right\)"),
    ("window negative", {"window": (-1, 0)}, r"window: got \(-1, 0\)"),
    ("window float", {"window": (1.0, None)}, r"window: got \(1\.0, None\)"),
    ("offset too far", {"offset": -(2**63)}, r"offset: got -9223372036854775808; expected a whole number, at most 2\^60 in size"),
    ("offset", {"offset": 0.5}, r"offset: got 0\.5; expected a whole number"),
    ("impl", {"impl": "fast"}, "impl: got 'fast'; expected one of 'auto', 'reference', 'blocked', 'cpu', 'triton'"),
]


@pytest.mark.parametrize(("changes", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_argument_is_named_with_what_was_given_and_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        attention(**{"query": Q, "key": K, "value": V, **changes})


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 5, 7)], layout=torch.jagged)
    with pytest.raises(ArgumentError, match="query: got a nested tensor; expected a dense tensor; pad it"):
        attention(nested, nested, nested)


def test_a_named_implementation_never_falls_back() -> None:
    with pytest.raises(UnsupportedError, match=r"impl: 'triton' does not take a tensor on cpu, except .*; 'blocked' does"):
        attention(Q, K, V, impl="triton")


@pytest.mark.parametrize("row_stride", [0, -1, 2.0, True])
def test_a_stride_that_is_none_is_refused(row_stride: object) -> None:
    query = torch.randn(1, 1, 3, 2)
    with pytest.raises(ArgumentError, match=rf"row_stride: got {row_stride!r}; expected a whole number from 1"):
        row_stats(query, query, row_stride=row_stride)


def test_the_root_lists_what_it_has() -> None:
    with pytest.raises(AttributeError, match="module 'attemper' has no attribute 'atention'"):
        _ = attemper.atention  # pyrefly: ignore
