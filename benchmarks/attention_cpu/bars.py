"""What has to be reached, and on which machines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.attention_cpu.cases import Setting, Shape
from benchmarks.machine import Machine


class Speed(NamedTuple):
    """For one dtype: the least of PyTorch's time over ours, statistics on, and of our share of the machine's peak.

    full, causal: forward at 2048 positions and more; backward: at any length but one query; share: of the dtype's own peak
    (float16, which is computed in float32: of float32's), forward, full, at 2048 positions and more; short: forward at 128
    positions; decode: forward with one query.
    """

    full: float
    causal: float
    backward: float
    share: float
    short: float
    decode: float

    def forward(self, shape: Shape, *, causal: bool) -> float:
        """The bar of a forward pass."""
        if shape.is_decode:
            return self.decode
        if not shape.is_long:
            return self.short
        return self.causal if causal else self.full


# For AMD Zen 5, whose 512-bit units PyTorch's MKL leaves idle.
ZEN5 = {
    "float32": Speed(full=2.1, causal=2.4, backward=2.2, share=0.78, short=2.2, decode=2.5),
    "bfloat16": Speed(full=4.0, causal=4.6, backward=2.5, share=0.70, short=4.0, decode=8.0),
    "float16": Speed(full=2.8, causal=3.4, backward=20.0, share=0.75, short=6.0, decode=12.0),
}


@dataclass(frozen=True)
class Bars:
    """Everything that is held.

    speed: by dtype, empty on machines without speeds to hold; parity: PyTorch's time over ours without statistics, at least;
    cost, narrow_cost: of the statistics, as a part of the forward pass, in heads of width 64 and more, and in narrower ones;
    kept: of the plain kernel's speed with a softcap, sinks or a learned scale; tiny: our time over PyTorch's for a call that
    computes next to nothing; forward_mib, backward_mib: memory beyond inputs and outputs, the latter for each thread; error: our
    largest error in float32 over PyTorch's.
    """

    speed: Mapping[str, Speed] = field(default_factory=dict)
    parity: float = 0.0
    cost: float = 0.08
    narrow_cost: float = 0.10
    kept: float = 0.85
    tiny: float = 1.3
    forward_mib: float = 32.0
    backward_mib: float = 24.0
    error: float = 2.0

    def speed_of(self, setting: Setting) -> Speed | None:
        """The speeds to hold in one line of the table; heads narrower than 64 have none."""
        return self.speed.get(setting.dtype) if setting.shape.width >= 64 else None

    def cost_of(self, shape: Shape) -> float:
        """What the statistics may cost."""
        return self.cost if shape.width >= 64 else self.narrow_cost


# A smoke run is too short to judge by: each bar is looked at, none can be missed but by what is not a number.
SMOKE = Bars(
    speed={dtype: Speed(0, 0, 0, 0, 0, 0) for dtype in ZEN5},
    cost=math.inf,
    narrow_cost=math.inf,
    kept=0.0,
    tiny=math.inf,
    forward_mib=math.inf,
    backward_mib=math.inf,
    error=math.inf,
)


def bars_for(machine: Machine) -> Bars:
    """What holds on any machine, and what holds on this kind."""
    return Bars(speed=ZEN5 if machine.is_amd_with_full_avx512 else {}, parity=1.0 if machine.mkl_uses_avx512 else 0.0)


def explain(bars: Bars) -> str:
    """Which bars were applied."""
    held = (
        f"Bars on any machine: statistics cost at most {bars.cost:.0%} of the forward pass ({bars.narrow_cost:.0%} in heads "
        f"narrower than 64), softcap, sinks and a learned scale keep {bars.kept:.0%} of the speed, a tiny call takes at most "
        f"{bars.tiny} times PyTorch's time, memory beyond inputs and outputs stays within {bars.forward_mib:.0f} MiB forward and "
        f"{bars.backward_mib:.0f} MiB a thread backward, and the float32 error of the output within {bars.error} times PyTorch's."
    )
    if bars.speed:
        return (
            f"{held} Speeds against PyTorch and shares of the peak are held too: this is the kind of machine they were set for."
        )
    if bars.parity:
        return (
            f"{held} PyTorch's own kernels use AVX-512 on this machine, so ours without statistics may be no slower; "
            "other speeds are reported only."
        )
    return (
        f"{held} Speeds against PyTorch and shares of the peak are reported only: their bars were set for AMD processors whose "
        "AVX-512 has full width and a bfloat16 dot product."
    )
