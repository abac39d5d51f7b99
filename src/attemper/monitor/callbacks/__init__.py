"""`watch` in the training loops of others: `huggingface`, `lightning` and `accelerate` each hold what theirs needs.

Nothing is imported here: each module needs a package of its own.
"""
