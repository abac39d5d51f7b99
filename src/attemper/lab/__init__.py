"""The lab: small transformers trained under every scale rule, and the curves that tell the rules apart."""
