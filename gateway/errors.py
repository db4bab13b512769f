"""Everything that can go wrong, as OpenAI error objects: all four keys, the right status, hints for retries.

ApiError (status, type, param, code)
├── made by handlers and limits for the caller's mistakes (4xx)
└── made by `from_exception` of what routers, engines, stores and the framework raise

A fault of ours is a 500 without detail; the detail is in the log under the request's id. Knows nothing of routes.

Read next: `gateway/app.py` (where they are caught), docs/http.md (the table of codes).
"""

from __future__ import annotations

import math

import msgspec
from litestar.exceptions import HTTPException

from engines.api import EngineDeadError, EngineError, EngineOverloadedError, InvalidRequestError
from engines.text.errors import TextError
from routers.types import BadRequestError, DeadlineExceededError, UnavailableError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    503: "service_unavailable",
    504: "deadline_exceeded",
}


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error object; `param` and `code` are there even when null."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What a failed request answers with, and the one frame that ends a failed stream."""

    error: ErrorBody


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or CODES.get(status, "server_error" if status >= 500 else "invalid_request")
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry

    @property
    def document(self) -> ErrorDocument:
        """The body."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return ErrorDocument(error=ErrorBody(message=str(self), type=kind, param=self.param, code=self.code))

    @property
    def headers(self) -> dict[str, str]:
        """Retry hints as clients read them: whole seconds, milliseconds, and whether to retry at all."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after_s))
            headers["retry-after-ms"] = str(math.ceil(self.retry_after_s * 1000))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def out_of_range(param: str, value: object, allowed: str) -> ApiError:
    """The one sentence of every refused value: field, value, limit."""
    return ApiError(400, f"{param} is {value}; allowed: {allowed}.", param=param, code="invalid_value")


def from_exception(error: Exception) -> ApiError:
    """Any exception as an answer. What is not recognised is a 500 that tells nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadRequestError):
        return ApiError(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), code=error.code, retry_after_s=error.retry_after_s)
    if isinstance(error, DeadlineExceededError):
        return ApiError(504, str(error), code=error.code)
    if isinstance(error, EngineError | TextError):
        return from_engine(error)
    if isinstance(error, HTTPException):
        return from_framework(error)
    return ApiError(500, "The server met an error. The request id names it in the server's log.", code="server_error")


def from_engine(error: Exception) -> ApiError:
    """What an engine or its text room raised past the routers."""
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.field or None, code="invalid_value")
    if isinstance(error, EngineOverloadedError):
        return ApiError(503, str(error), code="engine_overloaded", retry_after_s=error.retry_after_s)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "The engine is being restarted. Try again in a moment.", retry_after_s=1.0)
    if isinstance(error, TextError):
        return ApiError(400, str(error))
    return ApiError(503, "The engine met a fault with this request.", code="engine_fault", retry_after_s=1.0)


def from_framework(error: HTTPException) -> ApiError:
    """Litestar's own refusals, without its body format."""
    messages = {
        404: "There is no such route. Routes are listed in docs/http.md and at /v1/models.",
        405: "This route does not take that method.",
    }
    return ApiError(error.status_code, messages.get(error.status_code, error.detail or "The request was refused."))
