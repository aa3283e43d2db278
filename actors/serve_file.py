"""Checks of a whole Serve config file, whose unknown keys Ray itself drops without a word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from actors.config import AppConfig
from actors.config_error import ConfigError, nearest
from actors.tls import check_options

DEPLOYMENTS = ('Api', 'Router', 'Worker')


def load(path: Path) -> tuple[ServeDeploySchema, AppConfig]:
    """Read a config file with one application of ours.

    Raises:
        ConfigError: A key is unknown at its place, a deployment does not exist, or a value cannot be.
    """
    data = yaml.safe_load(path.read_text())
    _check_keys(data, ServeDeploySchema, path.name)
    http_options = data.get('http_options') or {}
    _check_keys(http_options, HTTPOptionsSchema, 'http_options')
    check_options(http_options)
    applications = data.get('applications') or []
    if len(applications) != 1:
        raise ConfigError(f'{path.name}: expected one application, got {len(applications)}')
    for application in applications:
        _check_keys(application, ServeApplicationSchema, 'applications[0]')
        if application.get('route_prefix', '/') != '/':
            prefix = application['route_prefix']
            raise ConfigError(f"applications[0].route_prefix: got {prefix!r}; the routes start at '/v1', use '/'")
        for index, deployment in enumerate(application.get('deployments') or []):
            _check_deployment(deployment, f'applications[0].deployments[{index}]')
    config = AppConfig.model_validate(applications[0].get('args') or {})
    return ServeDeploySchema.model_validate(data), config


def _check_deployment(deployment: Any, where: str) -> None:
    _check_keys(deployment, DeploymentSchema, where)
    name = deployment.get('name')
    if name not in DEPLOYMENTS:
        raise ConfigError(f'{where}.name: no deployment {name!r}; {nearest(str(name), DEPLOYMENTS)}')
    _check_keys(deployment.get('ray_actor_options') or {}, RayActorOptionsSchema, f'{where}.ray_actor_options')


def _check_keys(data: Any, schema: type[BaseModel], where: str) -> None:
    if not isinstance(data, Mapping):
        raise ConfigError(f'{where}: expected a mapping, got {data!r}')
    for key in data:
        if key not in schema.model_fields:
            raise ConfigError(f'{where}.{key}: unknown key; {nearest(str(key), schema.model_fields)}')
