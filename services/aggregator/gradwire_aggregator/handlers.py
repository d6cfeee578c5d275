"""The service as gRPC handlers: authorization, parsing, and errors as statuses, the same for every call.

Requests are parsed here rather than inside gRPC, so that bytes that are no message end the call with a status of
our own; and what a handler yields as bytes is sent as it is, so that an aggregate is serialized once for all
workers.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from gradwire.errors import ERROR_KEY, STATUS, GradwireError, Unauthenticated
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.wire.calls import TOKEN_KEY, TOKEN_VARIABLE, metadata
from gradwire_aggregator.servicer import Servicer

log = logging.getLogger("gradwire.aggregator")

SERVICE: Final = "gradwire.v1.AggregationService"


def service_handler(servicer: Servicer, token: str | None) -> grpc.GenericRpcHandler:
    """All calls of the service. With a token, calls that don't carry it are refused."""
    methods = pb.DESCRIPTOR.services_by_name["AggregationService"].methods
    handlers = {method.name: _handler(servicer, method, token) for method in methods}
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _handler(servicer: Servicer, method: Any, token: str | None) -> grpc.RpcMethodHandler[Any, Any]:
    behavior = getattr(servicer, method.name)
    request_class = getattr(pb, method.input_type.name)
    expected = metadata(token)[0][1].encode() if token else b""

    def arguments(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        _authorize(context, expected)
        return _parsed(request_class, request) if method.client_streaming else request_class.FromString(request)

    async def unary(request: Any, context: aio.ServicerContext[Any, Any]) -> Message:
        try:
            answer: Message = await behavior(arguments(request, context))
            return answer
        except Exception as error:
            await _abort(context, method.name, error)
            raise  # abort has raised already

    async def stream(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Message | bytes]:
        try:
            async for message in behavior(arguments(request, context)):
                yield message
        except Exception as error:
            await _abort(context, method.name, error)

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    return make(
        stream if method.server_streaming else unary,
        request_deserializer=_as_it_is,
        response_serializer=_serialize,
    )


def _authorize(context: aio.ServicerContext[Any, Any], expected: bytes) -> None:
    if not expected:
        return
    given = next((value for key, value in context.invocation_metadata() or () if key == TOKEN_KEY), "")
    if not hmac.compare_digest(given.encode() if isinstance(given, str) else given, expected):
        raise Unauthenticated(
            f"the run wants a token, and {'this one is wrong' if given else 'none came'}; set {TOKEN_VARIABLE} to the "
            "aggregator's"
        )


def _as_it_is(data: bytes) -> bytes:
    return data


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


async def _parsed(request_class: Any, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in requests:
        yield request_class.FromString(data)


async def _abort(context: aio.ServicerContext[Any, Any], call: str, error: Exception) -> None:
    """Ends a call with the status that stands for an error."""
    if isinstance(error, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{call}: these bytes are no {call} message")
    if isinstance(error, GradwireError) and type(error) in STATUS:
        trailing = ((ERROR_KEY, type(error).__name__),)
        await context.abort(STATUS[type(error)], str(error), trailing_metadata=trailing)
    if isinstance(error, aio.AbortError):
        raise error
    log.exception("%s failed", call)
    await context.abort(grpc.StatusCode.INTERNAL, f"{call} failed inside the aggregator: {error!r}; its log says more")
