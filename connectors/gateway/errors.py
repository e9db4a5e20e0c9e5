"""What a client is told when it does not get what it asked for, in the shape of OpenAI's errors."""

from __future__ import annotations

from typing import Any, Final

INVALID: Final = "invalid_request_error"
SERVER: Final = "server_error"


class Refused(Exception):
    """The answer is an error: HTTP `status` and {"error": {message, type, param, code}}. `code` is
    also the reason it is counted under."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = INVALID if self.status < 500 else SERVER
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> Refused:
    """The request can never succeed as it is."""
    return Refused(400, message, code=code, param=param)


def unsupported(param: str, why: str) -> Refused:
    """OpenAI's interface has it, this one does not, and leaving it out would be another answer."""
    return Refused(
        400, f"{param} is not supported: {why}", code="unsupported_parameter", param=param
    )


def no_model(name: str, served: list[str]) -> Refused:
    known = ", ".join(served) or "none yet"
    message = f"The model `{name}` does not exist; served are: {known}"
    return Refused(404, message, code="model_not_found", param="model")


def unavailable(message: str) -> Refused:
    return Refused(503, message, code="engines_unavailable")
