"""A passage written for this package: real text for the example models, none of it in what they were trained on."""

from __future__ import annotations

import torch
from torch import Tensor

PASSAGE = """\
A reader who wants to know what a library does will open one function first, and judge the rest by it. So the first
function has to be short, and its name has to say what comes back. Suppose it is called `count_words`. It takes a string
and returns a dictionary; nothing is printed, nothing is written to disk, and the string is left as it was.

    def count_words(text, stop=()):
        counts = {}
        for word in text.lower().split():
            word = word.strip(".,;:!?")
            if word and word not in stop:
                counts[word] = counts.get(word, 0) + 1
        return counts

The loop reads each word once. An empty text gives an empty dictionary, which is what a caller would expect, and a word
made only of punctuation is skipped. If `text` is not a string, Python raises an AttributeError that names `lower`; that
message is short, yet it does not say which argument was wrong. A better version checks the type at the door and raises a
TypeError with the name of the parameter, the type that was given, and the type that was expected.

When the same text is counted twice, the results are equal, so the function can be cached. When the text is very long,
the dictionary grows with the number of distinct words and not with the length of the text. Those two statements are
worth more to the reader than a list of every line, because they say what will hold tomorrow, after the body has been
rewritten. Tests should say the same: one for the empty text, one for a repeated word, one for a word in `stop`, and one
which shows that the order of the words does not change the counts.

The last part of the job is to write down what the function will not do. It does not know about hyphens at the end of a
line, it treats an apostrophe as part of the word, and it has never heard of languages that put no space between words.
"""


def passage_inputs(tokens: int) -> Tensor:
    """The passage as bytes, cut into whole rows; what is left over is dropped.

    Args:
        tokens: length of a row.

    Returns:
        int64, [rows, tokens].
    """
    content = torch.tensor(list(PASSAGE.encode()), dtype=torch.int64)
    rows = len(content) // tokens
    return content[: rows * tokens].reshape(rows, tokens)
