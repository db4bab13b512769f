"""Every exception as an OpenAI error object with the right status."""

from __future__ import annotations

import pytest
from litestar.exceptions import MethodNotAllowedException, NotFoundException

from engines.api import EngineDeadError, EngineFaultError, EngineOverloadedError, InvalidRequestError
from gateway.errors import ApiError, from_exception
from routers.types import BadRequestError, DeadlineExceededError, UnavailableError


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (BadRequestError("x", param="p", code="c"), 400, "invalid_request_error", "c"),
        (
            BadRequestError("x", param="model", code="model_not_found", status=404),
            404,
            "not_found_error",
            "model_not_found",
        ),
        (UnavailableError("x", retry_after_s=2.0), 503, "server_error", "engine_unavailable"),
        (DeadlineExceededError("x"), 504, "server_error", "deadline_exceeded"),
        (InvalidRequestError("x", field="n"), 400, "invalid_request_error", "invalid_value"),
        (EngineOverloadedError("x"), 503, "server_error", "engine_overloaded"),
        (EngineDeadError("x"), 503, "server_error", "service_unavailable"),
        (EngineFaultError("x"), 503, "server_error", "engine_fault"),
        (NotFoundException(), 404, "not_found_error", "not_found"),
        (MethodNotAllowedException(), 405, "invalid_request_error", "method_not_allowed"),
        (ZeroDivisionError("secret path /x"), 500, "server_error", "server_error"),
    ],
)
def test_status_type_and_code(error: Exception, status: int, kind: str, code: str) -> None:
    answer = from_exception(error)
    body = answer.document.error
    assert (answer.status, body.type, body.code) == (status, kind, code)
    assert "secret" not in body.message


def test_retry_hints() -> None:
    error = ApiError(429, "x", retry_after_s=1.25, should_retry=False)
    assert error.headers == {"retry-after": "2", "retry-after-ms": "1250", "x-should-retry": "false"}
