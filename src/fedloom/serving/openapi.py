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
    for endpoint in filter(service.offered, service.endpoints):
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, service)
    problem = {
        "type": "object",
        "properties": {
            "title": {"type": "string"}, "status": {"type": "integer"}, "detail": {"type": "string"},
        },
        "required": ["title", "status", "detail"],
    }  # fmt: skip
    schemes: dict[str, Any] = {"token": {"type": "http", "scheme": "bearer"}}
    if service.settings.client_ca:
        schemes["certificate"] = {"type": "mutualTLS"}
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
            "securitySchemes": schemes,
        },
    }


def _operation(endpoint: Endpoint, service: Service) -> dict[str, Any]:
    kind: dict[str, Any] = {"type": "string", "format": "binary"} if endpoint.gives == SAFETENSORS else {}
    content = {endpoint.gives: {"schema": kind}}
    wrong = {"description": "Why it is not served", "content": {PROBLEM: {"schema": _ref("Problem")}}}
    responses: dict[str, Any] = {"200": {"description": endpoint.summary, "content": content}, "default": wrong}
    parameters = [_parameter("path", name, "", required=True) for name, _ in _PARAMETER.findall(endpoint.path)]
    if endpoint.method == "GET":
        parameters.append(_parameter("header", "Range", "The bytes that are wanted, such as bytes=0-99."))
        responses["206"] = {"description": "Those bytes of it", "content": content}
    if endpoint.tagged:
        parameters.append(_parameter("header", "If-None-Match", "The ETag of the answer that is there already."))
        responses["304"] = {"description": "It has not changed"}
    if endpoint.query:
        parameters.append(_parameter("query", "architecture", endpoint.query))
        about = "The digest of the bundle that the vector is for; with another one the answer is 409."
        parameters.append(_parameter("header", BUNDLE, about))
    ways = _security(endpoint, service)
    return {
        "summary": endpoint.summary,
        "operationId": endpoint.respond.__name__,
        "parameters": parameters,
        **({"requestBody": _body(endpoint)} if endpoint.body else {}),
        **({"security": ways} if ways else {}),
        "responses": responses,
    }


def _security(endpoint: Endpoint, service: Service) -> list[dict[str, list[str]]]:
    """The ways to say who one is, of which one must be taken; none where nobody is asked."""
    token: dict[str, list[str]] = {"token": []}
    if service.settings.client_ca is None:
        return [token] if service.asks_who(endpoint) else []
    certificate: dict[str, list[str]] = {"certificate": []}  # for every connection
    if endpoint.access == "operator":
        return [certificate | token]
    return [certificate, certificate | token] if service.key and service.asks_who(endpoint) else [certificate]


def _parameter(where: str, name: str, about: str, *, required: bool = False) -> dict[str, Any]:
    shown = {"description": about} if about else {}
    return {"name": name, "in": where, "required": required, **shown, "schema": {"type": "string"}}


def _body(endpoint: Endpoint) -> dict[str, Any]:
    schema = {"type": "string", "format": "binary"}
    return {"required": True, "description": endpoint.body, "content": {SAFETENSORS: {"schema": schema}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
