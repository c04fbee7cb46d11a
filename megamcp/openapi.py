"""The control plane's OpenAPI document, with what FastAPI can't be told at the routes.

FastAPI files the model of an error under `application/json`; ours are `application/problem+json` (RFC 9457).
"""

from typing import Any

from fastapi import FastAPI

PROBLEM_JSON = "application/problem+json"


def document_problems(app: FastAPI) -> None:
    """Make `app.openapi()` name the media type of errors."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}, {}]  # none, where the gateway wants none
        for methods in document["paths"].values():
            for operation in methods.values():
                for response in operation["responses"].values():
                    content = response.get("content", {})
                    if PROBLEM_JSON in content and "application/json" in content:
                        content[PROBLEM_JSON] = content.pop("application/json")
        return document

    app.openapi = openapi  # type: ignore[method-assign]
