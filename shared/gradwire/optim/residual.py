"""Error feedback: what compression left behind is added to the next update.

Seide et al. 2014 (1-bit SGD), Karimireddy et al. 2019; with decay as in SparseLoCo (Sarfi et al. 2025). Keyed by
parameter name, so that it survives whatever reorders tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from gradwire.codec import Encoded, decode, encode
from gradwire.errors import ConfigError
from gradwire.manifest import Manifest, Role

log = logging.getLogger("gradwire.session")


class Residual:
    """The residual of every parameter, on the parameter's device, float32.

    decay: what the old residual is multiplied with before the update is added, 0 to 1; 0 turns error feedback off.
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"decay = {decay}: allowed is 0 to 1")
        self.decay = decay
        self._kept: dict[str, torch.Tensor] = {}
        self._pending: dict[str, torch.Tensor] = {}
        self._saved: tuple[int, dict[str, torch.Tensor]] | None = None  # of a round that is still to come

    def compress(self, manifest: Manifest, updates: Mapping[str, torch.Tensor | None]) -> list[Encoded | None]:
        """Encodes decay * residual + update for every entry; None where an update is missing.

        What is left behind becomes the residual if `settle(counted=True)` follows. Raises NonFiniteGradient, naming the
        tensor, with the residual as it was. Buffers are encoded as they are: they are values, not updates.
        """
        pending: dict[str, torch.Tensor] = {}
        encoded: list[Encoded | None] = []
        for entry in manifest:
            update = updates.get(entry.name)
            if update is None:
                encoded.append(None)
                continue
            total = update.detach().to(torch.float32)
            feedback = self.decay > 0 and entry.role is Role.PARAMETER
            if feedback and entry.name in self._kept:
                total = self._kept[entry.name].to(total.device) * self.decay + total
            sent = encode(total, entry.scheme, name=entry.name)
            if feedback:
                pending[entry.name] = total - decode(sent, entry.scheme, entry.shape, device=total.device)
            encoded.append(sent)
        self._pending = pending
        return encoded

    def settle(self, *, counted: bool) -> None:
        """Decides about the last `compress`: the new residual stands if it counted, else the old one does."""
        if counted:
            self._kept.update(self._pending)
        self._pending = {}

    def reset(self) -> None:
        """Starts from zero."""
        self._kept, self._pending, self._saved = {}, {}, None

    def norm(self) -> float:
        """L2 norm over all parameters."""
        return float(sum(float(tensor.square().sum()) for tensor in self._kept.values()) ** 0.5)

    def state_dict(self, round_: int) -> dict[str, Any]:
        """What a checkpoint of a worker that is at a round holds of it."""
        return {"round": round_, "residual": self.state()}

    def load_state_dict(self, state: Mapping[str, Any] | None, manifest: Manifest) -> None:
        """Takes over the residual in a checkpoint, for the round that it is of; until then it is zero.

        Raises ConfigError for one of other tensors.
        """
        self.reset()
        if state is None:
            log.warning("the checkpoint has no residual: it starts from zero")
            return
        shapes = {entry.name: entry.shape for entry in manifest}
        for name, tensor in state["residual"].items():
            if shapes.get(name) != tuple(tensor.shape):
                raise ConfigError(
                    f"the checkpoint has a residual of {name} with shape {list(tensor.shape)}; the run has "
                    f"{list(shapes[name]) if name in shapes else 'no such tensor'}"
                )
        self._saved = state["round"], {name: tensor.clone() for name, tensor in state["residual"].items()}

    def reach(self, round_: int) -> None:
        """The worker contributes to a round: a residual saved for it is taken, one for a round that is past is not."""
        if self._saved is None or self._saved[0] > round_:
            return
        saved, kept = self._saved
        self._saved = None
        if saved == round_:
            self._kept = kept
            log.info("goes on with the checkpoint's residual of round %d", saved)
        else:
            log.warning(
                "the checkpoint's residual is of round %d, this is round %d: it starts from zero", saved, round_
            )

    def state(self) -> dict[str, torch.Tensor]:
        """The residual by parameter name."""
        return dict(self._kept)
