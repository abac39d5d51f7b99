"""The questions that the lab answers, one module each."""
