"""Faults planted into tiny models: how many of them `attemper check` finds, and how often it cries wolf on sound ones."""
