# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI description of a service, made from its endpoints."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import fedloom
from fedloom.serving.answers import BUNDLE, PROBLEM, SAFETENSORS

if TYPE_CHECKING:
    from fedloom.serving.app import Endpoint, Service

_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")


def description(service: Service) -> dict[str, Any]:
    """The description as JSON."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in service.endpoints:
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint)
    problem = {
        "type": "object",
        "properties": {
            "title": {"type": "string"}, "status": {"type": "integer"}, "detail": {"type": "string"},
        },
        "required": ["title", "status", "detail"],
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Models of {service.bundle.manifest['name']}",
            "version": fedloom.__version__,
            "description": f"Bundle sha256:{service.bundle.digest}",
        },
        "paths": paths,
        "components": {
            "schemas": {"Problem": problem},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    kind: dict[str, Any] = {"type": "string", "format": "binary"} if endpoint.gives == SAFETENSORS else {}
    wrong = {"description": "Why it is not served", "content": {PROBLEM: {"schema": _ref("Problem")}}}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name, _ in _PARAMETER.findall(endpoint.path)
    ]
    if endpoint.query:
        parameters.append(
            {"name": "architecture", "in": "query", "description": endpoint.query, "schema": {"type": "string"}}
        )
        about = "The digest of the bundle that the vector is for; with another one the answer is 409."
        parameters.append({"name": BUNDLE, "in": "header", "description": about, "schema": {"type": "string"}})
    return {
        "summary": endpoint.summary,
        "operationId": endpoint.respond.__name__,
        "parameters": parameters,
        **({"requestBody": _body(endpoint)} if endpoint.body else {}),
        **({} if endpoint.access == "anybody" else {"security": [{"token": []}]}),
        "responses": {
            "200": {"description": endpoint.summary, "content": {endpoint.gives: {"schema": kind}}},
            "default": wrong,
        },
    }


def _body(endpoint: Endpoint) -> dict[str, Any]:
    schema = {"type": "string", "format": "binary"}
    return {"required": True, "description": endpoint.body, "content": {SAFETENSORS: {"schema": schema}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
