"""Every error that gradwire raises on purpose.

Each says what happened, to which tensor or worker, and what to do about it. Errors that cross the wire have one
gRPC status each; `STATUS` is that table, read by the aggregator one way and by the session the other.
"""

from __future__ import annotations

from typing import Final

import grpc


class GradwireError(Exception):
    """Anything gradwire refuses or gives up on. Its text is fit to be shown to a user as it is."""


class ConfigError(GradwireError):
    """A run's config is wrong: the text names the key, the value and what is allowed."""


class NonFiniteGradient(GradwireError):
    """A tensor to be sent holds NaN or infinity, or a value that bf16 can't hold. Nothing was changed."""


class MalformedTensor(GradwireError):
    """Encoded bytes that don't describe a tensor of the expected scheme and shape."""


class ProtocolError(GradwireError):
    """A peer sent a well-formed message that has no meaning at this point of the conversation."""


class ManifestMismatch(GradwireError):
    """A worker's model, data, run or protocol is not the run's. The text gives the first difference."""


class Unauthenticated(GradwireError):
    """The token is missing or wrong."""


class SessionExpired(GradwireError):
    """The aggregator no longer knows this session: its lease ended. Join again."""


class Superseded(GradwireError):
    """A newer process joined under this worker's name. This one has to end."""


class RoundGone(GradwireError):
    """The aggregate of a round is no longer retained. Load the newest snapshot instead."""


class RunEnded(GradwireError):
    """The run is over or shutting down; there is nothing left to join."""


class Unavailable(GradwireError):
    """The aggregator could not be reached, or kept failing, for as long as the worker was willing to try."""


# One row per error that crosses the wire. The status says what a client in any language may do about it; the
# exact class travels beside it in the trailing metadata entry `gradwire-error`.
STATUS: Final[dict[type[GradwireError], grpc.StatusCode]] = {
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    MalformedTensor: grpc.StatusCode.INVALID_ARGUMENT,
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    ManifestMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    SessionExpired: grpc.StatusCode.NOT_FOUND,
    Superseded: grpc.StatusCode.ALREADY_EXISTS,
    RoundGone: grpc.StatusCode.OUT_OF_RANGE,
    RunEnded: grpc.StatusCode.FAILED_PRECONDITION,
}

ERROR_KEY: Final = "gradwire-error"
_BY_NAME: Final = {kind.__name__: kind for kind in STATUS}

# A call that ended with one of these may be tried again: every RPC is safe to repeat. INTERNAL is among them because
# an abort during a client's write can surface as INTERNAL.
RETRYABLE: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.ABORTED,
    }
)


def from_status(name: str | None, code: grpc.StatusCode, details: str) -> GradwireError:
    """The exception for a call that ended with `code`: the class `name` where the peer gave one we know."""
    kind = _BY_NAME.get(name or "")
    if kind is not None:
        return kind(details)
    return GradwireError(f"the aggregator answered {code.name}: {details}")
