"""The table of the families of models whose projections are known."""

from attemper.weights.families import FAMILIES
from docs.pages.markdown import table


def weight_families_table() -> str:
    """A row for each layout of the projections."""
    rows = []
    for family in FAMILIES:
        names = ", ".join(f"`{name}`" for name in dict.fromkeys((family.query, family.key, family.value)))
        layout = "apart" if family.split is None else " ".join((family.split.__doc__ or "").split()).rstrip(".")
        rows.append((names, layout, family.models))
    rows.append(("`q_b_proj` or `q_proj`, `kv_b_proj`", "MLA", "deepseek_v2, deepseek_v3 and others with their layout"))
    rows.append(("`in_proj_weight`", "[q; k; v]", "torch.nn.MultiheadAttention, attemper.nn.MultiheadAttention"))
    return table(("projections", "outputs", "models"), rows)
