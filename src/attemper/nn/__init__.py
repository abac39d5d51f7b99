"""Modules around `attemper.attention`: torch's own with more options, the parts that models put before the product, and
penalties on its statistics.
"""

from attemper.nn.additive import AdditiveAttention
from attemper.nn.block import Block
from attemper.nn.differential import DifferentialAttention
from attemper.nn.multihead import MultiheadAttention
from attemper.nn.penalties import entropy_floor, z_loss
from attemper.nn.qk_norm import QKNorm
from attemper.nn.ring import ring_attention
from attemper.nn.rope_rules import LinearRope, Llama3Rope, NTKRope, RopeRule, YarnRope
from attemper.nn.rotary import RotaryEmbedding
from attemper.nn.sequence_parts import ring_shard

__all__ = [
    "AdditiveAttention",
    "Block",
    "DifferentialAttention",
    "LinearRope",
    "Llama3Rope",
    "MultiheadAttention",
    "NTKRope",
    "QKNorm",
    "RopeRule",
    "RotaryEmbedding",
    "YarnRope",
    "entropy_floor",
    "ring_attention",
    "ring_shard",
    "z_loss",
]
