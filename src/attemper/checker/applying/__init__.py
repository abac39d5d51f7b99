"""A recorded call by its definition in float64 (`logits`), and the rule that its output shows (`applied`)."""
