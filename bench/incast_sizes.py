"""KV sizes of real requests, as quantiles: small facts of published traces, enough to draw from.

Tokens per request at the probabilities `AT`; between them the logarithm is interpolated. Weka: callanjfox/kv-cache-tester, Apache-2.0, 710 sessions,
49,334 requests; whole context, and what the session had not computed before. Mooncake: kvcache-ai/Mooncake, FAST25 conversation trace, Apache-2.0, 11,920 requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

AT = (0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 1)  # fmt: skip
KV_BYTES = 53_940
"""Per token: GLM-5.2 in FP8, latent and indexer keys."""


@dataclass(frozen=True)
class Mix:
    """One distribution of sizes."""

    name: str
    tokens: tuple[int, ...]
    slice_bytes: int
    """Bytes that cross as one piece in the simulation, and the receiver's quantum."""
    transfers: int

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """Return sizes in bytes."""
        tokens = np.exp(np.interp(rng.random(count), AT, np.log(self.tokens)))
        return [int(t) * KV_BYTES for t in tokens]


MIXES = (
    Mix("agent, whole context", (
        6343, 16162, 20348, 30544, 42419, 50940, 58868, 66519, 74088, 81808, 89187, 96298, 103662, 110796, 117448,
        124411, 131156, 138566, 147419, 173392, 233633, 300694, 429974, 498617, 574795, 894371), 16 << 20, 150),
    Mix("agent, new tokens only", (
        18, 142, 160, 190, 232, 280, 329, 377, 432, 491, 556, 629, 727, 842, 979, 1172, 1443, 1777, 2274, 3119, 4804,
        10942, 37372, 94290, 142262, 851858), 4 << 20, 700),
    Mix("conversation", (
        891, 894, 896, 901, 965, 1264, 1663, 2309, 3276, 4258, 4999, 5883, 6929, 8208, 9589, 11260, 13244, 15403, 17878,
        21486, 27367, 39556, 66352, 85399, 100381, 126195), 8 << 20, 400),
)  # fmt: skip
