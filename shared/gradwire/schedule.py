"""The learning rate as a function of the round alone, so that who joins late has the same as the others."""

from __future__ import annotations

import math

from gradwire.errors import ConfigError


def learning_rate(
    progress_rounds: float, *, rounds: int, peak: float, warmup_rounds: float, final_fraction: float
) -> float:
    """Linear warm-up to `peak`, then half a cosine down to `final_fraction * peak`, which stays.

    Args:
        progress_rounds: rounds done, counting the step to be taken: for inner step i of H in round r it is
            `r + (i + 1) / H`, so that no step has a rate of 0.
        rounds: rounds of the whole run.
        peak: the rate at the end of the warm-up.
        warmup_rounds: length of the warm-up, 0 or more and less than `rounds`; need not be whole.
        final_fraction: 0 to 1; the share of the peak that is left at the end.

    Raises:
        ConfigError: a length or fraction out of range.
    """
    if not 0 <= warmup_rounds < rounds:
        raise ConfigError(f"warmup_rounds = {warmup_rounds}: must be 0 or more and less than rounds = {rounds}")
    if not 0 <= final_fraction <= 1:
        raise ConfigError(f"final_fraction = {final_fraction}: must be within 0 to 1")
    if progress_rounds < warmup_rounds:
        return peak * progress_rounds / warmup_rounds
    done = min(1.0, (progress_rounds - warmup_rounds) / (rounds - warmup_rounds))
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return peak * (final_fraction + (1 - final_fraction) * cosine)
